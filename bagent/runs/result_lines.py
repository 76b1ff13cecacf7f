"""Result rows as lines for stdout, in completion order or in input order."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import msgspec

from bagent.runs.context import STAGE
from bagent.runs.run_store import RunStore
from bagent.store.journal.codec import unit_of
from bagent.store.journal.reader import OutcomeLookup
from bagent.store.results import encode_result, result_of
from bagent.types import Json, Outcome, Row

MOST_LINES = 10_000
"""Lines that may wait, for an earlier row or for the reader of stdout."""


class ResultLines:
    """Makes the lines of ``-o -``.

    In input order a line waits until all lines before it are printed. Its answer is then read from
    the journal, its input stays in memory, and :meth:`wait_for_room` bounds how many lines wait.
    A job with stages prints all rows at the end then. In completion order it prints at the end what
    earlier starts wrote and this one did not replace.

    Args:
        store: the open run.
        ordered: input order.
        descriptor: where lines go during the run.
    """

    def __init__(self, store: RunStore, ordered: bool, descriptor: int) -> None:
        self.descriptor = descriptor
        self.of_input = store.last is None
        """Only rows of this start's input are printed, finished ones when they are read: the job
        has no stages."""
        self._store = store
        self._ordered = ordered
        self._finished = None
        if self.of_input and store.finished:
            self._finished = OutcomeLookup(store.path, store.done, store.notes.append)
        self._expected: deque[tuple[int, int]] = deque()
        self._ready: dict[tuple[int, int], tuple[Callable[[], Outcome], Json]] = {}
        self._room = asyncio.Event()
        self._room.set()

    async def wait_for_room(self) -> None:
        """Wait while too many lines wait for an earlier row."""
        await self._room.wait()

    def remaining(self) -> Iterator[bytes]:
        """Yield the lines that are printed once all rows have ended."""
        if self.of_input:
            return
        if self._ordered:
            yield from self._store.ordered_lines()
        elif self._store.recorded:
            yield from self._store.earlier_lines()

    def expect(self, row: Row, answers: int) -> None:
        """Note the rows in the order of their lines. Runs in the reader's thread."""
        if self._ordered:
            self._expected.extend((row.index, answer) for answer in range(answers))

    def add(self, outcome: Outcome, location: int, row: Row) -> list[bytes]:
        """Return the lines that can be printed now that ``outcome`` is known."""
        data = row.data if self._store.keep_input else None
        if not self._ordered:
            return [_line(outcome, data)]
        if not self.of_input:
            return []
        read = partial(self._store.journal.read_at, location)
        return self._add_ready((outcome.row, outcome.answer), read, data)

    def add_finished(self, row: Row, answers: Iterable[int]) -> list[bytes]:
        """Return the lines that can be printed now that finished answers of a row were read."""
        data = row.data if self._store.keep_input else None
        lines = []
        for answer in answers:
            read = partial(self._finished_outcome, row, answer)
            if self._ordered:
                lines += self._add_ready((row.index, answer), read, data)
            else:
                lines.append(_line(read(), data))
        return lines

    def _finished_outcome(self, row: Row, answer: int) -> Outcome:
        """Return the outcome of a finished answer, under the number of the row in this input."""
        assert self._finished is not None
        location = self._finished.find(unit_of(row.key, STAGE, answer))
        assert location is not None  # all finished outcomes were there when this start began
        outcome = self._finished.read_at(location)
        return msgspec.structs.replace(outcome, row=row.index, source=row.source, line=row.line)

    def close(self) -> None:
        """Close the files of finished outcomes."""
        if self._finished is not None:
            self._finished.close()

    def _add_ready(
        self, unit: tuple[int, int], read: Callable[[], Outcome], data: Json
    ) -> list[bytes]:
        self._ready[unit] = read, data
        if len(self._ready) > MOST_LINES:
            self._room.clear()
        return self._drain(complete=False)

    def flush(self) -> list[bytes]:
        """Return the waiting lines in input order, after an early end."""
        return self._drain(complete=True)

    def _drain(self, *, complete: bool) -> list[bytes]:
        lines = []
        while self._expected and (complete or self._expected[0] in self._ready):
            entry = self._ready.pop(self._expected.popleft(), None)
            if entry is not None:
                read, data = entry
                lines.append(_line(read(), data))
        if len(self._ready) <= MOST_LINES:
            self._room.set()
        return lines


def _line(outcome: Outcome, data: Json) -> bytes:
    result = result_of(outcome)
    result["input"] = data
    return encode_result(result).rstrip(b"\n")


@contextmanager
def redirect_stdout() -> Iterator[int]:
    """Redirect stdout to stderr, and yield a descriptor of the real stdout for rows alone.

    So what tools and their programs print does not mix with the rows.
    """
    sys.stdout.flush()
    rows = os.dup(1)
    os.dup2(2, 1)
    try:
        yield rows
    finally:
        with suppress(OSError, ValueError):  # a tool closed it, or stderr is full
            sys.stdout.flush()
        os.dup2(rows, 1)
        os.close(rows)


class StdoutWriter:
    """Writes lines to a file descriptor in a thread, so a slow reader stalls no request.

    :meth:`wait_for_room` is the backpressure. When a write fails, ``on_closed`` is called once on
    the event loop and further lines are dropped; they are in the journal. The thread writes to a
    copy of the descriptor and closes it, since it may be abandoned in the middle of a write.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[OSError], None]) -> None:
        self._descriptor = os.dup(descriptor)
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = asyncio.Event()
        self._room.set()
        self._finished = asyncio.Event()
        self.closed = False
        self.failure: OSError | None = None
        """The first failed write."""
        self._thread = threading.Thread(target=self._run, name="bagent-stdout", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue one line, without its newline."""
        if self.closed:
            return
        self._lines.put(line + b"\n")
        if self._lines.qsize() > MOST_LINES:
            self._room.clear()
            # The thread may have caught up just before, and does not set the event again.
            if self._lines.qsize() < MOST_LINES // 2:
                self._room.set()

    async def wait_for_room(self) -> None:
        """Wait until the reader has caught up."""
        await self._room.wait()

    async def finish(self) -> None:
        """Write all lines and stop; wait for a slow reader, but not for one that has gone."""
        self._lines.put(None)
        await self._finished.wait()

    def abandon(self) -> None:
        """Write no more; the lines are in the journal."""
        self.closed = True
        self._lines.put(None)
        self._room.set()

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            os.close(self._descriptor)
            self._call_soon(self._finished.set)

    def _call_soon(self, function: Callable[..., None], *values: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *values)

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
                self._call_soon(self._room.set)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                self.closed, self.failure = True, error
                self._call_soon(self._reader_gone, error)

    def _reader_gone(self, error: OSError) -> None:
        self._room.set()
        self._on_closed(error)
