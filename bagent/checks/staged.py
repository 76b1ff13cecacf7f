"""A look at a job of several stages: its first stage that asks, and all of them written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bagent.runs.prepare import Prepared
from bagent.runs.stagejobs import PreparedStage
from bagent.stages.boards import Board
from bagent.stages.items import input_response, responses
from bagent.stages.topologies import lay_out
from bagent.stages.written import written_out
from bagent.types import Row


def first_view(prepared: Prepared) -> tuple[Prepared, str | None]:
    """The job as its first stage that asks sees it, and the stages of a topology as YAML.

    A job of one map is looked at as it is.
    """
    stage = _first(prepared)
    if stage is None:
        return prepared, None
    asking = stage.asking[0]
    view = replace(prepared, job=asking.job, prompt=asking.prompt, schema=asking.schema)
    laid = lay_out(prepared.job)
    return view, None if prepared.job.stages else written_out(laid, prepared.job)


def _first(prepared: Prepared) -> PreparedStage | None:
    return next((stage for stage in prepared.stages if stage.asking), None)


def as_asked(prepared: Prepared, rows: Sequence[Row]) -> list[Row]:
    """Input rows as the first stage that asks gets them: alone, on a board, or as one group."""
    stage = _first(prepared)
    if stage is None or not rows:
        return list(rows)
    if stage.spec.kind == "loop":
        extra = {"board": Board(), "round": 1, "section": stage.asking[0].name}
        return [msgspec.structs.replace(row, extra=extra) for row in rows]
    if stage.spec.kind == "reduce":
        size = stage.spec.fanin or len(rows)
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [_grouped(group) for group in groups]
    return list(rows)


def _grouped(group: Sequence[Row]) -> Row:
    found = responses([input_response(row) for row in group])
    extra = {"responses": found, "n": len(group), "level": 1}
    return msgspec.structs.replace(group[0], extra=extra)
