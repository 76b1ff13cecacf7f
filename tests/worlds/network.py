"""Simulated network and servers: OpenAI-compatible endpoints in the form of vLLM, byte by byte."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import msgspec

from bagent.backends.http.connection import Connection
from worlds import agents, stages
from worlds.clock import WorldClock
from worlds.replies import (
    GOOD,
    MAX_TOKENS,
    MODEL,
    answer_limit,
    answer_text,
    base_kind,
    body_of,
    error_body,
    head_of,
    is_good,
    list_body,
    status_of,
    streamed,
    texts_of,
    tokens_of,
)
from worlds.spec import EndpointSpec, Window, World

KEY = "sk-world-secret-0123456789"
DELAY = 0.001
"""Seconds for which bytes travel."""

MARK = re.compile(rb"<<(\d+)v(\d+)>>")
"""The number of a row and its version in a prompt."""


@dataclass
class Sent:
    """One request with rows, as the server saw it."""

    start: int
    endpoint: int
    at: float
    rows: tuple[int, ...]
    versions: tuple[int, ...] = ()
    reply: str = ""
    replies: tuple[str, ...] = ()
    """What each row of the request would get by itself."""
    by_endpoint: bool = False
    """The reply is the endpoint's fault, whatever the row."""
    status: int | None = None
    done: float | None = None
    """When the last byte of the answer, or the end of the connection, reached the client."""
    retry_after: float | None = None
    first_at: float | None = None
    """When the first piece of a streamed answer was sent."""
    limit: int | None = None
    """The tokens that its answer may have."""
    tokens: int = 0
    """The tokens of its prompt."""
    arrived: bool = False
    """The whole answer reached the client."""
    gone: float | None = None
    """When the client closed the connection before that."""
    turns: int = 0
    """Turns with tool calls that an agent's request holds."""
    answers: tuple[agents.ToolAnswer, ...] = ()
    """The answers to tool calls that it holds."""
    stage: str = ""
    prompt: str = ""
    keys: tuple[str, ...] = ()
    """What tells a request of a stage from all others."""
    wrong: str = ""
    """What is wrong with its conversation."""
    idle: float | None = None
    """For how many seconds its connection had been idle; None: it was new."""
    calls: int = 0
    """The model calls that it carries; 0: as many as rows."""
    streamed: bool = False
    """It asked for its answer in pieces."""

    @property
    def over(self) -> float | None:
        """When the request ended for the client; None: it never did."""
        return self.gone if self.done is None else self.done


@dataclass
class Network:
    """All endpoints of a world, and what they were sent.

    Args:
        alive: returns whether the client still takes bytes.
    """

    world: World
    clock: WorldClock
    sent: list[Sent] = field(default_factory=list)
    start: int = 0
    alive: Callable[[], bool] = lambda: True
    connections: list[ServerConnection] = field(default_factory=list)
    asked: Counter[int] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    asked_at: list[tuple[float, int]] = field(default_factory=list)
    """When each endpoint got a request or a connection, of whatever kind."""
    levels: dict[int, tuple[float, float]] = field(default_factory=dict)
    """How many requests each server with a pace would take, and when it was so many."""
    crashes: list[list[Window]] = field(default_factory=list)
    """When each endpoint was down, since a row had crashed it."""

    def __post_init__(self) -> None:
        self.crashes = [[] for _ in self.world.endpoints]

    def begin_process(self, number: int, connections: Sequence[ServerConnection] = ()) -> None:
        """Prepare for the next process: connections of the last one are gone.

        Args:
            number: the number of its start.
            connections: those of a process that was suspended, as :meth:`end_process` gave them.
        """
        self.start = number
        self.connections = list(connections)
        self.in_flight.clear()
        for connection in connections:
            self.in_flight[connection.index] += connection.rows_in_flight

    def end_process(self) -> list[ServerConnection]:
        """Return the connections of the current process, which stays suspended for a while."""
        return self.connections

    def begin_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Plan what happens to connections of a new event loop."""
        for index, endpoint in enumerate(self.world.endpoints):
            for window in endpoint.windows:
                if window.kind == "down" and window.begin > self.clock.now:
                    loop.call_later(window.begin - self.clock.now, self._drop_all, index)

    def _drop_all(self, index: int) -> None:
        for connection in list(self.connections):
            if connection.index == index:
                connection.drop(ConnectionResetError(104, "Connection reset by peer"))

    def crash(self, index: int, seconds: float) -> None:
        """Take an endpoint down for some time."""
        self.crashes[index].append(Window(self.clock.now, self.clock.now + seconds, "down"))
        self._drop_all(index)

    def admit(self, index: int, pace: int) -> float:
        """Take a request from the bucket of a server with a pace; return the seconds until it takes
        one, or 0.0."""
        level, at = self.levels.get(index, (float(pace), self.clock.now))
        level = min(float(pace), level + (self.clock.now - at) * pace / 60.0)
        taken = level >= 1.0
        self.levels[index] = level - taken, self.clock.now
        return 0.0 if taken else (1.0 - level) * 60.0 / pace

    def limits(self, index: int, pace: int) -> dict[str, str]:
        """Return the headers that name the limits of a server with a pace."""
        level, _ = self.levels.get(index, (float(pace), 0.0))
        reset = (pace - level) * 60.0 / pace
        return {
            "x-ratelimit-limit-requests": str(pace),
            "x-ratelimit-remaining-requests": str(int(level)),
            "x-ratelimit-reset-requests": f"{reset:.3f}s",
        }

    def windows(self, index: int) -> tuple[Window, ...]:
        """Return when an endpoint was not well."""
        return (*self.world.endpoints[index].windows, *self.crashes[index])

    def state(self, index: int) -> str | None:
        """Return what ails an endpoint now."""
        for window in self.windows(index):
            if window.begin <= self.clock.now < window.end:
                return window.kind
        return None

    def state_at(self, index: int, begin: float, end: float) -> str | None:
        """Return what ails an endpoint between two times."""
        for window in self.windows(index):
            if window.begin < end and begin < window.end:
                return window.kind
        return None

    async def connect(self, host: str, port: int) -> Connection:
        """Open a connection."""
        index = int(host.removeprefix("server"))
        self.asked_at.append((self.clock.now, index))
        await asyncio.sleep(DELAY)
        state = self.state(index)
        if state == "silent":
            await asyncio.get_running_loop().create_future()
        if state == "down":
            raise ConnectionRefusedError(111, "Connection refused")
        connection = Connection()
        server = ServerConnection(self, index, connection)
        self.connections.append(server)
        connection.connection_made(server)
        return connection


class ServerConnection(asyncio.Transport):
    """One connection, seen by the client as its transport."""

    def __init__(self, network: Network, index: int, client: Connection) -> None:
        super().__init__()
        self._network = network
        self.index = index
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._closed = False
        self._sent: Sent | None = None
        self._idle_since: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    # --- the client's side ------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Take bytes of a request."""
        if self._closed:
            return
        self._buffer += bytes(data)
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        match = re.search(rb"content-length: (\d+)", head, re.I)
        if match and len(body) < int(match[1]):
            return
        self._buffer = b""
        self._later(DELAY, self._serve, head, body)

    def writelines(self, list_of_data: Any) -> None:
        """Take bytes of a request in pieces."""
        self.write(b"".join(list_of_data))

    @property
    def rows_in_flight(self) -> int:
        """How many rows it is working on."""
        return 0 if self._sent is None else len(self._sent.rows)

    def is_closing(self) -> bool:
        """Return whether the connection is closed."""
        return self._closed

    def close(self) -> None:
        """Close the connection."""
        self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._closed:
            return
        if self._sent is not None and self._sent.done is None:
            self._sent.gone = self._network.clock.now
        self._end()
        self._loop.call_soon(self._client.connection_lost, None)

    # --- the server's side ------------------------------------------------------------------------

    def drop(self, error: Exception | None) -> None:
        """Close the connection from the server's side."""
        if self._closed:
            return
        if self._sent is not None and self._sent.done is None:
            self._sent.done = self._network.clock.now
            self._sent.retry_after = None  # the client never heard of it
        self._end()
        if self._network.alive():
            self._client.connection_lost(error)

    def _end(self) -> None:
        self._closed = True
        self._finish()
        for timer in self._timers:
            timer.cancel()
        if self in self._network.connections:
            self._network.connections.remove(self)

    def _finish(self) -> None:
        if self._sent is not None:
            self._network.in_flight[self.index] -= len(self._sent.rows)
            self._sent = None

    def _later(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._timers = [timer for timer in self._timers if not timer.cancelled()][-4:]
        self._timers.append(self._loop.call_later(seconds, action, *args))

    def _serve(self, head: bytes, body: bytes) -> None:
        network = self._network
        method, path = head.split(b" ", 2)[:2]
        state = network.state(self.index)
        state = "hang" if state == "silent" else state
        network.asked_at.append((network.clock.now, self.index))
        spec = network.world.endpoints[self.index]
        if path == b"/tokenize" and spec.tokenizes and state is None:
            count = {"count": tokens_of(msgspec.json.decode(body)), "max_model_len": spec.context}
            self._later(0.01, self._respond, 200, msgspec.json.encode(count), {})
            return
        if method == b"GET" or not (b"completions" in path or b"embeddings" in path):
            self._serve_other(path.decode(), state)
            return
        request = msgspec.json.decode(body)
        texts = texts_of(request)
        marks = [match for text in texts if (match := MARK.search(text.encode()))]
        answer = int(request.get("seed") or 1) - 1 if network.world.job.answers > 1 else 0
        rows = tuple(network.world.unit(int(mark[1]), answer) for mark in marks)
        if not rows or answer_limit(request) == 1:
            self._reply(None, state or "ok", 0.05, request)
            return
        versions = tuple(int(mark[2]) for mark in marks)
        sent = Sent(network.start, self.index, network.clock.now, rows, versions)
        sent.limit, sent.tokens = answer_limit(request), tokens_of(request)
        sent.streamed = bool(request.get("stream"))
        if self._idle_since is not None:
            sent.idle = sent.at - self._idle_since
        if "input" in request:
            sent.stage, sent.keys, sent.calls = "vector", tuple(texts), 1
        elif network.world.job.kind == "stages":
            sent.stage, sent.prompt, digest = stages.read_prompt(request, self.index)
            sent.keys = (digest,)
        network.sent.append(sent)
        network.in_flight[self.index] += len(rows)
        self._sent = sent
        state = state or self._refusal(spec, request)
        reply, seconds = self._choose(spec, sent, state)
        sent.reply, sent.by_endpoint = reply, state is not None
        if request.get("tools"):
            self._read_turns(sent, request["messages"])
        self._reply(sent, reply, seconds, request)

    def _refusal(self, spec: EndpointSpec, request: dict[str, Any]) -> str | None:
        """Return why a server that is well does not take a request."""
        network = self._network
        if spec.refuses and spec.refuses in request:
            return f"refuses-{spec.refuses}"
        if tokens_of(request) + MAX_TOKENS > spec.context:
            return "overflow"
        if spec.capacity is not None and network.in_flight[self.index] > spec.capacity:
            return "503"
        if spec.pace is not None and (seconds := network.admit(self.index, spec.pace)):
            return f"429+{int(seconds) + 1}" if spec.tells == "after" else "429"
        return None

    def _read_turns(self, sent: Sent, messages: list[dict[str, Any]]) -> None:
        """Note the conversation of an agent; a good reply may ask for tools."""
        sent.turns, answers, sent.wrong = agents.read_conversation(messages)
        sent.answers = tuple(answers)
        calls = self._network.world.units[sent.rows[0]].calls
        if is_good(sent.reply) and sent.turns < len(calls):
            sent.reply, sent.replies = "tools", ("tools",)

    def _choose(self, spec: EndpointSpec, sent: Sent, state: str | None) -> tuple[str, float]:
        """Return the reply to a request and its seconds; the first bad row decides for all."""
        if state is not None:
            return state, 0.05
        asked, rows = self._network.asked, self._network.world.units
        replies = [
            rows[row].replies[min(asked[row], len(rows[row].replies) - 1)]
            if rows[row].stage == sent.stage
            else "ok"
            for row in sent.rows
        ]
        if sent.stage == "vector":  # such an answer has no end
            replies = [
                "ok" if reply in ("length", "filter", "usage") else reply for reply in replies
            ]
        seconds = max(rows[row].seconds for row in sent.rows) * spec.speed
        bad = [n for n, reply in enumerate(replies) if base_kind(reply) not in GOOD]
        if sent.stage == "reduce" and replies == ["overflow"] and sent.prompt.count("\n") <= 2:
            replies = ["ok"]  # a prompt of two answers fits
        sent.replies = tuple(replies)
        for number in bad[:1] or range(len(replies)):
            if rows[sent.rows[number]].stage == sent.stage:
                asked[sent.rows[number]] += 1
        return replies[bad[0] if bad else 0], seconds

    def _serve_other(self, path: str, state: str | None) -> None:
        if state == "hang":
            return
        if state == "lost-model":
            models: list[dict[str, Any]] = []
        else:
            context = self._network.world.endpoints[self.index].context
            models = [
                {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": context}
            ]
        if path.startswith("/v1/models"):
            status = status_of(state)
            if status != 200:
                self._later(0.01, self._respond, status, error_body(status, "not now"), {})
                return
            body = msgspec.json.encode({"object": "list", "data": models})
            self._later(0.01, self._respond, 200, body, {})
        elif path.startswith("/version"):
            self._later(0.01, self._respond, 200, b'{"version":"0.9.0"}', {})
        else:
            self._later(0.01, self._respond, 404, error_body(404, "Not Found"), {})

    def _reply(
        self,
        sent: Sent | None,
        reply: str,
        seconds: float,
        request: dict[str, Any],
    ) -> None:
        kind, _, wait = reply.partition("+")
        kind, _, length = kind.partition(":")
        if kind == "hang":
            return
        if kind == "crash":  # the process dies with the row
            self._later(seconds, self._network.crash, self.index, float(length))
            return
        stalled = float(length) if kind == "stall" else 0.0
        seconds = float(length) if kind in ("slow", "late") else seconds
        if kind == "reset":
            self._later(seconds, self.drop, ConnectionResetError(104, "reset"))
            return
        headers = self._headers(sent, wait, seconds)
        if sent is not None and isinstance(request.get("prompt"), list) and kind in GOOD:
            status, body = 200, list_body(request, sent)
        else:
            text = "yes"
            if sent is not None:
                text = answer_text(sent.rows[0], sent.versions[0], self._network.world.job.kind)
                if sent.stage:
                    text = stages.answer_text(sent.stage, sent.prompt, sent.keys[0])
            status, body = body_of(kind, request, text)
            if "input" in request and kind in (*GOOD, "blank", "nochoice"):
                body = msgspec.json.encode(stages.vectors_body(kind, texts_of(request)))
        if sent is not None and status == 200 and sent.stage != "vector":
            body = self._with_calls(sent, body)
        first = 0
        if request.get("stream") and status == 200 and kind not in ("junk", "error200"):
            headers["Content-Type"] = "text/event-stream"
            body, first = streamed(msgspec.json.decode(body))
        cut = kind == "cut"
        if (first or stalled) and not cut:  # the tool calls come before the end
            first = first or len(body) // 2
            self._later(seconds / 2, self._begin_response, body[:first], len(body), headers)
            self._later(seconds + stalled, self._end_response, body[first:])
        else:
            self._later(seconds, self._respond, status, body, headers, cut and (first or 0.5))

    def _headers(self, sent: Sent | None, wait: str, seconds: float) -> dict[str, str]:
        """Return the headers of a reply about rates."""
        headers = self._retry_after(sent, wait, seconds) if wait and sent is not None else {}
        spec = self._network.world.endpoints[self.index]
        if spec.pace is not None and spec.tells == "limits":
            headers |= self._network.limits(self.index, spec.pace)
        return headers

    def _retry_after(self, sent: Sent, wait: str, seconds: float) -> dict[str, str]:
        """Return the header that names when to ask again."""
        sent.retry_after = float(wait.lstrip("dm"))
        if wait.startswith("d"):
            due = self._network.clock.wall() + seconds + sent.retry_after
            sent.retry_after -= 1.0  # dates have whole seconds
            return {"Retry-After": formatdate(due, usegmt=True)}
        if wait.startswith("m"):
            sent.retry_after /= 1000.0
            return {"retry-after-ms": wait[1:]}
        return {"Retry-After": wait}

    def _with_calls(self, sent: Sent, body: bytes) -> bytes:
        """Return a reply with the tool calls of its turn, whether it arrives or not."""
        row, version = sent.rows[0], sent.versions[0]
        spec = self._network.world.units[row]
        good = sent.reply == "tools" or base_kind(sent.reply) == "cut"
        if not good or sent.turns >= len(spec.calls):
            return body
        reply = msgspec.json.decode(body)
        reply["choices"][0]["message"]["content"] = None
        reply["choices"][0]["message"]["tool_calls"] = agents.tool_calls(
            spec, row, version, sent.turns
        )
        reply["choices"][0]["finish_reason"] = "tool_calls"
        return msgspec.json.encode(reply)

    def _respond(self, status: int, body: bytes, headers: dict[str, str], cut: float = 0.0) -> None:
        """Send a response; ``cut`` is the number or the share of the bytes that are sent of it."""
        if self._closed or not self._network.alive():
            return
        if self._sent is not None:
            self._sent.status, self._sent.done = status, self._network.clock.now
            self._sent.arrived = not cut
        head = head_of(status, len(body), headers)
        if cut:
            self._client.data_received(head + body[: int(cut if cut > 1 else len(body) * cut)])
            self.drop(None)
            return
        self._finish()
        self._idle_since = self._network.clock.now
        self._client.data_received(head + body)

    def _begin_response(self, body: bytes, size: int, headers: dict[str, str]) -> None:
        """Send the first part of a stream."""
        if self._closed or not self._network.alive():
            return
        if self._sent is not None:
            self._sent.status, self._sent.first_at = 200, self._network.clock.now
        self._client.data_received(head_of(200, size, headers) + body)

    def _end_response(self, body: bytes) -> None:
        """Send the last part of a stream."""
        if self._closed or not self._network.alive():
            return
        if self._sent is not None:
            self._sent.status, self._sent.done = 200, self._network.clock.now
            self._sent.arrived = True
        self._finish()
        self._idle_since = self._network.clock.now
        self._client.data_received(body)
