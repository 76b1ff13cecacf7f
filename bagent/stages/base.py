"""The parts that all stages share: context, failure policy, prompt variables and row requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from bagent.agents.plan import StagePlan
from bagent.job.spec.stages import OnFailure
from bagent.stages.feeder import Backpressure, StageQueue
from bagent.stages.results import Emit, StageResults, WrittenRow
from bagent.stages.row import INPUT, StageRow, stage_item, value_of
from bagent.stages.row_runner import IsReplaced, RowRunner
from bagent.stages.slots import Reader, Slot, Stream, UnorderedReader
from bagent.stages.stop_rules import StopReason
from bagent.types import Json, Outcome, Row

NO_SURVIVOR = "bad_input"
"""Error kind of a row whose sources all failed."""

Recorded = tuple[Outcome, int]
"""An outcome and its location."""


class StageContext(msgspec.Struct, eq=False):
    """What the stages of one run share."""

    results: StageResults
    stop: Callable[[StopReason], None]
    """Ends the run early."""
    notice: Callable[[str], None]
    """Shows a message to the user."""
    now: Callable[[], float]
    """Unix seconds."""

    def record(
        self,
        stage: str,
        row: Row,
        made_of: Iterable[StageRow] = (),
        *,
        output: Json = None,
        error: tuple[str, str] | None = None,
    ) -> Recorded:
        """Return the outcome of a row that needs no request.

        It is written unless an earlier start did so.

        Args:
            stage: the stage's name.
            row: the row.
            made_of: the rows that it is made of.
            output: its value where it is good.
            error: kind and message where it is not.
        """
        finished = self.results.finished(row.key, stage, 0, made_of)
        if finished is None:
            outcome = make_outcome(stage, row, self.now(), output=output, error=error)
            finished = outcome, self.results.write(outcome, row)
        return finished


class Stage(Protocol):
    """One stage of a pipeline."""

    name: str
    out: Stream

    def readers(self) -> list[Reader]:
        """Return the readers of the stages before it, one for each in order."""
        ...

    async def run(self) -> None:
        """Work until the input and everything made of it have ended."""
        ...


class FailurePolicy:
    """Decides about rows that failed before a stage.

    Args:
        name: the stage.
        on_failure: ``include``, ``drop`` or ``stop``.
        sees_dropped: the stage still receives dropped rows, to count failures (a vote).
    """

    def __init__(
        self, name: str, on_failure: OnFailure, context: StageContext, *, sees_dropped: bool = False
    ) -> None:
        self.name = name
        self.dropped = 0
        """Rows that failed before and are left out from here on."""
        self._sees_dropped = sees_dropped
        self._on_failure = on_failure
        self._context = context

    def admits(self, item: StageRow) -> bool:
        """Return whether the stage takes the row; a failed one may also stop the run."""
        if item.ok or self._on_failure == "include":
            return True
        if self._on_failure == "drop":
            self.dropped += 1
            return self._sees_dropped
        self._context.stop(
            StopReason(
                f"stage {self.name} stops at a row that failed before it: {self.reason(item)}",
                "remove the cause, or write on_failure: include or drop",
            )
        )
        return False

    def record_failure(self, item: StageRow) -> Recorded:
        """Record the failed outcome of a row that there is nothing to ask about."""
        if item.location is None:
            message: str | None = self.reason(item)
        else:
            message = self._context.results.read(item.location).error
        error = NO_SURVIVOR, message or "nothing came of it"
        return self._context.record(self.name, prompt_row(item.row, item), (item,), error=error)

    def reason(self, item: StageRow) -> str:
        """Return why a row failed before this stage."""
        if item.location is None:
            return f"{item.ref}: {item.row.error}"
        outcome = self._context.results.read(item.location)
        return f"{item.ref}: {outcome.error or outcome.status}"

    def report_dropped(self) -> None:
        """Show how many rows were dropped."""
        if self.dropped:
            rows = "1 row was" if self.dropped == 1 else f"{self.dropped:,} rows were"
            self._context.notice(
                f"stage {self.name}: {rows} dropped, having failed before it (on_failure: drop)"
            )


class PromptVariables:
    """The names beside fields in a stage's templates: the answers of earlier stages.

    Args:
        used: the names that its templates use; None: any.
    """

    def __init__(self, used: frozenset[str] | None, results: StageResults) -> None:
        self._used = used
        self._results = results

    def of(self, item: StageRow) -> dict[str, Json]:
        """Return the values by name for one row; only used ones are read."""
        used = self._used
        return {
            name: value_of(self._results.read(location))
            for name, location in item.seen.items()
            if used is None or name in used
        }


def prompt_row(row: Row, item: StageRow, extra: dict[str, Json] | None = None) -> Row:
    """Return ``row`` as a stage sends it: with its parents and the variables of its prompt."""
    return msgspec.structs.replace(
        row,
        parents=item.parents,
        parents_failed=item.failed if item.failed and item.stage != INPUT else None,
        extra=extra or None,
    )


def make_outcome(
    stage: str, row: Row, now: float, *, output: Json = None, error: tuple[str, str] | None = None
) -> Outcome:
    """Return the outcome of a row that has ``output``, or ``error`` (its kind and message)."""
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
    """Base of the stages that read one stream; rows that their policy drops leave nothing."""

    def __init__(self, name: str, policy: FailurePolicy) -> None:
        self.name = name
        self.out = Stream()
        self._policy = policy

    def readers(self) -> list[Reader]:
        """Return the reader of its one stream; rows are read as they end."""
        return [UnorderedReader(self._on_row, self._on_input_end, self.out)]

    def _on_row(self, item: StageRow, slot: Slot) -> None:
        if not self._policy.admits(item):
            slot.split(0)
        elif item.nothing_to_ask:
            slot.fill(stage_item(item, item.row, *self._policy.record_failure(item)))
        else:
            self._process(item, slot)

    @abstractmethod
    def _process(self, item: StageRow, slot: Slot) -> None:
        """Work on one row and fill its slot, now or later."""

    def _on_input_end(self) -> None:
        """Handle the end of the input."""
        self._policy.report_dropped()

    def _was_finished(self, context: StageContext, item: StageRow, slot: Slot) -> bool:
        """Fill the slot with the outcome of an earlier start, if there is one."""
        finished = context.results.finished(item.row.key, self.name, 0, (item,))
        if finished is None:
            return False
        slot.fill(stage_item(item, item.row, *finished))
        return True


Then = Callable[[Outcome, int], None]
"""Takes an outcome and its location."""

Divide = Callable[[], bool]
"""Asks about a refused row in smaller parts; returns False where it cannot be divided."""

MakeRunner = Callable[[Emit, IsReplaced], RowRunner]


class RowRequester:
    """Asks about rows in the order given, and passes each outcome on.

    Args:
        plan: the stage's prompt and settings.
        results: where outcomes are.
        backpressure: pauses the input while too many rows wait here.
        make_runner: makes the runner, given what takes its outcomes, and what may replace them.
    """

    def __init__(
        self,
        plan: StagePlan,
        results: StageResults,
        backpressure: Backpressure,
        make_runner: MakeRunner,
    ) -> None:
        self.plan = plan
        self._results = results
        self._queue = StageQueue(backpressure)
        self._waiting: dict[tuple[int, int], list[Then]] = {}
        self._divisible: dict[tuple[int, int], Divide] = {}
        self.runner = make_runner(self._on_outcomes, self._replace)

    def ask(
        self,
        unit: tuple[int, int],
        made_of: Sequence[StageRow],
        make: Callable[[], Row],
        then: Then,
        divide: Divide | None = None,
    ) -> None:
        """Request one answer for a row; ``then`` may be called at once.

        Args:
            unit: the row's key, and the number of the answer.
            made_of: the rows that it is made of.
            make: makes the row with all that its prompt needs, just before it is sent.
            then: takes its outcome.
            divide: called where the row's prompt is refused as too long for the context.
        """
        key, answer = unit
        finished = self._results.finished(key, self.plan.name, answer, made_of)
        if finished is not None:
            then(*finished)
            return
        waiting = self._waiting.setdefault(unit, [])
        waiting.append(then)
        if divide is not None:
            self._divisible[unit] = divide
        if len(waiting) == 1:
            self._queue.put(make, answer)

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

    def _on_outcomes(self, written: Sequence[WrittenRow]) -> None:
        for outcome, location, row in written:
            self._results.note(outcome, location, row)
            for then in self._waiting.pop((row.key, outcome.answer), ()):
                then(outcome, location)

    def close(self) -> None:
        """Mark the end: no more rows come."""
        self._queue.close()

    async def run(self) -> None:
        """Send rows until the requester is closed and everything has ended."""
        await self.runner.run(self._queue)
