"""Standard output of a world: a reader that takes all lines of results, or goes away."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from bagent.runs import session


class Stdout:
    """What the processes of a world print, one after the other."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._most: int | None = None

    def begin(self, most: int | None) -> int:
        """Return the descriptor of an empty output.

        Args:
            most: lines after which its reader goes away; None: it stays.
        """
        if self._descriptor is None:
            self._descriptor = os.memfd_create("stdout")
        os.truncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._most = most
        return self._descriptor

    def lines(self) -> list[dict[str, Any]]:
        """Return what was printed."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        printed = os.pread(self._descriptor, size, 0)
        return [msgspec.json.decode(line) for line in printed.splitlines()]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Write without a thread."""
        with mock.patch.object(session, "StdoutWriter", self._open):
            try:
                yield
            finally:
                if self._descriptor is not None:
                    os.close(self._descriptor)

    def _open(self, descriptor: int, on_closed: Callable[[OSError], None]) -> Writer:
        return Writer(descriptor, on_closed, self._most)


class Writer:
    """See :class:`bagent.runs.result_lines.StdoutWriter`; each line is written at once."""

    def __init__(
        self, descriptor: int, on_closed: Callable[[OSError], None], most: int | None
    ) -> None:
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._remaining = most
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self.failure: OSError | None = None

    def put(self, line: bytes) -> None:
        """Write one line."""
        if self.closed:
            return
        if self._remaining == 0:
            self.closed = True
            self.failure = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            self._loop.call_soon(self._on_closed, self.failure)
            return
        if self._remaining is not None:
            self._remaining -= 1
        os.write(self._descriptor, line + b"\n")

    async def wait_for_room(self) -> None:
        """Return: the reader keeps up."""

    async def finish(self) -> None:
        """Return: all is written."""

    def abandon(self) -> None:
        """Write no more."""
        self.closed = True
