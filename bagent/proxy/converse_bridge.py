"""A local address that speaks OpenAI's protocol and asks a backend that does not: Bedrock.

Requests of Bedrock have to be signed one by one and its streams are no lines of text, so what
passes HTTP requests on or measures them meets this in its place: chats in, Converse out.
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
from bagent.backends.registry import BackendConfig, make_backend
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.proxy.auth import address_guard, new_token, token_guard
from bagent.proxy.forward import client_closed_response
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
"""The ``type`` and ``code`` of an error, by which clients know its kind again."""

_STATUS = {"timeout": 504, "rejected": 400, "auth": 401, "refused": 400, "context_overflow": 400}
_TO_PASS = frozenset({408, 429})
_HEAD = re.compile(r"HTTP \d{3}: ")


def completion(reply: Reply, model: str) -> dict[str, Json]:
    """A whole answer; ``model`` is the name that was asked for."""
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
    """Counts of tokens; what is not known is null."""
    prompt, answer = usage.prompt, usage.completion
    total = None if prompt is None or answer is None else prompt + answer
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def chunk_bytes(told: tuple[str, str], kind: str, text: str) -> bytes:
    """A piece of a streamed answer; ``told`` is the id of the answer and its model, ``kind``
    ``text`` or ``reasoning``."""
    name = "content" if kind == "text" else "reasoning_content"
    return _chunk(told, {"role": "assistant", name: text})


def last_chunks(
    told: tuple[str, str], found: Reply | Failure, *, heard: bool, counts: bool
) -> Iterator[bytes]:
    """The end of a stream: what was not told piece by piece, the reason for the end, counts.

    Args:
        heard: whether text and reasoning have been told.
        counts: whether the counts of tokens were asked for.
    """
    if isinstance(found, Failure):
        status, body = _error(found)
        yield _event({"error": {**body["error"], "code": status}})
        return
    if not heard:
        for kind, text in (("reasoning", found.reasoning), ("text", found.text)):
            if text:
                yield chunk_bytes(told, kind, text)
    message = assistant_message(found)
    rest = {name: message[name] for name in message.keys() - {"role", "content"}}
    if found.tool_calls:
        rest["tool_calls"] = [
            {"index": place, **call} for place, call in enumerate(message["tool_calls"])
        ]
    yield _chunk(told, rest, found.finish_reason)
    if counts:
        yield _event({**_head(told), "choices": [], "usage": usage_of(found.usage)})
    yield DONE


def _head(told: tuple[str, str]) -> dict[str, Json]:
    answer, model = told
    return {"id": answer, "object": "chat.completion.chunk", "created": 0, "model": model}


def _chunk(told: tuple[str, str], delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head(told), "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + encode_payload(value) + b"\n\n"


def error_of(failure: Failure) -> tuple[int, bytes]:
    """HTTP status and body for a failure."""
    status, body = _error(failure)
    return status, msgspec.json.encode(body)


def _error(failure: Failure) -> tuple[int, dict[str, dict[str, Json]]]:
    status = failure.status or _STATUS.get(failure.kind, 502)
    if status < 400 or (failure.passing and status < 500 and status not in _TO_PASS):
        status = 503 if failure.kind == "overloaded" else 502
    kind = _TYPES.get(failure.kind, failure.kind)
    message = _HEAD.sub("", failure.message, count=1)
    return status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}


MOST_BODY = 256 << 20
PROBE_SECONDS = 5.0

MOST_FORMS = 4
"""So often a request is put in another form that the model turned out to want."""

MOST_KEPT = 4096
"""Turns with tool calls whose own blocks are kept, for clients that give back only the calls."""


class Bridge:
    """Answers chats by ``backend``; for one event loop.

    Args:
        backend: what is asked; it is the caller's to close.
        endpoint: where.
        token: who asks has to show it.
        timeouts: limits of one request; who asks may hang up sooner.
    """

    def __init__(
        self, backend: Backend, endpoint: Endpoint, token: str, timeouts: Timeouts
    ) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._token = token
        self._timeouts = timeouts
        self._blocks: OrderedDict[str, list[Json]] = OrderedDict()

    def app(self) -> web.Application:
        """The routes."""
        guards = [address_guard("127.0.0.1"), token_guard(self._token)]
        found = web.Application(client_max_size=MOST_BODY, middlewares=guards)
        found.router.add_get("/v1/models", self._models)
        found.router.add_post("/v1/chat/completions", self._chat)
        return found

    async def _models(self, request: web.Request) -> web.Response:
        """Whether there are credentials; which models an account has is not asked."""
        found = await self._backend.probe(self._endpoint, PROBE_SECONDS)
        if not isinstance(found, Capabilities):
            return _refusal(found)
        data = [{"id": name, "object": "model", "owned_by": "bedrock"} for name in found.models]
        return web.json_response({"object": "list", "data": data})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = decode_json(await request.read())
        except ValueError as error:
            return _refusal(Failure("rejected", f"the body is no JSON: {error}", status=400))
        if not isinstance(body, dict):
            return _refusal(Failure("rejected", "the body is no object", status=400))
        self._give_back(body)
        if body.get("stream"):
            return await self._streamed(request, body)
        found = await self._ask(_request(body, None))
        if isinstance(found, Failure):
            return _refusal(found)
        told = self._keep(found)
        return web.Response(
            body=msgspec.json.encode(completion(told, _model(body))),
            content_type="application/json",
        )

    async def _streamed(self, request: web.Request, body: dict[str, Json]) -> web.StreamResponse:
        pieces: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        asked = _request(body, lambda kind, text: pieces.put_nowait((kind, text)))
        asking = asyncio.create_task(self._ask(asked))
        asking.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await pieces.get()
            if piece is None and isinstance(asking.result(), Failure):
                return _refusal(asking.result())
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            heard, told = False, (f"chatcmpl-{secrets.token_hex(8)}", _model(body))
            while piece is not None:
                heard = True
                await answer.write(chunk_bytes(told, *piece))
                piece = await pieces.get()
            found = asking.result()
            if isinstance(found, Reply):
                found = self._keep(found)
            counts = bool((body.get("stream_options") or {}).get("include_usage"))
            for chunk in last_chunks(told, found, heard=heard, counts=counts):
                await answer.write(chunk)
            await answer.write_eof()
            return answer
        except ConnectionError:
            return client_closed_response(request)
        finally:
            asking.cancel()

    async def _ask(self, request: Request) -> Reply | Failure:
        for _ in range(MOST_FORMS):
            exchange = await self._backend.send(self._endpoint, [request], self._timeouts)
            if not exchange.learned:
                break
        (found,) = exchange.results
        return found

    def _keep(self, reply: Reply) -> Reply:
        """Remember what has to be given back with the tool calls of a turn."""
        if reply.blocks is not None and reply.tool_calls:
            self._blocks[reply.tool_calls[0].id] = reply.blocks
            if len(self._blocks) > MOST_KEPT:
                self._blocks.popitem(last=False)
        return reply

    def _give_back(self, body: dict[str, Json]) -> None:
        """Put thinking with its signature back into turns of clients that do not know of it."""
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            first = calls[0] if isinstance(calls, list) and calls else None
            if isinstance(first, dict) and PROVIDER_BLOCKS not in message:
                blocks = self._blocks.get(str(first.get("id")))
                if blocks is not None:
                    message[PROVIDER_BLOCKS] = blocks


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
    """An endpoint of OpenAI's protocol, on loopback and with a token of its own, that asks the one
    server of ``servers``."""
    (endpoint,) = servers.endpoints
    config = BackendConfig(keys=servers.keys, bedrock=servers.bedrock)
    backend = make_backend(servers.kind, Transport(), config, notice)
    token = new_token()
    bridge = Bridge(backend, endpoint, token, timeouts)
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
    """The same in a thread with an event loop of its own, for who has none yet."""
    ready = threading.Event()
    made: list[tuple[Endpoint, asyncio.AbstractEventLoop, asyncio.Event]] = []
    faults: list[BaseException] = []

    async def serve() -> None:
        over = asyncio.Event()
        async with bridged(servers, notice, timeouts) as endpoint:
            made.append((endpoint, asyncio.get_running_loop(), over))
            ready.set()
            await over.wait()

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
    if not made:
        raise faults[0]
    endpoint, loop, over = made[0]
    try:
        yield msgspec.structs.replace(servers, endpoints=[endpoint], kind="openai", bedrock=None)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
