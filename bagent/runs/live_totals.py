"""Counts of the current outcomes of a run, kept while it goes on."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from bagent.store.journal.codec import OK_CODE, codes_of, unit_of
from bagent.store.journal.done_index import DoneIndex
from bagent.store.totals import accept_truncated
from bagent.types import Outcome


class LiveTotals:
    """Counts of the current outcomes of all starts, by ``code_of``.

    ``changes`` is this start's part: its outcomes, less those that they replaced. Needs 10 bytes
    for each row that failed earlier.

    Args:
        done: the outcomes of earlier starts.
        accept: the job accepts truncated answers.
    """

    def __init__(self, done: DoneIndex, *, accept: bool = False) -> None:
        self.accept = accept
        self.changes: Counter[int] = Counter()
        self._before = done.codes
        self._has = done.has
        pairs = sorted(zip(done.failed_units, done.failed_codes, strict=True))
        self._units = array("Q", (unit for unit, _ in pairs))
        self._failed_codes = bytearray(code for _, code in pairs)
        self._replaced = bytearray(len(pairs))
        self._ok_replaced: set[int] = set()
        self._repeats = 0
        self._repeated = 0
        self._resent = max(0, sum(done.codes.values()) - len(done))

    @property
    def codes(self) -> Counter[int]:
        """The current outcomes of all starts, counted by code."""
        counts = self._before.copy()
        counts.update(self.changes)
        return accept_truncated(counts) if self.accept else counts

    @property
    def repeats_pending(self) -> int:
        """Rows read so far that failed earlier and have no new outcome yet."""
        return max(0, self._repeats - self._repeated)

    def repeats_unread(self, shards: int) -> int:
        """Estimate the rows not yet read that failed earlier and will be sent again.

        Args:
            shards: how many shards the outcomes are of.
        """
        return max(0, self._resent // shards - self._repeats)

    def read(self, unit: int) -> None:
        """Note that this start has to do a unit. Runs in the reader's thread."""
        if self.failed_earlier(unit):
            self._repeats += 1

    def failed_earlier(self, unit: int) -> bool:
        """Return whether a unit had failed before this start."""
        return bool(self._units) and self._find(unit) is not None

    def outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes of this start."""
        self.changes.update(codes_of(outcomes))
        for o in outcomes if self._units else ():
            self._repeated += self._replace(unit_of(int(o.key, 16), o.stage, o.answer))

    def take_back_unit(self, unit: int) -> None:
        """Stop counting a unit, whose row was edited or has left the input."""
        if not self._replace(unit) and self._has(unit) and unit not in self._ok_replaced:
            if self.failed_earlier(unit):
                return
            self._ok_replaced.add(unit)
            self.changes[OK_CODE] -= 1

    def is_replaced(self, unit: int) -> bool:
        """Return whether the outcome of an earlier start no longer counts."""
        index = self._find(unit)
        return unit in self._ok_replaced if index is None else bool(self._replaced[index])

    def _replace(self, unit: int) -> bool:
        """Remove a failure of an earlier start from the counts; return whether there was one."""
        index = self._find(unit)
        if index is None or self._replaced[index]:
            return False
        self._replaced[index] = 1
        self.changes[self._failed_codes[index]] -= 1
        return True

    def _find(self, unit: int) -> int | None:
        index = bisect_left(self._units, unit)
        return index if index < len(self._units) and self._units[index] == unit else None
