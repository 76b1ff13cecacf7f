"""Invariants of rows and their outcomes."""

from __future__ import annotations

from itertools import pairwise

from bagent.types import PASSING_KINDS
from worlds.clock import EPOCH
from worlds.evidence import (
    DISK,
    Problems,
    before,
    by_row,
    events_of,
    has_dead_servers,
    invariant,
    is_answer,
    new_results,
    results_of,
    sent_in,
    terminal,
)
from worlds.network import LASTING, answer_text
from worlds.play import History, Start


@invariant
def each_row_has_one_outcome(history: History) -> Problems:
    """A row is never there twice, and at the end each has its outcome."""
    for start in history.starts:
        numbers = [result["row"] for result in start.results]
        if len(set(numbers)) < len(numbers):
            yield f"start {start.number}: rows {numbers}"
        if start.code in (0, 1) and numbers != list(range(len(history.world.rows))):
            yield f"start {start.number} ended with {start.code}: rows {numbers}"


@invariant
def finished_rows_stay(history: History) -> Problems:
    """An ok row keeps its answer, whatever kills later starts; after a loss of power, those that
    finished within the last second may be lost, and those whose sync failed."""
    synced = True
    for earlier, later in pairwise(history.starts):
        after = results_of(later)
        edited = {row for row, n in later.versions.items() if n != earlier.versions.get(row, 0)}
        synced &= "sync-fails" not in events_of(history, earlier.number)
        for row, result in results_of(earlier).items():
            if result["status"] != "ok" or row in edited:
                continue
            # A start syncs what a killed one left unsynced, some moments after it began.
            brief = later.ended - later.began < 0.5
            unsynced = (earlier.ended if brief else later.ended) - 1.0
            lost_power = later.killed_by_power and (
                result["finished_at"] >= EPOCH + unsynced or not synced
            )
            if not lost_power and (row not in after or after[row]["text"] != result["text"]):
                yield f"row {row} was ok after start {earlier.number}, now {after.get(row)}"


@invariant
def finished_rows_are_not_sent_again(history: History) -> Problems:
    """A row that is ok, or that failed for a lasting reason, is never sent again."""
    for start in history.starts[1:]:
        previous = before(history, start)
        assert previous is not None
        results = results_of(previous)
        edited = {row for row, n in start.versions.items() if n != previous.versions.get(row, 0)}
        for row, requests in by_row(sent_in(history, start.number)).items():
            result = results.get(row)
            if result is None or row in edited or _may_be_older(history, start, row):
                continue
            passing = result["error_kind"] in PASSING_KINDS
            ended = previous.code in (0, 1)
            if result["status"] == "ok" or not (
                passing or (ended and result["error_kind"] == "auth")
            ):
                yield (
                    f"row {row} was {result['status']} {result['error_kind']} and was sent again"
                    f" at {requests[0].at}"
                )


def _may_be_older(history: History, start: Start, row: int) -> bool:
    """Return whether an edited row may still have the outcome of its older text."""
    return any(
        earlier.versions.get(row, 0) != start.versions.get(row, 0)
        for earlier in history.starts[: start.number]
    )


@invariant
def a_start_that_ends_has_done_all(history: History) -> Problems:
    """A start that ends with 0 or 1 has sent each row without outcome, each one that had failed for
    a passing reason, and each edited one."""
    for start in history.starts:
        previous = before(history, start)
        if start.code not in (0, 1):
            continue
        results = {} if previous is None else results_of(previous)
        versions = {} if previous is None else previous.versions
        sent = by_row(sent_in(history, start.number))
        for row, spec in enumerate(history.world.rows):
            result = results.get(row)
            due = result is None or result["error_kind"] in PASSING_KINDS
            due |= start.versions.get(row, 0) != versions.get(row, 0)
            if due and row not in sent and spec.replies != ("unreadable",):
                yield f"start {start.number}: row {row} was not sent, before it was {result}"


@invariant
def outcomes_count_their_attempts(history: History) -> Problems:
    """The attempts of an outcome are the requests of its start; its endpoint answered the last."""
    for start in history.starts:
        sent = by_row(sent_in(history, start.number))
        for row, result in new_results(history, start).items():
            requests = sent.get(row, [])
            if result["status"] == "ok" and result["endpoint"] is not None:
                named = f"server{requests[-1].endpoint}:8000" if requests else "none"
                if result["endpoint"] != named:
                    yield f"row {row}: {result['endpoint']}, answered by {named}"
            lost = has_dead_servers(history)
            if result["attempts"] < len(requests) or (
                not lost and result["attempts"] > len(requests)
            ):
                yield f"row {row}: {result['attempts']} attempts, {len(requests)} requests"


@invariant
def an_answer_that_arrived_is_finished(history: History) -> Problems:
    """A row whose answer came is on disk, from the moment after."""
    for start in history.starts:
        if events_of(history, start.number) & DISK or start.killed_by_power:
            continue
        results = results_of(start)
        for row, requests in by_row(sent_in(history, start.number)).items():
            for sent in requests:
                good = is_answer(sent)
                if not good or sent.status != 200 or sent.done is None or sent.done >= start.ended:
                    continue
                if row not in results or results[row]["status"] != "ok":
                    yield f"row {row} was answered at {sent.done}, and is {results.get(row)}"


@invariant
def outcomes_are_right(history: History) -> Problems:
    """An outcome is what the servers answered to this row: its text, or its kind of failure."""
    for start in history.starts:
        for row, result in results_of(start).items():
            _, last = terminal(history.world.rows[row])
            status, kind = result["status"], result["error_kind"]
            where = f"start {start.number} row {row}: {status} {kind} {result['error']!r}"
            if status == "ok":
                version, job = start.versions.get(row, 0), history.world.job.kind
                text, early = answer_text(row, version, job), answer_text(row, version - 1, job)
                right = result["text"] == text or (
                    start.code not in (0, 1) and result["text"] == early
                )
                if last not in ("ok", "slow", "usage") or not right:
                    yield f"{where}, text {result['text']!r}"
            elif last == "unreadable":
                if status != "bad_input":
                    yield where
            elif kind == "schema":
                if "invalid" not in history.world.rows[row].replies:
                    yield where
            elif kind not in PASSING_KINDS and kind != LASTING.get(last):
                yield f"{where}, its replies end with {last!r}"
