"""What all stages share: their name, their stream, and what they do about rows that failed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from bagent.agents.plan import StagePlan
from bagent.job.spec.stages import OnFailure
from bagent.stages.feeder import Backpressure, StageQueue
from bagent.stages.results import Emit, StageResults
from bagent.stages.row import INPUT, StageRow, stage_item, value_of
from bagent.stages.row_runner import Replace, RowRunner
from bagent.stages.slots import Reader, Slot, Stream, UnorderedReader
from bagent.stages.stop_rules import StopReason
from bagent.types import Json, Outcome, Row

NO_SURVIVOR = "bad_input"
"""Error kind of a row for which nothing is left that came out ok."""


class StageContext(msgspec.Struct, eq=False):
    """What the stages of one run share.

    ``stop`` ends the run early, ``notice`` tells people, ``now`` is Unix seconds.
    """

    records: StageResults
    stop: Callable[[StopReason], None]
    notice: Callable[[str], None]
    now: Callable[[], float]


class Stage(Protocol):
    """One stage of a pipeline."""

    name: str
    out: Stream

    def readers(self) -> list[Reader]:
        """What reads the stages before it, one reader for each in order."""
        ...

    async def run(self) -> None:
        """Work until everything that comes has ended."""
        ...


class FailurePolicy:
    """Decides about rows that failed before a stage.

    Args:
        name: the stage.
        on_failure: ``include``, ``drop`` or ``stop``.
        sees_dropped: the stage is shown what it drops, since it counts failures apart (a vote).

    ``dropped`` counts the rows that failed before and count for nothing from here on.
    """

    def __init__(
        self, name: str, on_failure: OnFailure, world: StageContext, *, sees_dropped: bool = False
    ) -> None:
        self.name = name
        self.dropped = 0
        self._sees_dropped = sees_dropped
        self._on_failure = on_failure
        self._world = world

    def admits(self, item: StageRow) -> bool:
        """Whether the stage takes the row; a failed one may also stop the run."""
        if item.ok or self._on_failure == "include":
            return True
        if self._on_failure == "drop":
            self.dropped += 1
            return self._sees_dropped
        words = self.reason(item)
        self._world.stop(
            StopReason(
                f"stage {self.name} stops at a row that failed before it: {words}",
                "mend the cause, or write on_failure: include or drop",
            )
        )
        return False

    def unasked(self, item: StageRow) -> tuple[Outcome, int]:
        """The outcome, and its place, of a row that there is nothing to ask about."""
        records = self._world.records
        found = records.finished(item.row.key, self.name, 0, (item,))
        if found is not None:
            return found
        words = self.reason(item) if item.place is None else records.read(item.place).error
        row = prompt_row(item.row, item)
        outcome = make_outcome(
            self.name, row, self._world.now(), error=(NO_SURVIVOR, words or "nothing came of it")
        )
        return outcome, records.write(outcome, row)

    def reason(self, item: StageRow) -> str:
        """Why a row failed before this stage, for people."""
        if item.place is None:
            return f"{item.ref}: {item.row.error}"
        outcome = self._world.records.read(item.place)
        return f"{item.ref}: {outcome.error or outcome.status}"

    def tell(self) -> None:
        """Tell how many rows were dropped."""
        if self.dropped:
            rows = "1 row was" if self.dropped == 1 else f"{self.dropped:,} rows were"
            self._world.notice(
                f"stage {self.name}: {rows} dropped, having failed before it (on_failure: drop)"
            )


class PromptVariables:
    """What a stage's templates can name beside fields: what earlier stages answered.

    Args:
        used: the names that its templates use; None: any.
    """

    def __init__(self, used: frozenset[str] | None, records: StageResults) -> None:
        self._used = used
        self._records = records

    def of(self, item: StageRow) -> dict[str, Json]:
        """Values by name for one row; only what is used is read."""
        used = self._used
        return {
            name: value_of(self._records.read(place))
            for name, place in item.seen.items()
            if used is None or name in used
        }


def prompt_row(row: Row, item: StageRow, extra: dict[str, Json] | None = None) -> Row:
    """``row`` as a stage sends it: with its parents and the further names of its prompt."""
    return msgspec.structs.replace(
        row,
        parents=item.parents,
        parents_failed=item.failed if item.failed and item.stage != INPUT else None,
        extra=extra or None,
    )


def make_outcome(
    stage: str, row: Row, now: float, *, output: Json = None, error: tuple[str, str] | None = None
) -> Outcome:
    """The outcome of a row that no model was asked about.

    Args:
        output: its value where it is good.
        error: kind and words where it is not.
    """
    return Outcome(
        key=f"{row.key:016x}",
        row=row.index,
        id=row.id,
        source=row.source,
        line=row.line,
        stage=stage,
        status="failed" if error else "ok",
        output=None if error else msgspec.Raw(msgspec.json.encode(output)),
        error_kind=error[0] if error else None,
        error=error[1] if error else None,
        finished_at=round(now, 4),
        parents=list(row.parents) or None,
        parents_failed=row.parents_failed,
    )


class RowStage(ABC):
    """Reads one stream; rows that its entrance does not admit leave nothing behind."""

    def __init__(self, name: str, entrance: FailurePolicy) -> None:
        self.name = name
        self.out = Stream()
        self._entrance = entrance

    def readers(self) -> list[Reader]:
        """Reads one stream, as rows come."""
        return [UnorderedReader(self._arrive, self._all_taken, self.out)]

    def _arrive(self, item: StageRow, ticket: Slot) -> None:
        if not self._entrance.admits(item):
            ticket.split(0)
        elif item.void:
            ticket.fill(stage_item(item, item.row, *self._entrance.unasked(item)))
        else:
            self._take(item, ticket)

    @abstractmethod
    def _take(self, item: StageRow, ticket: Slot) -> None:
        """Work on one row; what comes of it goes to its ticket."""

    def _all_taken(self) -> None:
        """No more rows come."""
        self._entrance.tell()

    def _was_finished(self, world: StageContext, item: StageRow, ticket: Slot) -> bool:
        """Fill the ticket with what an earlier start made of the row, if it did."""
        found = world.records.finished(item.row.key, self.name, 0, (item,))
        if found is None:
            return False
        ticket.fill(stage_item(item, item.row, *found))
        return True


Then = Callable[[Outcome, int], None]
"""What goes on with an outcome and its place."""

Divide = Callable[[], bool]
"""Asks about a refused row in smaller parts; returns False where it cannot be divided."""

MakeEngine = Callable[[Emit, Replace], RowRunner]


class RowRequester:
    """Asks about rows in the order given, and says what came of each.

    Args:
        plan: the stage's prompt and settings.
        records: where outcomes are.
        gate: the backpressure on the input.
        make_engine: makes the engine, given what takes its outcomes, and what may replace them.
    """

    def __init__(
        self, plan: StagePlan, records: StageResults, gate: Backpressure, make_engine: MakeEngine
    ) -> None:
        self.plan = plan
        self._records = records
        self._inbox = StageQueue(gate)
        self._waiting: dict[tuple[int, int], list[Then]] = {}
        self._divisible: dict[tuple[int, int], Divide] = {}
        self.engine = make_engine(self._ended, self._replace)

    def ask(
        self,
        unit: tuple[int, int],
        made_of: Sequence[StageRow],
        make: Callable[[], Row],
        then: Then,
        divide: Divide | None = None,
    ) -> None:
        """Have one answer for a row; ``then`` may be called at once.

        Args:
            unit: the row's key, and the number of the answer.
            made_of: what the row is made of.
            make: makes the row, with all that its prompt needs, just before it is sent.
            divide: called where the row's prompt is refused as too long for the context.
        """
        key, answer = unit
        found = self._records.finished(key, self.plan.name, answer, made_of)
        if found is not None:
            then(*found)
            return
        waiting = self._waiting.setdefault(unit, [])
        waiting.append(then)
        if divide is not None:
            self._divisible[unit] = divide
        if len(waiting) == 1:
            self._inbox.put(make, answer)

    def _replace(self, outcome: Outcome, row: Row) -> bool:
        """Divide a row that is too long for the context, if it can be divided."""
        unit = row.key, outcome.answer
        divide = self._divisible.pop(unit, None)
        if divide is None or outcome.error_kind != "context_overflow":
            return False
        waiting = self._waiting.pop(unit)
        if divide():
            return True
        self._waiting[unit] = waiting
        return False

    def _ended(self, outcome: Outcome, place: int, row: Row) -> None:
        self._records.note(outcome, place, row)
        for then in self._waiting.pop((row.key, outcome.answer), ()):
            then(outcome, place)

    def close(self) -> None:
        """No more rows come."""
        self._inbox.close()

    async def run(self) -> None:
        """Send what comes until it is closed and everything has ended."""
        await self.engine.run(self._inbox)
