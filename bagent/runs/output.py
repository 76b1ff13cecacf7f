"""Result rows as lines for stdout, in completion order or in input order."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bagent.runs.run_store import RunStore
from bagent.store.results import encode_result, result_of
from bagent.types import Json, Outcome, Row

MOST_HELD = 10_000
"""Lines that may be held back behind one that is still to come."""


class ResultLines:
    """Makes the lines of ``-o -``.

    In input order a line is held back until all lines before it have gone out: its answer is read
    from the journal again, its input is kept, and :meth:`room` bounds how many are held. A run
    that goes on has rows of earlier on either side, and rows of several stages end mixed: then all
    rows are printed in order at the end.

    Args:
        store: the open run.
        ordered: input order.
    """

    def __init__(self, store: RunStore, ordered: bool) -> None:
        self.descriptor = 1
        """Where the lines go while the run goes on."""
        self._store = store
        self._ordered = ordered
        self._late = ordered and (store.recorded > 0 or store.last is not None)
        self._expected: deque[tuple[int, int]] = deque()
        self._there: dict[tuple[int, int], tuple[int, Json]] = {}
        self._room = asyncio.Event()
        self._room.set()

    async def room(self) -> None:
        """Wait while too many lines are held back behind a row that is still on its way."""
        await self._room.wait()

    @property
    def late(self) -> bool:
        """Whether all lines are printed only at the end."""
        return self._late

    def earlier(self) -> Iterator[bytes]:
        """The lines of rows that an earlier start finished, for completion order."""
        if not self._ordered and self._store.finished:
            yield from self._store.earlier_lines()

    def expect(self, row: Row, answers: list[int]) -> None:
        """Rows in the order in which their lines are due; called in the reader's thread."""
        if self._ordered and not self._late:
            self._expected.extend((row.index, answer) for answer in answers)

    def add(self, outcome: Outcome, location: int, row: Row) -> list[bytes]:
        """The lines that may go out now that ``outcome`` is there."""
        data = row.data if self._store.keep_input else None
        if not self._ordered:
            return [_line(outcome, data)]
        if self._late:
            return []
        self._there[outcome.row, outcome.answer] = location, data
        if len(self._there) > MOST_HELD:
            self._room.clear()
        return self._drain(whole=False)

    def rest(self) -> list[bytes]:
        """The lines still held back, in input order: the run ended early."""
        return self._drain(whole=True)

    def _drain(self, *, whole: bool) -> list[bytes]:
        lines = []
        while self._expected and (whole or self._expected[0] in self._there):
            found = self._there.pop(self._expected.popleft(), None)
            if found is not None:
                lines.append(_line(self._store.journal.read_at(found[0]), found[1]))
        if len(self._there) <= MOST_HELD:
            self._room.set()
        return lines

    def print_all(self) -> None:
        """Print every row's current result in input order (a run that went on)."""
        for line in self._store.ordered_lines():
            sys.stdout.buffer.write(line + b"\n")


def _line(outcome: Outcome, data: Json) -> bytes:
    result = result_of(outcome)
    result["input"] = data
    return encode_result(result).rstrip(b"\n")


MOST_LINES = 10_000


@contextmanager
def redirect_stdout() -> Iterator[int]:
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
