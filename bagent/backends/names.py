"""An event loop whose look-ups of host names neither wait for each other nor hold the process.

Looking a name up blocks a thread until the resolver gives up, ten seconds and more. The loop's
usual pool has a handful of threads, which a few dead names fill, and the interpreter waits for
them before it ends. Here every look-up has a thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import socket
import threading
from typing import Any

MOST_THREADS = 128
"""Look-ups at once; a resolver that gets more answers none of them sooner."""

_Work = tuple["asyncio.Future[list[Any]]", tuple[Any, ...]]


class NamesLoop(asyncio.SelectorEventLoop):
    """For commands that reach many names of which some may be dead: a loop factory."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._threads = 0
        self._open = 0

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
        if _is_number(host):
            return socket.getaddrinfo(host, port, family, type, proto, socket.AI_NUMERICHOST)
        found: asyncio.Future[list[Any]] = self.create_future()
        self._wanted.put((found, (host, port, family, type, proto, flags)))
        self._open += 1
        if self._threads < min(self._open, MOST_THREADS):
            self._threads += 1
            threading.Thread(target=self._look_up, name="names", daemon=True).start()
        try:
            return await found
        finally:
            self._open -= 1

    def _look_up(self) -> None:
        while True:
            found, wanted = self._wanted.get()
            if found.done():  # given up meanwhile
                continue
            result: list[Any] | OSError
            try:
                result = socket.getaddrinfo(*wanted)
            except OSError as error:
                result = error
            except UnicodeError:  # a name that cannot be one
                result = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            try:
                self.call_soon_threadsafe(_settle, found, result)
            except RuntimeError:  # the loop is closed
                return


def _settle(found: asyncio.Future[list[Any]], result: list[Any] | OSError) -> None:
    if found.done():
        return
    if isinstance(result, OSError):
        found.set_exception(result)
    else:
        found.set_result(result)


def _is_number(host: bytes | str | None) -> bool:
    try:
        ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host or "")
    except ValueError:
        return False
    return True
