"""The totals of a run while a start of it works: they follow every outcome without a re-count."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter

from bagent.store.codec import OK_CODE, code_of, unit_of
from bagent.store.index import DoneIndex
from bagent.store.totals import accept_truncated
from bagent.types import Outcome


class LiveTotals:
    """The current outcomes of all starts: those that were there before, and those of this start.

    ``codes`` counts them by :func:`bagent.store.codec.code_of`; ``changes`` is the part of this
    start: its outcomes, less those that they replaced.

    Args:
        done: the outcomes of earlier starts.
        accept: the job accepts truncated answers.

    Memory: 10 bytes for each row that failed earlier.
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

    @property
    def codes(self) -> Counter[int]:
        """The current outcomes of all starts, counted by code."""
        counts = self._before.copy()
        counts.update(self.changes)
        return accept_truncated(counts) if self.accept else counts

    @property
    def repeats_pending(self) -> int:
        """Rows read so far that failed earlier, are sent again, and have no new outcome yet."""
        return max(0, self._repeats - self._repeated)

    def read(self, unit: int) -> None:
        """Note that this start is to do a unit (called in the reader's thread)."""
        if self._units and self._find(unit) is not None:
            self._repeats += 1

    def outcome(self, outcome: Outcome) -> None:
        """Count an outcome of this start."""
        self.changes[code_of(outcome.status, outcome.error_kind)] += 1
        if self._units:
            unit = unit_of(int(outcome.key, 16), outcome.stage, outcome.answer)
            self._repeated += self._replace(unit)

    def taken_back(self, unit: int) -> None:
        """Count a unit no more: its row was edited, or is not in the input any more."""
        if not self._replace(unit) and self._has(unit) and unit not in self._ok_replaced:
            if self._units and self._find(unit) is not None:
                return
            self._ok_replaced.add(unit)
            self.changes[OK_CODE] -= 1

    def _replace(self, unit: int) -> bool:
        """Take a failure of an earlier start out of the counts; False: there is none."""
        at = self._find(unit)
        if at is None or self._replaced[at]:
            return False
        self._replaced[at] = 1
        self.changes[self._failed_codes[at]] -= 1
        return True

    def _find(self, unit: int) -> int | None:
        at = bisect_left(self._units, unit)
        return at if at < len(self._units) and self._units[at] == unit else None
