"""Invariants of what people see while a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from worlds.evidence import (
    DISK,
    ORDERLY,
    Problems,
    attempts_of,
    events_of,
    invariant_for,
    outcome_invariant,
    units_read,
)
from worlds.history import History, Start
from worlds.watch import Moment


@outcome_invariant
def progress_is_what_is_written(history: History) -> Problems:
    """At each update the progress counts the rows of the journal by status, and those that remain
    are the others."""
    for start, moment in _moments(history):
        shown = moment.snapshot
        if shown is None:
            continue
        where = f"start {start.number} at {moment.at}"
        counts = {status: count for status, count in shown.by_status.items() if count}
        if counts != moment.by_status:
            yield f"{where}: shown {counts}, written {moment.by_status}"
        if shown.ok + shown.failed + shown.accepted != moment.results:
            yield f"{where}: {shown.ok} ok, {shown.failed} failed, {moment.results} written"
        if shown.fraction is not None and not 0.0 <= shown.fraction <= 1.0:
            yield f"{where}: a part of {shown.fraction} is done"
        remaining = units_read(history, start) - moment.results
        exact = shown.total_is_exact and not _is_edited(history)
        if exact and shown.remaining not in (None, remaining):
            yield f"{where}: {shown.remaining} remain, not {remaining}"


def _moments(history: History) -> Iterator[tuple[Start, Moment]]:
    """Yield the looks at each start whose process and disk were well."""
    for start in history.starts:
        if start.suspended or start.woken or events_of(history, start.number) & DISK:
            continue
        for moment in start.moments:
            yield start, moment


def _is_edited(history: History) -> bool:
    return any(start.versions for start in history.starts)


@outcome_invariant
def status_is_right_while_it_runs(history: History) -> Problems:
    """``bagent status`` of a run that goes on counts the rows of the journal."""
    for start, moment in _moments(history):
        status, where = moment.status, f"start {start.number} at {moment.at}"
        if not status:
            continue
        if status["state"] != "running" or status["exit_code"] is not None:
            yield f"{where}: {status['state']}, {status['exit_code']}"
        if status["by_status"] != moment.by_status:
            yield f"{where}: {status['by_status']}, written {moment.by_status}"
        ended = status["ok"] + status["accepted"] + status["failed"]
        if ended != moment.results:
            yield f"{where}: {ended} ended, {moment.results} written"
        if status["remaining"] is not None and status["total"] != ended + status["remaining"]:
            yield f"{where}: {status}"


@invariant_for("single", "schema", "lists", "agents", "stages", "copies")
def attempts_of_endpoints_add_up(history: History) -> Problems:
    """The list of endpoints counts the attempts at each, and those that failed."""
    for start in history.starts:
        if not _is_whole(history, start):
            continue
        tries, failed = Counter[str](), Counter[str]()
        for attempt in attempts_of(history, start):
            tries[attempt["endpoint"]] += 1
            failed[attempt["endpoint"]] += attempt.get("error_kind") is not None
        for name, shown in start.endpoints.items():
            if shown != (tries[name], failed[name]):
                counted = tries[name], failed[name]
                yield f"start {start.number} {name}: shown {shown}, attempts {counted}"


def _is_whole(history: History, start: Start) -> bool:
    hosts = "hosts" in events_of(history, start.number)  # one that came back has two lines
    return start.code in ORDERLY and not (start.woken or start.suspended or hosts)
