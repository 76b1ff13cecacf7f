"""Invariants of what people read: result rows on standard output, and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from worlds.evidence import ORDERLY, Problems, events_of, invariant, made_results
from worlds.history import History, Start
from worlds.journal_invariants import current_lines
from worlds.tables import COLUMNS

Record = dict[str, Any]


@invariant
def stdout_has_the_results(history: History) -> Problems:
    """``-o -`` prints the current result of each row once, also of those that earlier starts
    finished; after an early stop at least what this start did."""
    world = history.world
    if world.job.options.get("output") != "-":
        return
    for start in history.starts:
        if start.code not in ORDERLY or start.woken or start.suspended or start.ending is None:
            continue
        where = f"start {start.number}, {start.code}"
        printed, results = _counts(start.printed), _counts(start.results)
        if extra := printed - results:
            yield f"{where}: printed {extra}, which are not in the results"
        if "reader-gone" in events_of(history, start.number):
            continue
        if start.code in (0, 1) and world.job.kind != "shards":
            if results - printed:
                yield f"{where}: of the results not printed {results - printed}"
        elif not _prints_late(history, start):
            made = _counts(made_results(history, start))
            if made - printed:
                yield f"{where}: made, and not printed {made - printed}"


def _prints_late(history: History, start: Start) -> bool:
    """Return whether all lines come at the end: those of stages in order, after a first start."""
    return history.world.job.kind == "stages" and bool(history.world.job.options.get("ordered"))


@invariant
def ordered_lines_are_in_order(history: History) -> Problems:
    """With ``--ordered`` the lines of each stage are in the order of the input."""
    if not history.world.job.options.get("ordered"):
        return
    for start in history.starts:
        if start.suspended or start.woken:
            continue
        orders: dict[str, list[tuple[int, int]]] = {}
        for line in start.printed:
            if line["row"] is not None:
                orders.setdefault(line["stage"], []).append((line["row"], line["answer"]))
        for stage, order in orders.items():
            rows = [row for row, _ in order] if history.world.job.kind == "stages" else order
            if rows != sorted(rows):
                yield f"start {start.number}, {stage}: {order}"


@invariant
def a_closed_stdout_stops_a_start(history: History) -> Problems:
    """A start whose reader goes away before the last line ends with 75, and keeps all it has."""
    for event in history.world.events:
        if event.kind != "reader-gone" or event.start >= len(history.starts):
            continue
        start = history.starts[event.start]
        if len(start.printed) > event.at:
            yield f"start {start.number}: {len(start.printed)} lines, closed after {event.at}"
        if start.code in (0, 1) and len(start.printed) < len(start.results) and start.attempts:
            made = made_results(history, start)
            if made and history.world.job.kind != "shards":
                yield f"start {start.number}: {start.code}, {len(start.printed)} lines printed"


@invariant
def tables_are_the_journal(history: History) -> Problems:
    """The tables hold what a second reader finds in the journal."""
    if history.tables is None:
        return
    last = history.starts[-1]
    lines = {
        "results": current_lines(last),
        "attempts": last.attempts,
        "tool_calls": last.tool_records,
    }
    for name, columns in COLUMNS.items():
        expected, table = (_values(rows, columns) for rows in (lines[name], history.tables[name]))
        if expected != table:
            yield f"{name}: not in the table {expected - table}, only there {table - expected}"


def _values(rows: Iterable[Record], columns: tuple[str, ...]) -> Counter[tuple[Any, ...]]:
    records = (
        {"answer": 0} | row for row in rows
    )  # the journal leaves a first answer's number out
    return Counter(tuple(record.get(name) for name in columns) for record in records)


def _counts(results: Iterable[Record]) -> Counter[tuple[str, ...]]:
    names = ("stage", "row", "id", "answer", "status", "text", "finished_at")
    return Counter(tuple(str(result[name]) for name in names) for result in results)
