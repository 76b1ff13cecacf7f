"""Which outcomes decide how a job of several stages ended: those of its last stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.stages.boards import section_stage
from bagent.store.codec import OK_CODE
from bagent.store.current import CurrentLines, Selection

if TYPE_CHECKING:
    from bagent.runs.stagejobs import PreparedStage


class LastStage(msgspec.Struct, frozen=True):
    """The last stage. ``may_be_empty``: it is a query, which may well find nothing."""

    name: str
    may_be_empty: bool

    def counts(self, run_dir: Path, part: str | None) -> tuple[int, int]:
        """How many current outcomes it has, and how many of them are not ok.

        Where it got no row at all since all rows before it failed, these count.

        Args:
            run_dir: the run directory.
            part: one part's journal, or None for those of all parts.
        """
        with CurrentLines(run_dir, lambda _: None) as lines:
            found = _codes(lines, Selection(stages=frozenset({self.name})), part)
            if not found and not self.may_be_empty:
                found = _codes(lines, Selection(), part)
                return sum(found.values()), sum(found.values())
        total = sum(found.values())
        return total, total - found[OK_CODE]


def _codes(lines: CurrentLines, selection: Selection, part: str | None) -> Counter[int]:
    return Counter(
        place.code
        for place in lines.written(selection)
        if part is None or lines.indexes[place.segment].segment.part == part
    )


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
