"""What all stages share: their name, their stream, and what they do about rows that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from bagent.job.spec_stages import OnFailure
from bagent.stages.guards import StopAdvice
from bagent.stages.items import Item, value_of
from bagent.stages.keys import INPUT
from bagent.stages.records import Records
from bagent.stages.tickets import Reader, Stream
from bagent.types import Json, Outcome, Row

NO_SURVIVOR = "bad_input"
"""Error kind of a row for which nothing is left that came out ok."""


class World(msgspec.Struct, eq=False):
    """What the stages of one run share.

    ``stop`` ends the run early, ``notice`` tells people, ``now`` is Unix seconds.
    """

    records: Records
    stop: Callable[[StopAdvice], None]
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


class Entrance:
    """Decides about rows that failed before a stage.

    Args:
        name: the stage.
        on_failure: ``include``, ``drop`` or ``stop``.
        sees_dropped: the stage is shown what it drops, since it counts failures apart (a vote).

    ``dropped`` counts the rows that failed before and count for nothing from here on.
    """

    def __init__(
        self, name: str, on_failure: OnFailure, world: World, *, sees_dropped: bool = False
    ) -> None:
        self.name = name
        self.dropped = 0
        self._sees_dropped = sees_dropped
        self._on_failure = on_failure
        self._world = world

    def admits(self, item: Item) -> bool:
        """Whether the stage takes the row; a failed one may also stop the run."""
        if item.ok or self._on_failure == "include":
            return True
        if self._on_failure == "drop":
            self.dropped += 1
            return self._sees_dropped
        words = self.reason(item)
        self._world.stop(
            StopAdvice(
                f"stage {self.name} stops at a row that failed before it: {words}",
                "mend the cause, or write on_failure: include or drop",
            )
        )
        return False

    def unasked(self, item: Item) -> tuple[Outcome, int]:
        """The outcome, and its place, of a row that there is nothing to ask about."""
        records = self._world.records
        found = records.finished(item.row.key, self.name, 0, (item,))
        if found is not None:
            return found
        words = self.reason(item) if item.place is None else records.read(item.place).error
        row = made_row(item.row, item)
        outcome = ended_row(
            self.name, row, self._world.now(), error=(NO_SURVIVOR, words or "nothing came of it")
        )
        return outcome, records.write(outcome, row)

    def reason(self, item: Item) -> str:
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


class Names:
    """What a stage's templates can name beside fields: what earlier stages answered.

    Args:
        used: the names that its templates use; None: any.
    """

    def __init__(self, used: frozenset[str] | None, records: Records) -> None:
        self._used = used
        self._records = records

    def of(self, item: Item) -> dict[str, Json]:
        """Values by name for one row; only what is used is read."""
        used = self._used
        return {
            name: value_of(self._records.read(place))
            for name, place in item.seen.items()
            if used is None or name in used
        }


def made_row(row: Row, item: Item, extra: dict[str, Json] | None = None) -> Row:
    """``row`` as a stage sends it: with its parents and the further names of its prompt."""
    return msgspec.structs.replace(
        row,
        parents=item.parents,
        parents_failed=item.failed if item.failed and item.stage != INPUT else None,
        extra=extra or None,
    )


def ended_row(
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
