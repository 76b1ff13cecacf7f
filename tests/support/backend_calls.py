"""One call through the OpenAI backend, and tiny servers on 127.0.0.1, for the tests beside."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.types import Failure, Reply

PLAIN = CallSettings(model="m", sampling={}, extra={})
QUICK = Timeouts(connect=5.0, first_token=5.0, idle=5.0, total=10.0)


def request(row: str = "r1", settings: CallSettings = PLAIN, **fields: Any) -> Request:
    """A chat call for ``row``."""
    messages = [{"role": "user", "content": f"id={row}"}]
    return Request(settings, encode_payload(messages), messages=messages, **fields)


def endpoint(url: str, **fields: Any) -> Endpoint:
    """An endpoint called ``here``."""
    return Endpoint("here", url, **fields)


@asynccontextmanager
async def backend(**options: Any) -> AsyncIterator[OpenAIBackend]:
    """A backend with connections of its own."""
    found = OpenAIBackend(Transport(), **options)
    try:
        yield found
    finally:
        await found.close()


async def send(
    to: Endpoint, call: Request | None = None, timeouts: Timeouts = QUICK, **options: Any
) -> Exchange:
    """Send one call on a fresh connection."""
    async with backend(**options) as found:
        return await found.send(to, [call or request()], timeouts)


def ask(
    to: Endpoint | str, call: Request | None = None, timeouts: Timeouts = QUICK, **options: Any
) -> Exchange:
    """:func:`send` from a test that is no coroutine."""
    to = endpoint(to) if isinstance(to, str) else to
    return asyncio.run(send(to, call, timeouts, **options))


def reply(exchange: Exchange) -> Reply:
    """The only result, which must be a reply."""
    (result,) = exchange.results
    assert isinstance(result, Reply), result
    return result


def failure(exchange: Exchange) -> Failure:
    """The only result, which must be a failure."""
    (result,) = exchange.results
    assert isinstance(result, Failure), result
    return result


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A TCP server that does what ``handler`` says; yields its port.

    At the end it cancels the handlers and closes their connections.
    """
    connections: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append((asyncio.create_task(serve(reader, writer)), writer))

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        for task, writer in connections:
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*(task for task, _ in connections), return_exceptions=True)
