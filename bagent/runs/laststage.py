"""The names of a job's stages in the results, and which is the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagent.stages.boards import section_stage
from bagent.store.totals import LastStage

if TYPE_CHECKING:
    from bagent.runs.stagejobs import PreparedStage


def last_stage(stages: Sequence[PreparedStage]) -> LastStage | None:
    """The last of ``stages``; None where there are none: then all outcomes count."""
    if not stages:
        return None
    last = stages[-1]
    return LastStage(last.name, last.spec.kind == "sql")


def stage_names(stages: Sequence[PreparedStage]) -> list[str]:
    """The names of all stages in results, in order; sections of a loop before the loop."""
    names = []
    for stage in stages:
        if stage.spec.kind == "loop":
            names += [section_stage(stage.name, asking.name) for asking in stage.asking]
        names.append(stage.name)
    return names
