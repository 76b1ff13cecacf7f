"""Which stages can be read together, row by row: looked at before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagent.errors import JobError
from bagent.runs.stagejobs import PreparedStage
from bagent.stages.keys import INPUT
from bagent.stages.reduce import BY_ROW

if TYPE_CHECKING:
    from bagent.job.spec import JobSource

Descent = tuple[str, ...]
"""What the rows of a stage go back to: the input or a reduction that brought rows together, and
then each stage that made several rows of one."""


def check_joins(stages: Sequence[PreparedStage], source: JobSource) -> None:
    """Refuse a stage that reads several others of which no row belongs to just one row of another.

    Rows of a query are joined by the ids that it gives, which only the run knows.

    Raises:
        JobError: at the source that cannot be joined.
    """
    known: dict[str, Descent | None] = {INPUT: (INPUT,)}
    for stage in stages:
        before = [known[name] for name in stage.sources]
        if stage.spec.kind not in ("reduce", "sql"):
            _check(stage, before, source)
        known[stage.name] = _after(stage, before)


def _check(stage: PreparedStage, before: Sequence[Descent | None], source: JobSource) -> None:
    first, base = before[0], stage.sources[0]
    for number, (name, other) in enumerate(zip(stage.sources, before, strict=True)):
        if first is None or other is None or other == first[: len(other)]:
            continue
        words, hint = (
            f"{name} brought rows together, none of its rows belongs to one of {base}",
            "a sql stage joins any rows: SELECT ... FROM a, b",
        )
        if other[0] == first[0]:
            words = f"{name} may have several rows for one of {base}"
            hint = f"write {name} first in from, or reduce it by: id before"
        raise JobError(
            f"stage {stage.name}: from: {words}",
            hint=hint,
            at=source.position((*stage.at.path_of("from"), number)),
        )


def _after(stage: PreparedStage, before: Sequence[Descent | None]) -> Descent | None:
    kind, first = stage.spec.kind, before[0]
    if kind == "sql":
        return None
    if kind == "reduce":
        return _reduced(stage, before)
    several = kind in ("expand", "broadcast")
    if kind == "map":
        several = stage.asking[0].job.answers > 1
    return (*first, stage.name) if several and first is not None else first


def _reduced(stage: PreparedStage, before: Sequence[Descent | None]) -> Descent | None:
    if stage.spec.by != BY_ROW:
        return (stage.name,)
    if None in before:
        return None
    if any(one is not None and one[0] != INPUT for one in before):
        return (stage.name,)
    return (INPUT,) if stage.goal == 1 else (INPUT, stage.name)
