"""Look-ups of host names that neither wait for each other nor hold the process.

Looking a name up blocks a thread until the resolver gives up, ten seconds and more. The usual
pools of threads (of asyncio, of libuv) have a handful of them, which a few dead names fill, and
the interpreter waits for them before it ends. Here every look-up has a thread that nobody waits
for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import socket
import threading
from typing import Any

THREADS, MAX_THREADS = 64, 4096
"""Look-ups at once, and at most where some of them hang."""

HANGS_SECONDS = 0.5
"""Look-ups that wait for a thread longer than this get threads of their own."""

_Work = tuple["asyncio.Future[list[Any]]", tuple[Any, ...]] | None


class Resolver:
    """Looks names up for an event loop of any kind."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wanted: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._threads = 0
        self._open = 0
        self._growing = False

    async def look_up(self, host: bytes | str | None, *more: Any) -> list[Any]:
        """As :func:`socket.getaddrinfo`; giving up waiting is at once.

        ``more`` are its port, family, type, protocol and flags.
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
        """Threads that look nothing up end, the others are left alone."""
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
            except RuntimeError:  # this machine allows no more of them
                return
            self._threads += 1

    def _look_up(self) -> None:
        while True:
            work = self._wanted.get()
            if work is None:
                return
            future, arguments = work
            if future.done():  # given up meanwhile
                continue
            result: list[Any] | OSError
            try:
                result = socket.getaddrinfo(*arguments)
            except OSError as error:
                result = error
            except UnicodeError:  # a name that cannot be one
                result = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            try:
                self._loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop is closed
                return


class ResolverLoop(asyncio.SelectorEventLoop):
    """For commands that reach many names of which some may be dead: a loop factory."""

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
        """As :func:`socket.getaddrinfo`; giving up waiting is at once."""
        return await self._names.look_up(host, port, family, type, proto, flags)

    def close(self) -> None:
        """Close the loop; nobody waits for names that are still looked up."""
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
