"""Invariants of waiting: no row waits while a server that could take it has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from worlds.clock import EPOCH
from worlds.evidence import (
    DISK,
    Problems,
    events_of,
    invariant_for,
    is_answer,
    is_too_long,
    sent_by_row,
    sent_in,
)
from worlds.history import History, Start
from worlds.network import Sent
from worlds.replies import base_kind
from worlds.retry_invariants import LONGEST_RETRY_AFTER, LONGEST_SILENCE

LONGEST_IDLE = 20.0
"""Seconds for which a server has nothing to do at most, while a row waits."""

NOTICED = 35.0
"""Seconds within which a recovery is noticed, at most."""

LONGEST_BACKOFF = 62.0
"""Seconds between two attempts of a row at most, without a Retry-After."""

DEADLY = 2
"""Broken connections of a row after which it may run last."""

LONGEST_PAUSE = 75.0
"""Seconds in which nothing is sent at most, while a server is well."""

Span = tuple[float, float]


@invariant_for("single", "schema", "lists")
def no_server_idles_while_a_row_waits(history: History) -> Problems:
    """A server that is well is sent something within seconds, while a row waits for its first
    request or its backoff is over, and the run's own limits allow another one."""
    job = history.world.job
    if (job.deadline, job.budget, job.rpm, job.tpm) != (None, None, None, None):
        return
    for start in history.starts:
        if start.suspended or start.woken or events_of(history, start.number) & DISK:
            continue
        end = _fed_until(history, start)
        requests = sent_in(history, start.number)
        full = _full_spans(requests, job.concurrency, end)
        for index in range(len(history.world.endpoints)):
            waiting = _merged(_waits(history, start, end, index))
            own = [sent for sent in requests if sent.endpoint == index]
            busy = [(sent.at, end if sent.over is None else sent.over) for sent in own]
            ill = _ill(history, index, own)
            others = [sent for sent in requests if sent.endpoint != index]
            at_work = _merged((s.at, end if s.over is None else s.over) for s in others)
            elsewhere = _shared(_failed_here(history, start, index, end), at_work)
            absent = _absent(history, start, index)
            beginning = start.began, start.began + 2.0
            blocked = _merged([*busy, *full, *ill, *elsewhere, *absent, beginning])
            for begin, until in waiting:
                for first, last in _gaps(blocked, begin, until):
                    if last - first > LONGEST_IDLE:
                        yield f"start {start.number}: server {index} idles from {first} to {last}"


@invariant_for("single", "schema", "lists", "agents", "stages", "copies", "shards")
def something_is_under_way(history: History) -> Problems:
    """While a server is well, no start waits for a minute without any request: tools take less, and
    so does a backoff. A row waits for the end of a Retry-After, whichever server named it, and for
    the minutes that ``limits.tpm`` asks for its tokens."""
    job, longest = history.world.job, LONGEST_PAUSE
    if job.tpm is not None:
        size = job.system + max(len(row.text.encode()) for row in history.world.units)
        longest += 60.0 * (1.0 + size / 4 / job.tpm)
    servers = range(len(history.world.endpoints))
    for start in history.starts:
        if start.suspended or start.woken or events_of(history, start.number) & {"hosts", *DISK}:
            continue
        requests, end = sent_in(history, start.number), start.ended
        busy = [(sent.at, end if sent.over is None else sent.over) for sent in requests]
        for begin, until in list(_gaps(_merged(busy), start.began, end)):
            if until - begin <= longest:
                continue
            waiting = _waiting(history, start, until)
            for index in servers:
                if waiting and all(
                    is_too_long(history, row, index, stage) for stage, row in waiting
                ):
                    continue
                ill = _merged(_ill(history, index, requests))
                well = [last - first for first, last in _gaps(ill, begin, until)]
                if max(well, default=0.0) > longest:
                    yield f"start {start.number}: nothing is sent from {begin} to {until}"
                    break


def _waiting(history: History, start: Start, at: float) -> set[tuple[str, int]]:
    """Return stage and row of what waited until a time: it was sent before and ended about then or
    later, or is sent first then. Requests of other stages may wait for the former."""
    answers = history.world.job.answers
    ended = {
        (result["stage"], result["row"])
        for result in start.results
        if result["finished_at"] >= EPOCH + at - 1.0
    }
    begun, later = set[tuple[str, int]](), set[tuple[str, int]]()
    for sent in sent_in(history, start.number):
        for row in sent.rows:
            if sent.at >= at:
                later.add((sent.stage, row))
            elif (sent.stage or "main", row // answers) in ended:
                begun.add((sent.stage, row))
    stages = {stage for stage, _ in begun}
    return begun | {unit for unit in later if not stages or unit[0] in stages}


def _fed_until(history: History, start: Start) -> float:
    """Return when a start was asked to stop, or when it ended."""
    asked = [
        start.began + event.at
        for event in history.world.events
        if event.start == start.number and event.kind in ("term", "int", "stop-file", "rival")
    ]
    return min([start.ended, *asked])


def _waits(history: History, start: Start, end: float, index: int) -> Iterator[Span]:
    """Yield when rows waited that a server may have: before their first request, and between the
    others. One with which two servers died waits for the end of all others."""
    for row, requests in sent_by_row(history, start.number).items():
        if is_too_long(history, row, index):
            continue
        ordered = sorted(requests, key=lambda sent: sent.at)
        yield start.began, min(ordered[0].at, end)
        broken = 0
        for first, second in pairwise(ordered):
            broken += first.status is None
            if first.over is not None and broken < DEADLY:
                ready = first.over + LONGEST_BACKOFF
                ready += 1.2 * min(first.retry_after or 0.0, LONGEST_RETRY_AFTER)
                yield ready, min(second.at, end)


def _absent(history: History, start: Start, index: int) -> Iterator[Span]:
    """Yield when a server was not in the hostfile, and until its return is noticed."""
    written = [e for e in history.world.events if e.start == start.number and e.kind == "hosts"]
    since = None
    for event in sorted(written, key=lambda event: event.at):
        at = start.began + event.at
        if event.hosts and index not in event.hosts:
            since = at if since is None else since
        elif event.hosts and since is not None:
            yield since, at + NOTICED
            since = None
    if since is not None:
        yield since, start.ended


def _ill(history: History, index: int, own: Sequence[Sent]) -> Iterator[Span]:
    """Yield when a server need not be sent anything: it is ill, or has asked for a pause."""
    for window in history.network.windows(index):
        hangs = window.kind in ("hang", "silent")  # and so does a check that was sent meanwhile
        yield window.begin, window.end + (LONGEST_SILENCE if hangs else NOTICED)
    for sent in own:
        if sent.over is None:
            continue
        if base_kind(sent.reply) in ("429", "503", "529") or sent.retry_after is not None:
            yield (
                sent.at,
                sent.over
                + LONGEST_BACKOFF
                + 1.2 * min(sent.retry_after or 0.0, LONGEST_RETRY_AFTER),
            )


def _failed_here(history: History, start: Start, index: int, end: float) -> Iterator[Span]:
    """Yield when rows that failed at a server wait for others."""
    for requests in sent_by_row(history, start.number).values():
        failed = [sent for sent in requests if sent.endpoint == index and not is_answer(sent)]
        times = [sent.over for sent in failed if sent.over is not None]
        if times:
            last = max(requests, key=lambda sent: sent.at)
            yield min(times), end if last in failed else last.at


def _full_spans(requests: Sequence[Sent], concurrency: int | str, end: float) -> list[Span]:
    """Return when the run has as many rows in flight as it may."""
    if concurrency == "auto":
        return []
    steps = sorted(
        step
        for sent in requests
        for step in (
            (sent.at, len(sent.rows)),
            (end if sent.over is None else sent.over, -len(sent.rows)),
        )
    )
    spans, running, since = list[Span](), 0, None
    for at, change in steps:
        running += change
        if running >= int(concurrency) and since is None:
            since = at
        elif running < int(concurrency) and since is not None:
            spans.append((since, at))
            since = None
    return spans


def _merged(spans: Sequence[Span] | Iterator[Span]) -> list[Span]:
    """Return spans in order, those that overlap as one."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _shared(spans: Iterator[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of spans that others overlap."""
    for begin, end in spans:
        for first, last in others:
            yield max(begin, first), min(end, last)


def _gaps(blocked: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """Yield the parts of a time in which nothing is blocked."""
    for first, last in blocked:
        if last <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end
