"""A local OpenAI-compatible address in front of a provider with another protocol, such as Bedrock.

Chats come in and go out through the provider's backend. Bedrock's requests are signed one by one
and its streams are binary, so they cannot be forwarded or measured as plain HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from bagent.backends.base import Backend, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.request import CallSettings, Request
from bagent.proxy.auth import address_guard, new_token, token_guard
from bagent.proxy.forward import client_closed_response
from bagent.proxy.translate import (
    StreamId,
    TurnMemory,
    chunk_bytes,
    completion,
    error_of,
    last_chunks,
)
from bagent.servers.resolve import Servers
from bagent.text.json import decode_json
from bagent.types import Failure, Json, Reply

MAX_BODY_BYTES = 256 << 20
PROBE_SECONDS = 5.0

MAX_FORMS = 4
"""How often a request is sent again in another form that the model needs."""


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
