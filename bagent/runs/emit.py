"""Result rows on stdout while the run goes on."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MOST_LINES = 10_000


@contextmanager
def own_stdout() -> Iterator[int]:
    """A descriptor of standard output for rows alone; what else is written there goes to stderr.

    Functions of the user's tools print, and so do programs that they start: a line of theirs among
    the rows would spoil what reads them. The descriptor stays open: a thread may be writing to it.
    """
    sys.stdout.flush()
    rows = os.dup(1)
    os.dup2(2, 1)
    try:
        yield rows
    finally:
        with suppress(OSError, ValueError):  # closed by a tool, or no room behind stderr
            sys.stdout.flush()
        os.dup2(rows, 1)


class StdoutWriter:
    """Writes lines to a file descriptor from a thread of its own.

    A slow reader then never stalls the requests in flight; :meth:`room` is its backpressure.
    When the reader has gone, or there is no room behind stdout, ``on_closed`` is called once, on
    the event loop, and lines are dropped: they are in the journal.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[OSError], None]) -> None:
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = asyncio.Event()
        self._room.set()
        self._finished = asyncio.Event()
        self.closed = False
        self.failure: OSError | None = None
        """Why not every line was written, once one was not."""
        self._thread = threading.Thread(target=self._work, name="bagent-stdout", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Take one line, without its newline."""
        if self.closed:
            return
        self._lines.put(line + b"\n")
        if self._lines.qsize() > MOST_LINES:
            self._room.clear()
            # The thread may have caught up just before: then nobody else would say so.
            if self._lines.qsize() < MOST_LINES // 2:
                self._room.set()

    async def room(self) -> None:
        """Wait until the reader has caught up."""
        await self._room.wait()

    async def finish(self) -> None:
        """Write all lines and stop; a reader that has gone does not hold it, a slow one does."""
        self._lines.put(None)
        await self._finished.wait()

    def abandon(self) -> None:
        """Write no more: nobody reads; the lines are in the journal."""
        self.closed = True
        self._room.set()

    def _work(self) -> None:
        try:
            self._write_all()
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._finished.set)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            batch = [line]
            while len(batch) < 512:
                try:
                    more = self._lines.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._write(b"".join(batch))
                    return
                batch.append(more)
            self._write(b"".join(batch))
            if not self._room.is_set() and self._lines.qsize() < MOST_LINES // 2:
                self._loop.call_soon_threadsafe(self._room.set)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                self.closed, self.failure = True, error
                self._loop.call_soon_threadsafe(self._reader_gone, error)

    def _reader_gone(self, error: OSError) -> None:
        self._room.set()
        self._on_closed(error)
