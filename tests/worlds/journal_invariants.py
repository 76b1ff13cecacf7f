"""Invariants of the journal, read a second time by a few lines that know nothing of its index."""

from __future__ import annotations

from typing import Any

from worlds.evidence import Problems, invariant
from worlds.history import History, Start

Record = dict[str, Any]


@invariant
def results_are_the_current_lines(history: History) -> Problems:
    """Of the lines of one row, stage and answer the first ok one counts, else the last; lines
    before a tombstone do not."""
    for start in history.starts:
        expected = sorted(map(_content, current_lines(start)))
        results = sorted(map(_content, start.results))
        if expected != results:
            missing = [line for line in expected if line not in results]
            extra = [line for line in results if line not in expected]
            yield f"start {start.number}: not in the results {missing}, only there {extra}"


def current_lines(start: Start) -> list[Record]:
    """Return the current lines of the journal after a start."""
    current: dict[tuple[str, str, int], Record] = {}
    for record in start.row_records:
        unit = record["key"], record["stage"], record.get("answer", 0)
        if record["status"] == "void":
            current.pop(unit, None)
        elif unit not in current or current[unit]["status"] != "ok":
            current[unit] = record
    return list(current.values())


def _content(record: Record) -> tuple[Any, ...]:
    return (
        record["row"], record["stage"], record.get("answer") or 0, record["status"],
        record.get("error_kind") or "", record.get("text") or "", record.get("finished_at") or 0.0,
    )  # fmt: skip
