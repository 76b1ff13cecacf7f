"""Invariants of rows and their outcomes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bagent.types import PASSING_KINDS
from worlds.clock import EPOCH
from worlds.evidence import (
    Problems,
    answers_row,
    before,
    events_of,
    has_opened,
    invariant_for,
    is_answer,
    is_due,
    is_failed,
    kept_invariant,
    may_lose_answers,
    may_lose_requests,
    new_results,
    outcome_invariant,
    recorded_code,
    results_of,
    row_invariant,
    sent_by_row,
    terminal,
    unit_of,
    units_read,
    version_of,
)
from worlds.history import History, Start
from worlds.network import DELAY
from worlds.replies import LASTING, MAX_TOKENS, answer_text, base_kind


@outcome_invariant
def each_row_has_one_outcome(history: History) -> Problems:
    """A row is never there twice, and at the end each has its outcome."""
    for start in history.starts:
        numbers = [unit_of(history, result) for result in start.results]
        if len(set(numbers)) < len(numbers):
            yield f"start {start.number}: rows {numbers}"
        if start.code in (0, 1) and numbers != list(range(units_read(history, start))):
            yield f"start {start.number} ended with {start.code}: rows {numbers}"


@kept_invariant
def finished_rows_stay(history: History) -> Problems:
    """An ok row keeps its answer, whatever kills later starts; after a loss of power, those that
    finished within the last second may be lost, and those whose sync failed.

    A start that has opened the journal has synced what the one before it left unsynced.
    """
    synced, opened = True, 0.0
    for earlier, later in pairwise(history.starts):
        if has_opened(history, earlier):
            opened = earlier.ended
        after = results_of(later)
        synced &= "sync-fails" not in events_of(history, earlier.number)
        unsynced = later.began if has_opened(history, later) else opened - 1.0
        for row, result in results_of(earlier).items():
            version = later.versions.get(row, 0)
            edited = version_of(history, row, result) != version
            if result["status"] != "ok" or (edited and row in after):
                continue
            lost_power = later.killed_by_power and (
                result["finished_at"] >= EPOCH + unsynced or not synced
            )
            if not lost_power and (row not in after or after[row]["text"] != result["text"]):
                yield f"row {row} was ok after start {earlier.number}, now {after.get(row)}"


@kept_invariant
def finished_rows_are_not_sent_again(history: History) -> Problems:
    """A row is not sent again that is ok, or that failed for a reason that will stay.

    A process that was suspended may send some until it has seen that another one took its place.
    """
    for start in history.starts[1:]:
        previous = before(history, start)
        assert previous is not None
        results = results_of(previous)
        for row, requests in sent_by_row(history, start.number).items():
            equal = [unit for unit, lead in enumerate(history.world.leads) if lead == row]
            result = results.get(row)
            if result is None or start.woken or not equal:
                continue
            if any(_may_be_sent(history, start, unit) for unit in equal):
                continue
            yield (
                f"row {row} was {result['status']} {result['error_kind']} and was sent again"
                f" at {requests[0].at}"
            )


def _may_be_sent(history: History, start: Start, row: int) -> bool:
    """Return whether a start may send a row, by its result before it."""
    previous = before(history, start)
    result = None if previous is None else results_of(previous).get(row)
    return result is None or is_due(history, start, row, result)


COUNTED_AT_ONCE = 16
"""Long prompts whose tokens are counted at the same time; each is sent once that is done."""


@invariant_for("single", "schema", "lists")
def fresh_rows_go_first(history: History) -> Problems:
    """Until a run has ended, rows without a result are sent before those that failed: the latter
    cannot take the time of every start. A connection that is opened for one delays it a little, and
    rows whose tokens are counted at the same time may change places. A row of which one answer
    failed is one that failed. ``--ordered`` sends in input order."""
    answers = history.world.job.answers
    if history.world.job.options.get("ordered"):
        return
    for start in history.starts[1:]:
        earlier = history.starts[: start.number]
        if start.woken or {0, 1} & set(map(recorded_code, earlier)):
            continue
        results = results_of(earlier[-1])
        first = {row: sent[0].at for row, sent in sent_by_row(history, start.number).items()}
        repeated = {
            row
            for row in first.keys() & results.keys()
            if version_of(history, row, results[row]) == start.versions.get(row, 0)
        }
        failed = {row // answers for row in repeated}
        fresh = [row for row in first if row // answers not in failed]
        for row in repeated:
            later = [other for other in fresh if first[row] < first[other] - 1.5 * DELAY]
            counted = sum(_may_be_counted(history, other) for other in later)
            if len(later) > counted or counted > COUNTED_AT_ONCE:
                yield f"row {row} failed before, sent at {first[row]}, before fresh rows {later}"


def _may_be_counted(history: History, row: int) -> bool:
    """Return whether a server may be asked for the tokens of a row: it has many bytes, or a row was
    refused as too long."""
    world = history.world
    if any("overflow" in spec.replies for spec in world.rows):
        return True
    shortest = min(endpoint.context for endpoint in world.endpoints)
    size = world.job.system + len(world.units[row].text.encode())
    return size + MAX_TOKENS + 128 > shortest


@row_invariant
def a_start_that_ends_has_done_all(history: History) -> Problems:
    """A start that ends with 0 or 1 has sent each row without outcome, each one that may come out
    otherwise now, and each edited one."""
    for start in history.starts:
        previous = before(history, start)
        if start.code not in (0, 1) or start.woken:
            continue
        results = {} if previous is None else results_of(previous)
        sent = sent_by_row(history, start.number)
        for row, spec in enumerate(history.world.units[: units_read(history, start)]):
            result = results.get(row)
            due = result is None or is_due(history, start, row, result)
            kind = results_of(start).get(row, {}).get("error_kind")
            if kind in ("tool", "context_overflow"):
                continue  # its last turn was in the journal, or it was counted before it was sent
            if kind == "timeout" and history.world.job.row_seconds:
                continue  # it had no time for a request
            if due and row not in sent and spec.replies != ("unreadable",):
                yield f"start {start.number}: row {row} was not sent, before it was {result}"


@row_invariant
def outcomes_count_their_attempts(history: History) -> Problems:
    """The attempts of an outcome are the requests of its start; its endpoint answered the last."""
    for start in history.starts:
        if start.woken:
            continue  # the first of them are of the start that was suspended
        sent = sent_by_row(history, start.number)
        for row, result in new_results(history, start).items():
            requests = sent.get(row, [])
            if result["status"] == "ok" and result["endpoint"] is not None:
                answers = [sent for sent in requests if answers_row(sent, row)]
                first = min((sent.done for sent in answers), default=None)
                named = {f"server{s.endpoint}:8000" for s in answers if s.done == first}
                if result["endpoint"] not in named:
                    yield f"row {row}: {result['endpoint']}, answered by {named}"
            if history.world.job.kind == "agents":  # turns of earlier starts count
                requests = [sent for sent in history.network.sent if row in sent.rows]
            lost = may_lose_requests(history)
            if result["attempts"] < len(sent.get(row, [])) or (
                not lost and result["attempts"] > len(requests)
            ):
                yield f"row {row}: {result['attempts']} attempts, {len(requests)} requests"


@row_invariant
def an_answer_that_arrived_is_finished(history: History) -> Problems:
    """A row whose answer came is on disk, from the moment after. Where the disk is full, the start
    ends with 74, whatever else stops it."""
    for start in history.starts:
        if may_lose_answers(history, start):
            continue
        end = start.ended - (1.0 if start.killed_by_power else 0.0)
        results = results_of(start)
        for row, requests in sent_by_row(history, start.number).items():
            for sent in requests:
                if not is_answer(sent) or sent.done is None or sent.done >= end:
                    continue
                if row not in results or results[row]["status"] != "ok":
                    yield f"row {row} was answered at {sent.done}, and is {results.get(row)}"


def _last_reply(history: History, row: int, result: dict[str, Any]) -> str:
    """Return the reply that decided about a row; those before it asked for tools or a retry, or
    their failure did not last."""
    lead = history.world.leads[row]
    replies = history.world.units[lead].replies
    if history.world.job.kind == "agents" and result["status"] != "ok":
        return base_kind(replies[-1])
    number, kind = terminal(replies)
    rest = replies[number + 1 :]
    if rest and kind in LASTING and _may_follow_a_failure(history, lead):
        return terminal(rest)[1]
    return kind


def _may_follow_a_failure(history: History, row: int) -> bool:
    """Return whether a row may be sent again after a reply that ends it: the row was rejected when
    it was no longer streamed, since its server was busy; its start lost the failure; or a later
    start has to send it."""
    for start in history.starts:
        streamed, result = False, results_of(start).get(row)
        for sent in sent_by_row(history, start.number).get(row, []):
            kind = LASTING.get(base_kind(sent.reply))
            streamed |= sent.streamed
            if kind == "rejected" and streamed and not sent.streamed:
                return True
            if kind is None:
                continue
            if result is None and (start.code is None or may_lose_answers(history, start)):
                return True
            later = history.starts[start.number + 1 :]
            if result is not None and any(is_due(history, s, row, result) for s in later):
                return True
    return False


@kept_invariant
def outcomes_are_right(history: History) -> Problems:
    """An outcome is what the servers answered to this row: its text, or its kind of failure."""
    for start in history.starts:
        for row, result in results_of(start).items():
            last = _last_reply(history, row, result)
            status, kind = result["status"], result["error_kind"]
            where = f"start {start.number} row {row}: {status} {kind} {result['error']!r}"
            if status == "ok" or not is_failed(history, result):
                ending = ("ok", "slow", "usage") if status == "ok" else ("length",)
                versions = {start.versions.get(row, 0)}
                if start.code not in (0, 1):  # its edited text may not have been sent yet
                    versions |= {s.versions.get(row, 0) for s in history.starts[: start.number]}
                lead = history.world.leads[row]
                texts = [answer_text(lead, version, history.world.job.kind) for version in versions]
                if last not in ending or kind is not None or result["text"] not in texts:
                    yield f"{where}, text {result['text']!r}"
            elif last == "unreadable":
                if status != "bad_input":
                    yield where
            elif kind == "schema":
                if "invalid" not in history.world.units[row].replies:
                    yield where
            elif kind in ("max_turns", "tool"):
                pass  # agents_end_as_their_turns_say
            elif kind not in PASSING_KINDS and kind != LASTING.get(last):
                yield f"{where}, its replies end with {last!r}"
