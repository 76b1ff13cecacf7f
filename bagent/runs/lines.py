"""Result rows as lines for stdout, in completion order or in input order."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterator

from bagent.runs.openrun import OpenRun
from bagent.store.readers import encode_result, result_of
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

    def __init__(self, store: OpenRun, ordered: bool) -> None:
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
