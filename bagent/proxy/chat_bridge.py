"""A local OpenAI-compatible address in front of a provider with another protocol, such as Bedrock.

Chats come in and go out through the provider's backend. Bedrock's requests are signed one by one
and its streams are binary, so they cannot be forwarded or measured as plain HTTP.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from bagent.backends.base import Backend, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.messages import assistant_message
from bagent.backends.openai.chat import PROVIDER_BLOCKS
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.proxy.auth import address_guard, client_closed_response, new_token, token_guard
from bagent.servers.resolve import Servers
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Reply, Usage

DONE = b"data: [DONE]\n\n"

_TYPES = {
    "budget": "insufficient_quota",
    "rate_limited": "rate_limit_exceeded",
    "overloaded": "overloaded_error",
    "auth": "authentication_error",
    "context_overflow": "context_length_exceeded",
    "refused": "content_filter",
    "rejected": "invalid_request_error",
    "timeout": "timeout",
}
"""``type`` and ``code`` of an error, by failure kind."""

_STATUS = {"timeout": 504, "rejected": 400, "auth": 401, "refused": 400, "context_overflow": 400}
_KEPT_STATUS = frozenset({408, 429})
_HEAD = re.compile(r"HTTP \d{3}: ")


def completion(reply: Reply, model: str) -> dict[str, Json]:
    """Return a complete answer; ``model`` is the requested name."""
    message = {**assistant_message(reply), "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.refusal:
        message["refusal"] = reply.refusal
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    return {
        "id": reply.request_id or f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model or model,
        "choices": [choice],
        "usage": usage_of(reply.usage),
    }


def usage_of(usage: Usage) -> dict[str, Json]:
    """Return token counts, null for unknown ones."""
    prompt, answer = usage.prompt, usage.completion
    total = None if prompt is None or answer is None else prompt + answer
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class StreamId(msgspec.Struct, frozen=True):
    """What all chunks of a streamed answer have in common."""

    id: str
    model: str


def chunk_bytes(stream: StreamId, kind: str, text: str) -> bytes:
    """Return a chunk of a streamed answer; ``kind`` is ``text`` or ``reasoning``."""
    name = "content" if kind == "text" else "reasoning_content"
    return _chunk(stream, {"role": "assistant", name: text})


def last_chunks(
    stream: StreamId, result: Reply | Failure, *, streamed: bool, usage: bool
) -> Iterator[bytes]:
    """Yield the end of a stream: tool calls, finish reason and usage.

    Args:
        stream: the answer.
        result: how it ended.
        streamed: whether text and reasoning have been sent.
        usage: whether the client wants token counts.
    """
    if isinstance(result, Failure):
        status, body = _error(result)
        yield _event({"error": {**body["error"], "code": status}})
        return
    if not streamed:
        for kind, text in (("reasoning", result.reasoning), ("text", result.text)):
            if text:
                yield chunk_bytes(stream, kind, text)
    message = assistant_message(result)
    delta = {name: message[name] for name in message.keys() - {"role", "content"}}
    if result.tool_calls:
        calls = message["tool_calls"]
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    yield _chunk(stream, delta, result.finish_reason)
    if usage:
        yield _event({**_head(stream), "choices": [], "usage": usage_of(result.usage)})
    yield DONE


def _head(stream: StreamId) -> dict[str, Json]:
    return {
        "id": stream.id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": stream.model,
    }


def _chunk(stream: StreamId, delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head(stream), "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + encode_payload(value) + b"\n\n"


def error_of(failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and body for a failure."""
    status, body = _error(failure)
    return status, msgspec.json.encode(body)


def _error(failure: Failure) -> tuple[int, dict[str, dict[str, Json]]]:
    status = failure.status or _STATUS.get(failure.kind, 502)
    if status < 400 or (failure.passing and status < 500 and status not in _KEPT_STATUS):
        status = 503 if failure.kind == "overloaded" else 502
    kind = _TYPES.get(failure.kind, failure.kind)
    message = _HEAD.sub("", failure.message, count=1)
    return status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}


MAX_BODY_BYTES = 256 << 20
PROBE_SECONDS = 5.0

MAX_FORMS = 4
"""How often a request is sent again in another form that the model needs."""

MAX_TURNS = 4096
"""Turns whose provider blocks are remembered, for clients that send back only the tool calls."""


class TurnMemory:
    """Provider blocks of turns with tools, for clients that send back only the tool calls."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, list[Json]] = OrderedDict()

    def remember(self, reply: Reply) -> None:
        """Remember the blocks that must be sent back with the tool calls of a turn."""
        if reply.blocks is not None and reply.tool_calls:
            self._blocks[reply.tool_calls[0].id] = reply.blocks
            if len(self._blocks) > MAX_TURNS:
                self._blocks.popitem(last=False)

    def restore(self, body: dict[str, Json]) -> None:
        """Restore signed or encrypted reasoning in the turns of a body that lacks it."""
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            first = calls[0] if isinstance(calls, list) and calls else None
            if isinstance(first, dict) and PROVIDER_BLOCKS not in message:
                blocks = self._blocks.get(str(first.get("id")))
                if blocks is not None:
                    message[PROVIDER_BLOCKS] = blocks


class Bridge:
    """Answers chats with ``backend``; for one event loop.

    Args:
        backend: the caller closes it.
        endpoint: where the backend sends requests.
        token: required of clients.
        timeouts: limits of one request.
        owner: whom the model list names as the owner.
    """

    def __init__(
        self, backend: Backend, endpoint: Endpoint, token: str, timeouts: Timeouts, owner: str
    ) -> None:
        self._owner = owner
        self._backend = backend
        self._endpoint = endpoint
        self._token = token
        self._timeouts = timeouts
        self._turns = TurnMemory()

    def app(self) -> web.Application:
        """Return the web application."""
        guards = [address_guard("127.0.0.1"), token_guard(self._token)]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        """Return the models of the job, if there are credentials."""
        result = await self._backend.probe(self._endpoint, PROBE_SECONDS)
        if not isinstance(result, Capabilities):
            return _refusal(result)
        data = [{"id": name, "object": "model", "owned_by": self._owner} for name in result.models]
        return web.json_response({"object": "list", "data": data})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = decode_json(await request.read())
        except ValueError as error:
            return _refusal(Failure("rejected", f"the body is no JSON: {error}", status=400))
        if not isinstance(body, dict):
            return _refusal(Failure("rejected", "the body is no object", status=400))
        self._turns.restore(body)
        if body.get("stream"):
            return await self._stream(request, body)
        result = await self._send(_request(body, None))
        if isinstance(result, Failure):
            return _refusal(result)
        self._turns.remember(result)
        return web.Response(
            body=msgspec.json.encode(completion(result, _model(body))),
            content_type="application/json",
        )

    async def _stream(self, request: web.Request, body: dict[str, Json]) -> web.StreamResponse:
        chunks: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        call = _request(body, lambda kind, text: chunks.put_nowait((kind, text)))
        sending = asyncio.create_task(self._send(call))
        sending.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            chunk = await chunks.get()
            if chunk is None and isinstance(sending.result(), Failure):
                return _refusal(sending.result())
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            streamed = False
            stream = StreamId(f"chatcmpl-{secrets.token_hex(8)}", _model(body))
            while chunk is not None:
                streamed = True
                await answer.write(chunk_bytes(stream, *chunk))
                chunk = await chunks.get()
            result = sending.result()
            if isinstance(result, Reply):
                self._turns.remember(result)
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            for data in last_chunks(stream, result, streamed=streamed, usage=usage):
                await answer.write(data)
            await answer.write_eof()
            return answer
        except ConnectionError:
            return client_closed_response(request)
        finally:
            sending.cancel()

    async def _send(self, request: Request) -> Reply | Failure:
        for _ in range(MAX_FORMS):
            exchange = await self._backend.send(self._endpoint, [request], self._timeouts)
            if not exchange.repeatable:
                break
        (result,) = exchange.results
        return result


def _model(body: dict[str, Json]) -> str:
    return str(body.get("model") or "")


def _request(body: dict[str, Json], heard: Callable[[str, str], None] | None) -> Request:
    settings = CallSettings(None, {}, {})
    return Request(settings, b"", body=body, stream=heard is not None, heard=heard)


def _refusal(failure: Any) -> web.Response:
    status, body = error_of(failure)
    return web.Response(status=status, body=body, content_type="application/json")


@asynccontextmanager
async def bridged(
    servers: Servers,
    notice: Callable[[str], None],
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
) -> AsyncIterator[Endpoint]:
    """Yield a local endpoint of OpenAI's protocol in front of the only server of ``servers``."""
    (endpoint,) = servers.endpoints
    backend = servers.make_backend(Transport(), notice)
    token = new_token()
    bridge = Bridge(backend, endpoint, token, timeouts, servers.kind)
    runner = web.AppRunner(
        bridge.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        yield Endpoint(
            endpoint.name,
            f"http://127.0.0.1:{port}/v1",
            headers=headers,
            account=endpoint.account,
        )
    finally:
        await runner.cleanup()
        await backend.close()


@contextmanager
def bridged_apart(
    servers: Servers, notice: Callable[[str], None], timeouts: Timeouts
) -> Iterator[Servers]:
    """Run :func:`bridged` in a thread with its own event loop."""
    ready = threading.Event()
    started: list[tuple[Endpoint, asyncio.AbstractEventLoop, asyncio.Event]] = []
    faults: list[BaseException] = []

    async def serve() -> None:
        ended = asyncio.Event()
        async with bridged(servers, notice, timeouts) as endpoint:
            started.append((endpoint, asyncio.get_running_loop(), ended))
            ready.set()
            await ended.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
            faults.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="bridge", daemon=True)
    thread.start()
    ready.wait()
    if not started:
        raise faults[0]
    endpoint, loop, ended = started[0]
    try:
        yield msgspec.structs.replace(servers, endpoints=[endpoint], kind="openai", bedrock=None)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
