"""Invariants of early stops: signals, a stop file, deadlines, budgets and outages."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

from worlds.clock import EPOCH
from worlds.evidence import (
    Problems,
    events_of,
    invariant,
    invariant_for,
    is_answer,
    is_failed,
    is_too_long,
    new_results,
    sent_by_row,
    sent_in,
    units_read,
)
from worlds.history import History
from worlds.network import Sent
from worlds.replies import ANSWER_USD, MAX_TOKENS, base_kind
from worlds.retry_invariants import LONGEST_INTERVAL, LONGEST_RETRY_AFTER
from worlds.spec import Window

GRACE = 10.0
"""Seconds after a signal at which batch systems kill."""

NOTICED = 1.0
"""Seconds within which a stop file is seen."""

SHORT_RECOVERY = 2.0
"""Seconds of health that nobody has to notice."""

LONGEST_OUTAGE = 240.0
"""Seconds for which all servers are ill in one start, at most: the guide's two minutes, and those
until requests have failed."""

OUTAGES = ("answer since", "served nothing for", "no endpoint answers", "no endpoint serves")
"""Parts of the reasons of a start that stops in an outage."""

BUSY = ("429", "503", "529")
"""Replies of servers that are busy."""

BUSY_SECONDS = 15.0
"""Seconds after which busy rows stop a start in which nothing else is served, at least."""


@invariant
def a_stop_is_quick(history: History) -> Problems:
    """After a signal or a stop file nothing new is sent, and the start ends within seconds; after a
    second Ctrl-C it ends at once."""
    for start in history.starts:
        asked = sorted(
            (start.began + event.at + (NOTICED if event.kind == "stop-file" else 0.0), event.kind)
            for event in history.world.events
            if event.start == start.number and event.kind in ("term", "int", "stop-file")
        )
        asked = [entry for entry in asked if entry[0] < start.ended]
        if not asked:
            continue
        at = asked[0][0]
        for sent in sent_in(history, start.number):
            if sent.at > at + 0.1:
                yield f"start {start.number}: row {sent.rows} sent at {sent.at}, stopped at {at}"
        if start.ended > at + GRACE:
            yield f"start {start.number} ended at {start.ended}, stopped at {at}"
        again = [second for second, kind in asked[1:] if kind == "int"]
        if again and start.ended > again[0] + 1.0:
            yield f"start {start.number} ended at {start.ended}, hurried at {again[0]}"


@invariant
def a_second_interrupt_is_130(history: History) -> Problems:
    """Only a second signal ends a start with 130."""
    for start in history.starts:
        signals = [
            event
            for event in history.world.events
            if event.start == start.number and event.kind in ("term", "int")
        ]
        if start.code == 130 and len(signals) < 2:
            yield f"start {start.number}: {signals}"


@invariant
def a_deadline_is_kept(history: History) -> Problems:
    """A start feeds until a quarter of its time remains, and has ended when the time is over."""
    seconds = history.world.job.deadline
    if seconds is None:
        return
    for start in history.starts:
        feeding = start.began + 0.75 * seconds
        for sent in sent_in(history, start.number):
            if sent.at > feeding + 0.1:
                yield f"start {start.number}: row {sent.rows} sent at {sent.at}"
        if start.ended > start.began + seconds:
            yield f"start {start.number} began at {start.began}, ended at {start.ended}"
        reason = start.ending.reason if start.ending is not None else ""
        if "deadline" in reason and start.ended < feeding - 0.1:
            yield f"start {start.number} stopped at {start.ended}: {reason}"


@invariant
def the_budget_is_kept(history: History) -> Problems:
    """What is spent, and what requests in flight may cost, is never more than the budget; the
    budget stops a start only where the next request might pass it."""
    budget = history.world.job.budget
    if budget is None:
        return
    for start in history.starts:
        requests = list(sent_in(history, start.number))
        for sent in requests:
            least = sum(_costs_at(other, sent.at)[0] for other in requests if other.at <= sent.at)
            if least > budget + 1e-6:
                yield f"start {start.number}: ${least} or more at {sent.at}, budget ${budget}"
                break
        reason = start.ending.reason if start.ending is not None else ""
        spent = sum(_costs_at(sent, start.ended)[1] for sent in requests)
        if "budget" in reason:
            if start.code != 76:
                yield f"start {start.number}: {start.code} {reason}"
            largest = max((len(sent.rows) for sent in requests), default=8)
            if spent + MAX_TOKENS * max(largest, 8) < budget:
                yield f"start {start.number}: ${spent} of ${budget} are spent: {reason}"


@invariant_for("single", "schema", "lists", "copies")
def alike_failures_stop_a_start(history: History) -> Problems:
    """Once as many rows in a row were refused alike as a start stops for, it stops within a few
    more; a good answer between them begins the count anew."""
    alike = history.world.job.alike
    for start in history.starts:
        reason = start.ending.reason if start.ending is not None else ""
        if start.woken or start.ending is None:
            continue
        if events_of(history, start.number) & {"term", "int", "stop-file", "rival"}:
            continue
        results = sorted(new_results(history, start).values(), key=lambda r: r["finished_at"])
        answered = [r for r in results if r["endpoint"] is not None and r["copied_from"] is None]
        longest = max(
            (_streak(answered, name) for name in (None, *_endpoints(answered))), default=0
        )
        if "failed alike" in reason:
            if start.code != 76 or longest < alike:
                yield f"start {start.number}: {start.code}, at most {longest} alike: {reason}"
        elif start.code in (0, 1) and _streak(answered, None, {"rejected"}) >= alike + 30:
            yield f"start {start.number}: {longest} rows were refused, and it went on"


def _endpoints(results: list[dict[str, Any]]) -> set[str]:
    return {result["endpoint"] for result in results}


def _streak(
    results: list[dict[str, Any]], endpoint: str | None, kinds: Container[str] | None = None
) -> int:
    """Return how many results of an endpoint, or of all, failed in a row with one lasting kind;
    of results that came in one moment nobody knows the order."""
    longest, count, last = 0, 0, ("", -1.0)
    for result in results:
        if endpoint not in (None, result["endpoint"]):
            continue
        kind, at = result["error_kind"] or "", result["finished_at"]
        if not kind:
            count = count if at == last[1] else 0
        elif kinds is None or kind in kinds:
            count = count + 1 if kind == last[0] or not count else 1
        last = kind or last[0], at
        longest = max(longest, count)
    return longest


@invariant_for("single", "schema", "lists")
def failures_stop_a_start(history: History) -> Problems:
    """``limits.stop_after_failures`` ends a start with 76 at that many failed rows, not before, and
    nothing is sent after them."""
    most = history.world.job.stop_after
    for start in history.starts if most is not None else ():
        if start.woken or start.ending is None:
            continue
        results = new_results(history, start).values()
        failed = sorted(r["finished_at"] - EPOCH for r in results if is_failed(history, r))
        reached = "stop_after_failures" in start.ending.reason
        if reached and (start.code != 76 or len(failed) < most):
            yield f"start {start.number}: {start.code} after {failed}"
        if len(failed) >= most:
            late = [s.at for s in sent_in(history, start.number) if s.at > failed[most - 1] + 1.0]
            if late:
                yield f"start {start.number}: rows failed at {failed}, sent at {late}"


@invariant_for("single", "schema", "lists")
def a_row_has_its_time(history: History) -> Problems:
    """``limits.row`` ends a row with all its requests, that in flight as well."""
    seconds = history.world.job.row_seconds
    for start in history.starts if seconds is not None else ():
        for row, requests in sent_by_row(history, start.number).items():
            over = max(min(start.ended, s.over or start.ended) for s in requests)
            if over > requests[0].at + seconds + 0.5:
                yield f"start {start.number} row {row}: from {requests[0].at} to {over}"


@invariant_for("single", "schema", "lists")
def the_pace_is_kept(history: History) -> Problems:
    """``limits.rpm`` spreads requests over the minute, those of all servers together."""
    rpm = history.world.job.rpm
    for start in history.starts if rpm is not None else ():
        times = sorted(sent.at for sent in sent_in(history, start.number))
        for first, second in pairwise(times):
            if second - first < 60.0 / rpm - 0.06:
                yield f"start {start.number}: requests at {first} and {second}"
                break


@invariant
def an_outage_stops_in_time(history: History) -> Problems:
    """Where no server serves, a start stops within minutes, and not before servers had their time:
    3 s where all refuse key or model, 10 s else, none where the account is spent. Rows that are
    refused as at a busy server may stop it as well. A server that is well serves nothing to rows
    that are too long for it."""
    for start in history.starts:
        job, requests = history.world.job, sent_in(history, start.number)
        limited = (job.deadline, job.budget, job.stop_after) != (None, None, None)
        if start.woken or limited or events_of(history, start.number):
            continue
        windows = list(map(history.network.windows, range(len(history.world.endpoints))))
        busy = any(base_kind(w.kind) in BUSY for ill in windows for w in ill)
        if all(windows) and not busy:  # rows wait for a busy server
            begin = max(start.began, *(ill[0].begin for ill in windows))
            end = min(start.ended, *(ill[0].end for ill in windows))
            if end - begin > LONGEST_OUTAGE:
                yield f"start {start.number} did not stop, all were ill from {begin} to {end}"
        if start.code not in (75, 76):
            continue
        if any(endpoint.capacity for endpoint in history.world.endpoints) or not any(windows):
            continue
        at = start.ended
        states = {history.network.state_at(n, at - 0.01, at) for n in range(len(windows))}
        if _has_busy_rows(requests, at) or states == {"quota"}:
            continue
        rows = set(range(units_read(history, start))) - start.result_of.keys()
        rows |= {row for sent in requests for row in sent.rows} - new_results(history, start).keys()
        free = [
            seconds
            for index, ill in enumerate(windows)
            if (seconds := _well_before(ill, at))
            or not rows
            or not all(is_too_long(history, row, index) for row in rows)
        ]
        shortest = min(free, default=0.0)
        if shortest < 2.9 and at - start.began > 12.0:
            yield f"start {start.number} stopped at {at}: one ill for {shortest} s"


@invariant
def an_outage_has_its_time(history: History) -> Problems:
    """Once servers have served a start, it waits two minutes for one of them to come back, and half
    a minute where all refuse key or model; before that ten seconds, and three. What was served in
    between ends an outage, but not what is answered after the last request of any kind: the start
    has stopped by then."""
    for start in history.starts:
        reason = start.ending.reason if start.ending is not None else ""
        if not any(text in reason for text in OUTAGES):
            continue
        if start.woken or events_of(history, start.number) & {"hosts"}:
            continue
        asked = max(at for at, _ in history.network.asked_at if at < start.ended)
        answers = [
            sent.done
            for sent in sent_in(history, start.number)
            if sent.done is not None and sent.done <= asked and is_answer(sent)
        ]
        kinds = {
            window.kind
            for index in range(len(history.world.endpoints))
            for window in history.network.windows(index)
            if window.begin < start.ended < window.end + 60.0
        }
        refused = bool(kinds & {"401", "403", "lost-model"})
        least = (29.0 if refused else 118.0) if answers else (2.9 if refused else 9.9)
        since = max(answers, default=start.began)
        if start.ended - since < least:
            yield f"start {start.number} ended at {start.ended}, served at {since}: {reason}"


def _has_busy_rows(requests: Sequence[Sent], at: float) -> bool:
    """Return whether a healthy server shortly before refused a row as a busy one does, or asked for
    a pause that lasts."""
    return any(
        not sent.by_endpoint
        and base_kind(sent.reply) in BUSY
        and at - max(BUSY_SECONDS, 1.2 * min(sent.retry_after or 0.0, LONGEST_RETRY_AFTER))
        <= (at if sent.done is None else sent.done)
        for sent in requests
    )


def _well_before(windows: Sequence[Window], at: float) -> float:
    """Return for how long an endpoint had not been well at a time; 0: it was well.

    An ill endpoint is asked at growing intervals, so its recovery is noticed later.
    """
    begin, noticed = at, -1.0
    for window in windows:
        if window.begin > at:
            break
        if window.begin > noticed:
            begin = window.begin
        noticed = window.end + min(LONGEST_INTERVAL, window.end - begin) + SHORT_RECOVERY
    return at - begin if at <= noticed else 0.0


def _costs_at(sent: Sent, at: float) -> tuple[float, float]:
    """Return what a request may have cost at a time, at least and at most: an answer that cannot be
    read, or that the client did not wait for, counts in full; an error in it, or one that broke
    off, may do so."""
    over, in_full = sent.over, float(MAX_TOKENS * len(sent.rows))
    if over is None or over >= at:
        return in_full, in_full
    replies = sent.replies or (sent.reply,)
    if sent.gone is not None and sent.status is None:
        return in_full, in_full  # the server may bill it all the same
    if sent.status is None or base_kind(sent.reply) == "error200":
        return 0.0, in_full
    if sent.status >= 400:
        return 0.0, 0.0
    answered = all(
        base_kind(reply) in ("ok", "slow", "length", "filter", "blank", "invalid", "tools")
        for reply in replies
    )
    cost = ANSWER_USD * len(sent.rows) if answered else in_full
    return cost, cost
