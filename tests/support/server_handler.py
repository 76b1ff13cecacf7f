"""The request handler of the scripted server, without threads."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from support import response_bodies, server_requests
from support.replies import Reply, Script, canned, error_body
from support.server_requests import ReceivedRequest, RequestLog

Json = Any

KINDS = {
    "/chat/completions/batch": "batch",
    "/chat/completions": "chat",
    "/completions": "completions",
    "/embeddings": "embeddings",
}
PROOF = "Hi"  # asked for one token by a client that wants to know whether the server works
DROPPED = 599  # stands for "no answer"; never sent
GIVE_UP = 30.0  # seconds after which a gate or barrier lets go, so that no test hangs


def kind_of(path: str) -> str | None:
    """Return which API a path belongs to, under any base; None for everything else."""
    return next((kind for suffix, kind in KINDS.items() if path.endswith(suffix)), None)


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of a server besides its script; every field is a keyword of ``FakeServer``.

    ``flavour``: ``openai`` serves models, chat, completions and embeddings; ``vllm`` serves
    ``/version``, ``/health``, ``/metrics``, ``/tokenize``, ``/detokenize`` and
    ``/v1/chat/completions/batch`` besides.
    ``row_pattern``: the regular expression whose first group is the row id in a prompt.
    ``rate``: requests per second, above it 429.
    ``refuse``: parameter -> the one to use instead; a request with it is a 400.
    """

    model: str = "fake-model"
    models: list[dict[str, Json]] | None = None
    max_model_len: int | None = 32768
    flavour: Literal["openai", "vllm"] = "openai"
    version: str = "0.33.0"
    row_pattern: str = r"\bid=([^\s<>]+)"
    api_key: str | None = None
    rate: float | None = None
    refuse: dict[str, str] = {}


class ScriptServer:
    """Answers requests by a script; one object per listening server, on one event loop.

    Attributes:
        edit: called with the body of each good answer and the request, before it is sent.
        check: called with each request; text that it returns is a 400 and a fault.
    """

    def __init__(self, script: Script | None, options: Options) -> None:
        self.options = options
        self.ledger = RequestLog()
        self.edit: Callable[[Json, ReceivedRequest], Json] | None = None
        self.check: Callable[[ReceivedRequest], str | None] | None = None
        self._row = re.compile(options.row_pattern)
        self._recent: list[float] = []
        self._number = 0
        self.connections: set[Any] = set()
        self._gates: dict[str, asyncio.Event] = {}
        self._closing = asyncio.Event()
        self.set_script(script)

    def set_script(self, script: Script | None) -> None:
        """Use another script from now on; every row starts at its first reply."""
        self.script: dict[str, Sequence[Reply]] = dict(script or {"*": [canned()]})
        self._place: dict[str, int] = {}

    def release(self, gate: str) -> None:
        """Let go what the gate holds back, now and later."""
        self._gates.setdefault(gate, asyncio.Event()).set()

    def shut(self) -> None:
        """End every reply that hangs."""
        self._closing.set()

    def reopen(self) -> None:
        """Get ready to serve on another event loop; released gates stay open."""
        self._closing = asyncio.Event()
        released = [name for name, gate in self._gates.items() if gate.is_set()]
        self._gates = {name: asyncio.Event() for name in released}
        for gate in self._gates.values():
            gate.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        received = time.monotonic()
        self.connections.add(request.protocol)
        raw = await request.read()
        self._number += 1
        seen = ReceivedRequest(
            number=self._number,
            method=request.method,
            path=request.path,
            target=request.raw_path,
            headers={name.lower(): value for name, value in request.headers.items()},
            raw=raw,
            received=received,
        )
        kind = kind_of(request.path) if request.method == "POST" else None
        if kind == "batch" and self.options.flavour != "vllm":
            kind = None
        if kind is None:
            self.ledger.probes.append(seen)
            return self._probe(seen)
        return await self._generate(kind, seen, request)

    # ---------------------------------------------------------------- answers

    async def _generate(
        self, kind: str, seen: ReceivedRequest, request: web.BaseRequest
    ) -> web.StreamResponse:
        try:
            seen.body = msgspec.json.decode(seen.raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            seen.body = None
        seen.prompts = server_requests.prompts(kind, seen.body)
        found = (self._row.search(prompt) for prompt in seen.prompts)
        seen.rows = tuple(match[1] if match else "" for match in found)
        if seen.prompts == (PROOF,):
            self.ledger.probes.append(seen)
            return await self._admit(kind, seen, request)
        self.ledger.begin(seen)
        status: int | None = None
        try:
            response = await self._admit(kind, seen, request)
            status = response.status if response.status != DROPPED else None
            return response
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            self.ledger.end(seen, status)

    async def _admit(
        self, kind: str, seen: ReceivedRequest, request: web.BaseRequest
    ) -> web.StreamResponse:
        if not self._has_key(seen):
            return _error(401)
        if self.options.rate is not None and not self._within_rate(self.options.rate):
            return _error(429)
        words = self._complaint(kind, seen)
        return _error(400, words) if words else await self._scripted(kind, seen, request)

    def _has_key(self, seen: ReceivedRequest) -> bool:
        key = self.options.api_key
        return not key or seen.headers.get("authorization") == f"Bearer {key}"

    def _within_rate(self, rate: float) -> bool:
        now = time.monotonic()
        self._recent = [at for at in self._recent if at > now - 1.0]
        within = len(self._recent) < rate
        self._recent += [now] * within
        return within

    def _complaint(self, kind: str, seen: ReceivedRequest) -> str | None:
        """Return what is wrong with the request; a fault is noted unless it was asked for."""
        for name, other in self.options.refuse.items():
            if isinstance(seen.body, dict) and name in seen.body:
                return (
                    f"Unsupported parameter: '{name}' is not supported with this model. "
                    f"Use '{other}' instead."
                )
        words = server_requests.complaint(kind, seen.body)
        if words is None and self.check is not None:
            words = self.check(seen)
        if words is not None:
            self.ledger.faults.append(f"{seen.path} {seen.rows}: {words}")
        return words

    async def _scripted(
        self, kind: str, seen: ReceivedRequest, request: web.BaseRequest
    ) -> web.StreamResponse:
        if kind == "embeddings":
            body = response_bodies.embeddings(seen, self.options.model)
            return _json(self.edit(body, seen) if self.edit else body)
        unscripted_proof = seen.prompts == (PROOF,) and "*" not in self.script
        replies = [canned()] if unscripted_proof else self._next(seen.rows)
        if replies is None:
            self.ledger.faults.append(f"no reply is scripted for {seen.rows}")
            return _error(400, "no reply is scripted for this row")
        try:
            await self._hold(replies)
        except TimeoutError:
            self.ledger.faults.append(f"{seen.rows} was held back for {GIVE_UP} s")
            return _error(504)
        bad = next((reply for reply in replies if not reply.good), None)
        if bad is not None:
            return await self._act(bad, request)
        body = response_bodies.response(kind, seen, replies, self.options.model)
        if seen.body.get("return_prompt_text") and kind == "chat":
            body["prompt_text"] = server_requests.render(seen.body["messages"])
        if seen.body.get("return_token_ids") and self.options.flavour == "vllm":
            response_bodies.add_token_ids(kind, body, seen)
        if self.edit is not None:
            body = self.edit(body, seen)
        if seen.body.get("stream"):
            chunks = response_bodies.streamed(kind, body, seen.body)
            reply = Reply(action="stream", chunks=chunks, headers=replies[0].headers)
            return await self._stream(reply, request)
        return _body(replies[0], response_bodies.encode(body))

    def _next(self, rows: tuple[str, ...]) -> list[Reply] | None:
        """Return each row's next reply; where one is bad, it alone counts as given."""
        names = [row if row in self.script else "*" for row in rows]
        if not all(name in self.script for name in names):
            return None
        replies = []
        for row, name in zip(rows, names, strict=True):
            listed = self.script[name]
            replies.append(listed[min(self._place.get(row, 0), len(listed) - 1)])
        bad = [place for place, reply in enumerate(replies) if not reply.good]
        for place in bad[:1] or range(len(rows)):
            self._place[rows[place]] = self._place.get(rows[place], 0) + 1
        return replies

    async def _hold(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if reply.delay:
                await asyncio.sleep(reply.delay)
            if reply.gate is not None:
                gate = self._gates.setdefault(reply.gate, asyncio.Event())
                async with asyncio.timeout(GIVE_UP):
                    await gate.wait()

    async def _act(self, reply: Reply, request: web.BaseRequest) -> web.StreamResponse:
        if reply.action == "close":
            return _drop(request, reply.reset)
        if reply.action == "stream":
            return await self._stream(reply, request)
        if reply.action == "hang":
            try:
                async with asyncio.timeout(reply.seconds):
                    await self._closing.wait()
            except TimeoutError:
                pass
            return _drop(request, reset=False)
        if reply.action == "wire" and request.transport is not None:
            request.transport.write(reply.content or b"")
            await asyncio.sleep(0.02)
            return _drop(request, reset=False)
        data = response_bodies.encode(reply.body) if reply.content is None else reply.content
        return _body(reply, data)

    async def _stream(self, reply: Reply, request: web.BaseRequest) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", **reply.headers}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for chunk in reply.chunks:
            await response.write(response_bodies.sse(chunk))
            if reply.gap:
                await asyncio.sleep(reply.gap)
        if reply.end == "done":
            await response.write(b"data: [DONE]\n\n")
        if reply.end == "cut":
            await asyncio.sleep(0.02)
            _drop(request, reset=True)
            return response
        await response.write_eof()
        return response

    # ---------------------------------------------------------------- everything else

    def _probe(self, seen: ReceivedRequest) -> web.Response:
        path = seen.path.rstrip("/")
        if path.endswith("/models"):
            return self._models(seen)
        if self.options.flavour != "vllm":
            return _error(404, "Not Found")
        if seen.method == "GET" and (kind_of(path) or path.endswith("tokenize")):
            return _json({"detail": "Method Not Allowed"}, 405)
        match path.rpartition("/")[2]:
            case "health":
                return web.Response()
            case "version":
                return _json({"version": self.options.version})
            case "metrics":
                return web.Response(text=self._metrics(), content_type="text/plain")
            case "detokenize":
                tokens = msgspec.json.decode(seen.raw)["tokens"]
                return _json({"prompt": server_requests.decode_tokens(tokens)})
            case "tokenize":
                return self._tokenize(msgspec.json.decode(seen.raw))
        return _error(404, "Not Found")

    def _models(self, seen: ReceivedRequest) -> web.Response:
        options = self.options
        if not self._has_key(seen):
            return _error(401)
        if options.models is not None:
            return _json({"object": "list", "data": options.models})
        model: dict[str, Json] = {"id": options.model, "object": "model", "owned_by": "fake"}
        if options.flavour == "vllm":
            model |= {"owned_by": "vllm", "max_model_len": options.max_model_len}
        return _json({"object": "list", "data": [model]})

    def _tokenize(self, body: Json) -> web.Response:
        text = body.get("prompt")
        if text is None:
            text = server_requests.render(body["messages"], body.get("add_generation_prompt", True))
        tokens = server_requests.encode_tokens(text)
        limit = self.options.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    def _metrics(self) -> str:
        running = {"num_requests_running": self.ledger.in_flight}
        others = ("num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        caches = ("prefix_cache_queries_total", "prefix_cache_hits_total")
        values = running | dict.fromkeys(others + caches, 0)
        label = f'{{model_name="{self.options.model}",engine="0"}}'
        return "".join(f"vllm:{name}{label} {value:.1f}\n" for name, value in values.items())


def _json(value: Json, status: int = 200) -> web.Response:
    body = response_bodies.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, words: str | None = None) -> web.Response:
    return _json(error_body(status, words), status)


def _drop(request: web.BaseRequest, reset: bool) -> web.Response:
    """Drop the connection; the response that is returned never gets out."""
    if request.transport is not None:
        if reset:
            request.transport.abort()
        else:
            request.transport.close()
    return web.Response(status=DROPPED)


def _body(reply: Reply, data: bytes) -> web.Response:
    headers = {"Content-Type": reply.content_type, **reply.headers}
    return web.Response(body=data, status=reply.status, headers=headers)
