"""The outcomes of a run's stages, of this start and of earlier ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

from bagent.stages.row import StageRow
from bagent.store.journal.codec import code_of, unit_of
from bagent.store.journal.segments import PART_SHIFT
from bagent.types import Outcome, Row

if TYPE_CHECKING:
    from bagent.store.journal.journal import Journal
    from bagent.store.journal.reader import OutcomeLookup

WrittenRow = tuple[Outcome, int, Row]
"""An outcome, its location in the journal, and its row."""

Emit = Callable[[Sequence[WrittenRow]], None]
"""Takes outcomes that were written."""


class NoteUnit(Protocol):
    """Takes the unit of an outcome, and whether an earlier start wrote it."""

    def __call__(self, unit: int, *, earlier: bool) -> None:
        """Take it."""


def _ignore(unit: int, *, earlier: bool) -> None:
    pass


class StageResults:
    """Outcomes of all stages by location, of this start and of earlier ones.

    A location is an offset in the journal of this start, or below 0 one of an earlier start.

    Args:
        journal: the journal of this start.
        earlier: the outcomes of earlier starts, if there were any.
        emit: gets the outcomes that this start writes.
        all_rows: whether this start has all rows; else other shards have results of their own.
        note: called with the unit of each outcome that this start writes or finds finished.
    """

    def __init__(
        self,
        journal: Journal,
        earlier: OutcomeLookup | None,
        emit: Emit,
        *,
        all_rows: bool = True,
        note: NoteUnit = _ignore,
    ) -> None:
        self.journal = journal
        self.counts: dict[str, Counter[int]] = {}
        """By stage, the number of outcomes of each code, earlier ones too."""
        self._earlier = earlier
        self._all_rows = all_rows
        self._taken_back: set[int] = set()
        self._unfinished_keys: dict[str, frozenset[int]] = {}
        self._emit = emit
        self._note = note

    def read(self, location: int) -> Outcome:
        """Return the outcome at a location."""
        if location >= 0:
            return self.journal.read_at(location)
        assert self._earlier is not None
        return self._earlier.read_at(-1 - location)

    def finished(
        self,
        key: int,
        stage: str,
        answer: int,
        made_of: Iterable[StageRow] = (),
        *,
        holds: Callable[[Outcome], bool] = lambda _: True,
    ) -> tuple[Outcome, int] | None:
        """Return the outcome that an earlier start finished, with its location.

        An outcome is taken back where a row that it was made of has changed since (the row had
        failed, and came out well later), and where it does not hold.

        Args:
            key: the row.
            stage: the stage.
            answer: the number of the answer.
            made_of: the rows that it would be made of now.
            holds: returns whether an outcome is still what the stage would make.
        """
        if self._earlier is None:
            return None
        location = self._find(unit_of(key, stage, answer))
        if location is None:
            return None
        outcome = self._earlier.read_at(location)
        changed = any(item.ok and _is_after(item.location, location) for item in made_of)
        if changed or not holds(outcome):
            self.take_back(key, stage, answer)
            return None
        self._count(outcome, earlier=True)
        return outcome, -1 - location

    def _find(self, unit: int) -> int | None:
        if self._earlier is None or unit in self._taken_back:
            return None
        return self._earlier.find(unit)

    def is_finished(self, key: int, stage: str) -> bool:
        """Return whether an earlier start finished a row of a stage with one answer a row."""
        return self._find(unit_of(key, stage, 0)) is not None

    def take_back(self, key: int, stage: str, answer: int) -> None:
        """Void the outcomes that earlier starts wrote for this unit."""
        self._taken_back.add(unit_of(key, stage, answer))
        self.journal.write_tombstone(unit_of(key, stage, answer), stage, answer)

    def forget(self, key: int, stages: Iterable[str]) -> None:
        """Take back what earlier starts wrote of a row in ``stages``, one answer each."""
        if self._earlier is None:
            return
        for stage in stages:
            unit = unit_of(key, stage, 0)
            if unit in self._taken_back:
                continue
            if self._earlier.find(unit) is not None or key in self._unfinished(stage):
                self.take_back(key, stage, 0)

    def _unfinished(self, stage: str) -> Set[int]:
        """Return the rows of a stage that earlier starts wrote, but did not finish."""
        earlier = self._earlier
        if earlier is None:
            return frozenset()
        unfinished = self._unfinished_keys.get(stage)
        if unfinished is None:
            keys = earlier.keys_of(stage)
            unfinished = frozenset(k for k in keys if earlier.find(unit_of(k, stage, 0)) is None)
            self._unfinished_keys[stage] = unfinished
        return unfinished

    def keep(self, key: int, stage: str) -> None:
        """Note that the outcome of a row in a stage, if there is one, still counts."""
        self._note(unit_of(key, stage, 0), earlier=True)

    @property
    def has_earlier(self) -> bool:
        """Whether this run was started before."""
        return self._earlier is not None

    @property
    def takes_back(self) -> bool:
        """Whether :meth:`keep_only` has an effect; only then need keys be remembered."""
        return self._earlier is not None and self._all_rows

    def keep_only(self, stage: str, keys: Set[int]) -> None:
        """Take back the outcomes of all rows of a stage but those with ``keys``."""
        if self._earlier is None or not self.takes_back:
            return
        for key in self._earlier.keys_of(stage):
            if key not in keys:
                self.take_back(key, stage, 0)

    def write(self, outcome: Outcome, row: Row) -> int:
        """Write an outcome that needed no request; return its location."""
        location = self.journal.write(outcome)
        self.note(outcome, location, row)
        return location

    def note(self, outcome: Outcome, location: int, row: Row) -> None:
        """Count an outcome that was written, and pass it on."""
        self._count(outcome, earlier=False)
        self._emit([(outcome, location, row)])

    def _count(self, outcome: Outcome, *, earlier: bool) -> None:
        unit = unit_of(int(outcome.key, 16), outcome.stage, outcome.answer)
        self._note(unit, earlier=earlier)
        self.counts.setdefault(outcome.stage, Counter())[
            code_of(outcome.status, outcome.error_kind)
        ] += 1


def _is_after(location: int | None, other: int) -> bool:
    """Return whether ``location`` was written after the earlier outcome at ``other``.

    What other shards of a run wrote cannot be ordered, and counts as before.
    """
    if location is None:
        return False
    if location >= 0:
        return True
    index = -1 - location
    return index >> PART_SHIFT == other >> PART_SHIFT and index > other
