"""A server on 127.0.0.1 that answers in a provider's wire form, by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from support.http_servers import in_thread, serve_app
from support.provider_protocols import ModelAnswer, Wire


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong with an answer.

    ``kind`` is one of :meth:`support.provider_protocols.Wire.error`, or after ``after`` pieces of
    ``say``: ``cut`` (the connection drops), ``inner`` (an error among the events), ``ends`` (the
    stream ends early), ``hang``.
    """

    kind: str
    after: int = 3
    say: ModelAnswer = ModelAnswer()


class ProviderServer:
    """Answers the steps of ``script`` one after the other, the last one repeating.

    Attributes:
        bodies: the bodies of all requests.
        headers: their headers, names in lower case.
        paths: their paths.
        faults: what the provider would have refused.
        response_headers: headers of every answer.
    """

    def __init__(self, wire: Wire, script: list[ModelAnswer | Fault]) -> None:
        self.wire = wire
        self.script = script
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.faults: list[str] = []
        self.models: list[str] = ["m-1"]
        self.key: str | None = None
        self.response_headers: dict[str, str] = {}
        self.url = ""

    @property
    def body(self) -> Any:
        """The only request's body."""
        (found,) = self.bodies
        return found

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        told = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.key is not None and told != self.key:
            return self._refuse("bad_key")
        if request.method == "GET":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        body = await request.json()
        step = self.script[min(len(self.bodies), len(self.script) - 1)]
        self.bodies.append(body)
        self.headers.append(headers)
        self.paths.append(request.path)
        words = self.wire.complaint(body)
        if words is not None:
            self.faults.append(words)
            return self._refuse(f"bad:{words}")
        inner = ("cut", "inner", "ends", "hang")
        if isinstance(step, Fault) and step.kind not in inner:
            return self._refuse(step.kind)
        say = step.say if isinstance(step, Fault) else step
        if not self.wire.streamed(request.path, body):
            return await self._whole(request, say, step)
        return await self._stream(request, say, step)

    def _refuse(self, kind: str) -> web.Response:
        status, headers, body = self.wire.error(kind)
        return web.json_response(body, status=status, headers={**headers, **self.response_headers})

    async def _whole(
        self, request: web.Request, say: ModelAnswer, step: ModelAnswer | Fault
    ) -> web.Response:
        if isinstance(step, Fault) and request.transport is not None:
            if step.kind == "hang":
                await asyncio.sleep(30)
            request.transport.abort()
        return web.json_response(self.wire.whole(say), headers=self.response_headers)

    async def _stream(
        self, request: web.Request, say: ModelAnswer, step: ModelAnswer | Fault
    ) -> web.StreamResponse:
        headers = {"Content-Type": self.wire.content_type, **self.response_headers}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        events = self.wire.events(say)
        if isinstance(step, Fault):
            events = events[: step.after]
        for event in events:
            await response.write(event)
        if isinstance(step, Fault):
            if step.kind == "hang":
                await asyncio.sleep(30)
            elif step.kind == "inner":
                await response.write(self.wire.inner_error())
            elif step.kind == "cut" and request.transport is not None:
                await response.drain()
                await asyncio.sleep(0.05)  # what is sent must arrive before the reset
                request.transport.abort()
        return response


@asynccontextmanager
async def serve(wire: Wire, *script: ModelAnswer | Fault) -> AsyncIterator[ProviderServer]:
    """A listening server; its ``url`` has no path."""
    server = ProviderServer(wire, list(script) or [ModelAnswer()])
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with serve_app(app) as server.url:
        yield server


@contextmanager
def serve_in_thread(wire: Wire, *script: ModelAnswer | Fault) -> Iterator[ProviderServer]:
    """A provider's server with an event loop of its own."""
    with in_thread(serve(wire, *script)) as server:
        yield server
