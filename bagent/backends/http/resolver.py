"""DNS lookups that neither wait for each other nor delay the exit of the process.

A lookup blocks a thread until the resolver gives up, for ten seconds and more. The default pools of
asyncio and libuv have few threads, which a few dead names fill, and the interpreter joins them at
exit. Here every lookup has a daemon thread.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import socket
import threading
from typing import Any

THREADS, MAX_THREADS = 64, 4096
"""Concurrent lookups, and the maximum while some of them hang."""

HANGS_SECONDS = 0.5
"""Lookups that wait longer for a thread get new ones."""

_Work = tuple["asyncio.Future[list[Any]]", tuple[Any, ...]] | None


class Resolver:
    """Resolves names for any event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wanted: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._threads = 0
        self._open = 0
        self._growing = False

    async def look_up(self, host: bytes | str | None, *more: Any) -> list[Any]:
        """Resolve as :func:`socket.getaddrinfo` does; can be cancelled at once.

        ``more`` are port, family, type, protocol and flags.
        """
        if _is_number(host):
            port, family, kind, proto = more[:4]
            return socket.getaddrinfo(host, port, family, kind, proto, socket.AI_NUMERICHOST)
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._wanted.put((future, (host, *more)))
        self._open += 1
        if self._threads < min(self._open, THREADS):
            self._start(1)
        elif not self._growing:
            self._growing = True
            self._loop.call_later(HANGS_SECONDS, self._grow)
        try:
            return await future
        finally:
            self._open -= 1

    def close(self) -> None:
        """End idle threads; those that hang are abandoned."""
        for _ in range(self._threads):
            self._wanted.put(None)
        self._threads = 0

    def _grow(self) -> None:
        waiting = self._wanted.qsize()
        self._start(min(waiting, MAX_THREADS - self._threads))
        self._growing = waiting > 0
        if self._growing and not self._loop.is_closed():
            self._loop.call_later(HANGS_SECONDS, self._grow)

    def _start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._look_up, name="names", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the thread limit is reached
                return
            self._threads += 1

    def _look_up(self) -> None:
        while True:
            work = self._wanted.get()
            if work is None:
                return
            future, arguments = work
            if future.done():  # cancelled
                continue
            result: list[Any] | OSError
            try:
                result = socket.getaddrinfo(*arguments)
            except OSError as error:
                result = error
            except UnicodeError:  # an invalid name
                result = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            try:
                self._loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop is closed
                return


class ResolverLoop(asyncio.SelectorEventLoop):
    """Event loop for commands that reach many names, of which some may be dead."""

    def __init__(self) -> None:
        super().__init__()
        self._names = Resolver(self)

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """Resolve as :func:`socket.getaddrinfo` does; can be cancelled at once."""
        return await self._names.look_up(host, port, family, type, proto, flags)

    def close(self) -> None:
        """Close the loop without waiting for pending lookups."""
        self._names.close()
        super().close()


def _settle(future: asyncio.Future[list[Any]], result: list[Any] | OSError) -> None:
    if future.done():
        return
    if isinstance(result, OSError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _is_number(host: bytes | str | None) -> bool:
    try:
        ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host or "")
    except ValueError:
        return False
    return True
