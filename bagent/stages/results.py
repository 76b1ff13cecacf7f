"""What the stages of a run have written, in this start and before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol

from bagent.stages.row import StageRow
from bagent.stages.row_runner import OutcomeLog
from bagent.store.journal.codec import code_of, unit_of
from bagent.store.journal.segments import PART_SHIFT
from bagent.types import Outcome, Row

Emit = Callable[[Outcome, int, Row], None]


class Earlier(Protocol):
    """The finished outcomes of earlier starts: ``OutcomeLookup``."""

    def find(self, unit: int) -> int | None:
        """The place of the outcome of a unit, if it is finished."""
        ...

    def read_at(self, place: int) -> Outcome:
        """The outcome at a place."""
        ...

    def keys_of(self, stage: str) -> Iterator[int]:
        """The row keys of all current outcomes of a stage with one answer a row."""
        ...


class JournalLike(OutcomeLog, Protocol):
    """The journal of this start: :class:`bagent.store.journal.journal.Journal`."""

    def read_at(self, location: int) -> Outcome:
        """The outcome at a location."""
        ...

    def write_tombstone(self, unit: int, stage: str, answer: int = 0) -> None:
        """Write that no line of this unit before this one counts any more."""
        ...


class StageResults:
    """Outcomes by place, whoever wrote them.

    A place is a location in the journal of this start, or, below 0, one of an earlier start.

    Args:
        emit: gets each outcome that this start writes.
        whole: whether this start has all rows; else other parts have results of their own.

    ``counts`` has, by stage, how many outcomes of each code there are, earlier ones too.
    """

    def __init__(
        self, journal: JournalLike, earlier: Earlier | None, emit: Emit, *, whole: bool = True
    ) -> None:
        self.journal = journal
        self.counts: dict[str, Counter[int]] = {}
        self._earlier = earlier
        self._whole = whole
        self._taken_back: set[int] = set()
        self._left_open: dict[str, frozenset[int]] = {}
        self._emit = emit

    def read(self, place: int) -> Outcome:
        """The outcome at a place."""
        if place >= 0:
            return self.journal.read_at(place)
        assert self._earlier is not None
        return self._earlier.read_at(-1 - place)

    def finished(
        self, key: int, stage: str, answer: int, made_of: Iterable[StageRow] = ()
    ) -> tuple[Outcome, int] | None:
        """The outcome that an earlier start finished, with its place.

        One that was made of something else than is there now is taken back: a row that failed
        then came out well since, so what was made of the failure has to be made again.

        Args:
            made_of: what it would be made of now.
        """
        if self._earlier is None:
            return None
        unit = unit_of(key, stage, answer)
        found = None if unit in self._taken_back else self._earlier.find(unit)
        if found is None:
            return None
        if any(item.ok and _after(item.place, found) for item in made_of):
            self.take_back(key, stage, answer)
            return None
        outcome = self._earlier.read_at(found)
        self._count(outcome)
        return outcome, -1 - found

    def is_finished(self, key: int, stage: str) -> bool:
        """Whether an earlier start finished a row of a stage with one answer a row."""
        unit = unit_of(key, stage, 0)
        return (
            self._earlier is not None
            and unit not in self._taken_back
            and self._earlier.find(unit) is not None
        )

    def take_back(self, key: int, stage: str, answer: int) -> None:
        """Let no outcome of earlier starts count for this unit."""
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
        """The rows of a stage that earlier starts wrote, but did not bring to an end."""
        earlier = self._earlier
        if earlier is None:
            return frozenset()
        found = self._left_open.get(stage)
        if found is None:
            keys = earlier.keys_of(stage)
            found = frozenset(k for k in keys if earlier.find(unit_of(k, stage, 0)) is None)
            self._left_open[stage] = found
        return found

    @property
    def has_earlier(self) -> bool:
        """Whether this run was started before."""
        return self._earlier is not None

    @property
    def takes_back(self) -> bool:
        """Whether :meth:`keep_only` has anything to do: only then need keys be remembered."""
        return self._earlier is not None and self._whole

    def keep_only(self, stage: str, keys: Set[int]) -> None:
        """Take back what earlier starts made of rows that are put together otherwise now.

        Args:
            keys: the rows that the stage has now.
        """
        if self._earlier is None or not self.takes_back:
            return
        for key in self._earlier.keys_of(stage):
            if key not in keys:
                self.take_back(key, stage, 0)

    def write(self, outcome: Outcome, row: Row) -> int:
        """Write an outcome that no request was needed for; its place."""
        place = self.journal.write(outcome)
        self.note(outcome, place, row)
        return place

    def note(self, outcome: Outcome, place: int, row: Row) -> None:
        """An outcome was written by an engine."""
        self._count(outcome)
        self._emit(outcome, place, row)

    def _count(self, outcome: Outcome) -> None:
        self.counts.setdefault(outcome.stage, Counter())[
            code_of(outcome.status, outcome.error_kind)
        ] += 1


def _after(place: int | None, found: int) -> bool:
    """Whether what stands at ``place`` was written after the earlier outcome at ``found``.

    What other parts of a run wrote cannot be put in order, and counts as before.
    """
    if place is None:
        return False
    if place >= 0:
        return True
    location = -1 - place
    return location >> PART_SHIFT == found >> PART_SHIFT and location > found
