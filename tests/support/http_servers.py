"""Serving an aiohttp application on this machine, and servers in a thread of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

from aiohttp import web

T = TypeVar("T")


@asynccontextmanager
async def serve_app(app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve ``app`` on a free port of ``host``; yields its URL without a path."""
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        port = runner.addresses[0][1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter ``server`` in a thread with an event loop of its own, and leave it at the end."""
    entered: Future[tuple[T, asyncio.AbstractEventLoop]] = Future()
    stop = asyncio.Event()

    async def main() -> None:
        try:
            async with server as value:
                entered.set_result((value, asyncio.get_running_loop()))
                await stop.wait()
        except OSError as error:
            if entered.done():
                raise
            entered.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    value, loop = entered.result(10)
    try:
        yield value
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def refusing_port(port: int = 0) -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections, and that the system gives to nobody else.

    A server that sets ``SO_REUSEADDR``, as those of asyncio and of the standard library do, can
    listen at it meanwhile.

    Args:
        port: 0 takes a free one.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        yield held.getsockname()[1]
