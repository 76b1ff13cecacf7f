"""Invariants of attempts, retries, limits and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2

from bagent.fleet.limits.concurrency import LATEST
from bagent.types import PASSING_KINDS
from worlds.evidence import (
    ORDERLY,
    Problems,
    before,
    events_of,
    invariant,
    invariant_for,
    is_answer,
    is_cut_short,
    is_simple,
    is_too_long,
    new_results,
    recovered_soon,
    row_invariant,
    sent_by_row,
    sent_in,
    unit_of,
    work_seconds,
)
from worlds.history import History
from worlds.network import Sent
from worlds.replies import ANSWER_USD, COUNTED, MAX_TOKENS, base_kind

LEAST_HEDGE = 1.0
"""Seconds after which ``hedge: auto`` takes a row for late, at least."""

LONGEST_INTERVAL = 30.0
"""Seconds between two checks of an endpoint that is ill, at most."""

LONGEST_SILENCE = 60.0
"""Seconds after which a server that is well again is asked something, at most."""

LONGEST_RETRY_AFTER = 120.0
"""``limits.retry_after_max`` in seconds, where the job does not set it."""

LONGEST_DOWN = 6.5
"""Seconds between two probes of a server that refuses connections, at most, with their own time."""

HOSTFILE_NOTICED = 2.1
"""Seconds within which a rewritten hostfile is read."""

UNSURE_SECONDS = 35.0
"""Seconds until a batch whose creation failed is surely not there."""


@invariant
def a_row_is_sent_once_at_a_time(history: History) -> Problems:
    """A request for a row follows the failure of the one before it, unless it is a hedge."""
    for start in history.starts:
        for row, requests in sent_by_row(history, start.number).items():
            for number, second in enumerate(requests):
                same = [first for first in requests[:number] if first.versions == second.versions]
                running = [first for first in same if _runs(first, second.at)]
                if running and not _is_hedge(history, running, second):
                    yield f"row {row} was sent at {running[0].at}, and at {second.at} once more"
                for first in same:
                    if is_answer(first) and first not in running:
                        yield f"row {row} was answered at {first.done}, sent again at {second.at}"


def _runs(sent: Sent, at: float) -> bool:
    """Return whether a request is under way at a time."""
    return sent.at <= at and (sent.over is None or at < sent.over)


def _is_hedge(history: History, running: Sequence[Sent], second: Sent) -> bool:
    """Return whether a request may be the copy of one that is late."""
    hedge = history.world.job.hedge
    if hedge == "off" or len(running) > 1:
        return False
    seconds = LEAST_HEDGE if hedge == "auto" else float(hedge)
    late = second.at >= running[0].at + seconds - 0.01
    return late and second.endpoint != running[0].endpoint


@invariant
def the_slower_copy_is_cancelled(history: History) -> Problems:
    """Once one of two copies of a row is answered, the other one ends."""
    if history.world.job.hedge == "off":
        return
    for start in history.starts:
        for row, requests in sent_by_row(history, start.number).items():
            for first in requests:
                if first.done is None or not is_answer(first):
                    continue
                for other in (sent for sent in requests if sent.versions == first.versions):
                    over = min(start.ended, start.ended if other.over is None else other.over)
                    if other is not first and _runs(other, first.done) and over > first.done + 0.1:
                        yield f"row {row} was answered at {first.done}, its copy ran until {over}"


@invariant
def a_late_row_is_copied(history: History) -> Problems:
    """With ``limits.hedge`` a row that takes longer, when all others have been sent, is sent once
    more to another server. One copy at a time has to be allowed."""
    world, hedge = history.world, history.world.job.hedge
    if hedge in ("off", "auto") or world.events or len(world.endpoints) < 2:
        return
    replies = {base_kind(reply) for row in world.rows for reply in row.replies}
    ill = any(endpoint.windows or endpoint.capacity for endpoint in world.endpoints)
    limited = (world.job.concurrency, world.job.per_endpoint) != ("auto", "auto")
    if ill or limited or replies - {"ok", "usage", "slow"}:
        return
    for start in history.starts:
        rows = sent_by_row(history, start.number)
        all_sent = max((requests[0].at for requests in rows.values()), default=0.0)
        for row, requests in rows.items():
            due = max(requests[0].at + float(hedge), all_sent)
            at = due + 1.0
            copies = [sent for others in rows.values() for sent in others[1:]]
            others = [sent for sent in copies if sent.at <= at and (sent.over or at) >= due]
            if _runs(requests[0], at) and not others:
                yield f"row {row} was sent at {requests[0].at} and had no copy at {at}"


@invariant_for("single", "schema")
def few_rows_are_copied(history: History) -> Problems:
    """A row is copied while fewer than one in ten of those in flight have a copy, or none has."""
    if history.world.job.hedge == "off":
        return
    for start in history.starts:
        requests = sent_in(history, start.number)
        for sent in requests:
            running = [other for other in requests if _runs(other, sent.at)]
            rows = Counter(row for other in running for row in other.rows)
            copies = sum(count > 1 for count in rows.values())
            is_copy = any(rows[row] > 1 for row in sent.rows)
            if is_copy and copies > max(1, rows.total() // 10):
                yield f"start {start.number}: {copies} of {len(rows)} rows are copied at {sent.at}"


@row_invariant
def each_request_is_in_the_attempts(history: History) -> Problems:
    """The table of attempts has each request that was answered, with its status. One whose answer
    did not end in time was given up by the client."""
    for start in history.starts:
        if start.code not in ORDERLY or start.killed_by_power or start.woken:
            continue
        previous = before(history, start)
        old = [] if previous is None else [attempt["sent"] for attempt in previous.attempts]
        attempts = [attempt for attempt in start.attempts if attempt["sent"] not in set(old)]
        answered = [
            (row, sent.status, sent.done, sent.gone is not None)
            for sent in sent_in(history, start.number)
            for row in sent.rows
            if sent.status is not None
        ]
        # Of two copies that are answered at once, one may be cut off before it is read.
        expected = Counter((row, status, gone) for row, status, _, gone in {*answered} if not gone)
        most = Counter((row, status, gone) for row, status, _, gone in answered)
        recorded = Counter(
            (unit_of(history, attempt), attempt["status_code"], is_cut_short(attempt))
            for attempt in attempts
            if attempt.get("status_code") is not None
        )
        if expected - recorded or recorded - most:
            yield (
                f"start {start.number}: not recorded {expected - recorded},"
                f" not sent {recorded - most}"
            )


@invariant
def retries_are_counted(history: History) -> Problems:
    """A row on healthy servers fails for a passing reason after 1 + ``limits.retries`` counted
    attempts: not earlier, and not later."""
    if not is_simple(history):
        return
    limit = history.world.job.retries + 1
    for start in history.starts:
        results = new_results(history, start)
        for row, requests in sent_by_row(history, start.number).items():
            kinds = [base_kind(sent.reply) for sent in requests]
            counted = sum(kind in COUNTED for kind in kinds)
            timed_out = sum(sent.gone is not None for sent in requests)
            maybe = kinds.count("reset") + kinds.count("cut") + timed_out
            failed = row in results and results[row]["error_kind"] in PASSING_KINDS
            spare = kinds.count("cut")
            spare += _is_suspected(sent_in(history, start.number), requests)
            if len(history.world.endpoints) > 1:
                # A server under suspicion fails rows for free, each time after a longer pause.
                seconds = (requests[-1].over or start.ended) - requests[0].at
                spare += max(limit + 2, len(history.world.endpoints) * ceil(log2(seconds + 2.0)))
            if counted - spare > limit or (failed and counted + maybe < limit):
                yield f"row {row}: {kinds} with {limit} attempts allowed, {results.get(row)}"


def _is_suspected(all_requests: Sequence[Sent], requests: Sequence[Sent]) -> bool:
    """Return whether a server answered badly twice, the last time to this row.

    Such a server is checked, and the row that waited for the check gets one more attempt.
    """
    endings = sorted((sent for sent in all_requests if sent.done), key=lambda sent: sent.done or 0)
    for first, second in pairwise(endings):
        bad = not is_answer(first) and not is_answer(second)
        if bad and any(second is sent for sent in requests):
            return True
    return False


@row_invariant
def no_row_fails_for_an_endpoint(history: History) -> Problems:
    """A row fails for a passing reason only if healthy servers failed it.

    It also fails where a server passes the check after its last attempt: it was well within a
    second. With one retry or none it may fail at a server that was silent for as long as a request
    may last: by then nobody knows whether the row or the server was at fault.
    """
    if history.world.job.row_seconds is not None:
        return  # its time may be over
    single = history.world.job.retries <= 1
    for start in history.starts:
        if start.woken:
            continue  # its first requests are of the start that was suspended
        requests = sent_by_row(history, start.number)
        for row, result in new_results(history, start).items():
            if result["status"] == "ok" or result["error_kind"] not in PASSING_KINDS | {"auth"}:
                continue
            own = sorted(requests.get(row, ()), key=lambda sent: sent.over or start.ended)
            replies = [sent.reply for sent in own]
            if single and result["error_kind"] == "timeout" and replies[-1:] == ["hang"]:
                continue
            if any(recovered_soon(history, sent) for sent in own[-1:]):
                continue
            if all(sent.by_endpoint for sent in own):
                yield (
                    f"start {start.number} row {row}: {result['error_kind']} {result['error']!r}"
                    f" after {replies}"
                )


@invariant
def retry_after_is_kept(history: History) -> Problems:
    """A row is not sent again before the time that the server named, at most 120 s."""
    for start in history.starts:
        for row, requests in sent_by_row(history, start.number).items():
            for first, second in pairwise(requests):
                if first.retry_after is None or first.done is None:
                    continue
                if first.endpoint != second.endpoint or first.turns != second.turns:
                    continue  # the next turn of an agent is another request
                due = first.done + min(first.retry_after, LONGEST_RETRY_AFTER)
                if second.at < due - 0.05:
                    yield f"row {row}: {first.reply} at {first.done}, sent again at {second.at}"


@invariant
def no_server_makes_a_run_wait_for_an_hour(history: History) -> Problems:
    """Of a Retry-After 120 s count: then the only server is asked again."""
    world = history.world
    if len(world.endpoints) > 1 or world.endpoints[0].windows:
        return
    for start in history.starts:
        requests = sent_in(history, start.number)
        for sent in requests:
            if sent.done is None or (sent.retry_after or 0.0) <= LONGEST_RETRY_AFTER:
                continue
            due = sent.done + 1.2 * LONGEST_RETRY_AFTER + 10.0
            if start.ended > due and not any(sent.done < again.at < due for again in requests):
                yield f"{sent.reply} at {sent.done}, and nothing sent until {due}"


@invariant
def a_429_pauses_its_account(history: History) -> Problems:
    """After a 429 with Retry-After nothing is sent to that server until it is over; also where an
    earlier one had asked for less. Once many are answered, some may be unrelated to the rate. All
    servers are one account where the job has a limit of requests or tokens."""
    shared = (history.world.job.rpm, history.world.job.tpm) != (None, None)
    for start in history.starts:
        requests = sent_in(history, start.number)
        answered = Counter[int]()
        events = [e for e in history.world.events if (e.start, e.kind) == (start.number, "hosts")]
        written = [start.began + event.at for event in events]
        for first in sorted(requests, key=lambda sent: sent.done or 0.0):
            account = 0 if shared else first.endpoint
            answered[account] += len(first.rows)
            if base_kind(first.reply) != "429" or not first.retry_after or not first.arrived:
                continue
            if first.done is None or answered[account] >= LATEST:
                continue
            due = first.done + min(first.retry_after, LONGEST_RETRY_AFTER) - 0.05
            for second in requests:
                if any(first.at - HOSTFILE_NOTICED < at < second.at for at in written):
                    continue  # a server that comes back has a new account
                same = shared or second.endpoint == first.endpoint
                if same and first.done + 0.01 < second.at < due:
                    yield f"{first.reply} at {first.done}, row {second.rows} sent at {second.at}"
                    break


@invariant
def a_retry_goes_elsewhere_first(history: History) -> Problems:
    """A row whose attempt failed on one server is tried on another, where one has room."""
    world = history.world
    if not is_simple(history) or len(world.endpoints) < 2 or world.job.per_endpoint != "auto":
        return
    replies = {base_kind(reply) for row in world.units for reply in row.replies}
    if replies & {"429", "503", "529", "reset", "cut"}:
        return  # the other server may have to rest
    for row, requests in sent_by_row(history, 0).items():
        for first, second in pairwise(requests):
            failed = base_kind(first.reply) in COUNTED - {"cut", "408"}
            if failed and first.endpoint == second.endpoint:
                yield f"row {row}: {first.reply} at {first.done}, same server at {second.at}"


@invariant
def waits_grow(history: History) -> Problems:
    """The wait before a retry is at least half a second, and about doubles up to 5 s.

    With several servers a retry may follow at once, on another one.
    """
    if not is_simple(history) or len(history.world.endpoints) > 1:
        return
    for start in history.starts:
        for row, requests in sent_by_row(history, start.number).items():
            least, counted = 0.5, 0
            for first, second in pairwise(requests):
                kind = base_kind(first.reply)
                counted += kind in COUNTED | {"reset"}
                if kind not in COUNTED - {"cut"} or first.done is None:
                    continue
                if counted > history.world.job.retries:
                    break  # what comes then waits for a check of the server
                if first.retry_after is None and second.at - first.done < least - 0.01:
                    yield f"row {row}: {first.reply} at {first.done}, sent again at {second.at}"
                least = min(5.0, 2 * least)


@invariant
def retries_do_not_wait_needlessly(history: History) -> Problems:
    """On healthy servers a retry comes within its backoff, or soon after its Retry-After, of which
    120 s count; a 429 makes all rows wait, and several slow them down."""
    if not is_simple(history) or history.world.job.budget is not None:
        return
    for start in history.starts:
        refusals = [s for s in sent_in(history, start.number) if base_kind(s.reply) == "429"]
        if len(refusals) > 1:
            continue
        pause = max(
            (min(sent.retry_after or 0.0, LONGEST_RETRY_AFTER) for sent in refusals), default=0.0
        )
        for row, requests in sent_by_row(history, start.number).items():
            for number, (first, second) in enumerate(pairwise(requests)):
                over = first.over
                if over is None:
                    continue
                longest = 3.0 * min(30.0, 0.5 * 2.0 ** (number + 1)) + 5.0
                if first.retry_after is not None:
                    longest += 1.2 * min(first.retry_after, LONGEST_RETRY_AFTER)
                longest += work_seconds(history) + 1.2 * pause
                if second.at - over > longest:
                    yield f"row {row}: {first.reply} at {over}, sent again at {second.at}"


@invariant
def slots_are_used(history: History) -> Problems:
    """Without a fault the rows take no longer than their slots need."""
    if not is_simple(history) or any(row.replies != ("ok",) for row in history.world.units):
        return
    world, start = history.world, history.starts[0]
    slots = 64 * len(world.endpoints)
    if world.job.per_endpoint != "auto":
        slots = int(world.job.per_endpoint) * len(world.endpoints)
    if world.job.concurrency != "auto":
        slots = min(slots, int(world.job.concurrency))
    if world.job.budget is not None:  # at the end so many requests fit
        remaining = world.job.budget - ANSWER_USD * len(world.units)
        slots = max(1, min(slots, int(remaining) // MAX_TOKENS))
    slowest = max(endpoint.speed for endpoint in world.endpoints)
    seconds = sum(row.seconds for row in world.units) * slowest / slots
    longest = max(row.seconds for row in world.units) * slowest
    if start.ended - start.began > 1.1 * seconds + longest + 2.0:
        yield f"{start.ended - start.began:.2f} s for {seconds:.2f} s of work"


@invariant
def a_start_goes_on_once_servers_are_well(history: History) -> Problems:
    """After the last fault of a server, a start needs no more than its work and a minute. The
    pauses of a provider's batches double, so one may last as long as all before it. A batch is
    polled at a twentieth of its age, and made anew half a minute after its creation failed."""
    world, start = history.world, history.starts[-1]
    if world.events or start.code not in (0, 1):
        return
    windows = [window.end for endpoint in world.endpoints for window in endpoint.windows]
    if not windows or any(endpoint.capacity for endpoint in world.endpoints):
        return
    well = max(*windows, start.began)
    if world.job.kind == "batches":
        well += well - start.began
    if any("+3600" in reply for row in world.rows for reply in row.replies):
        well += 1.2 * LONGEST_RETRY_AFTER
    well += sum(1.06 * float(c.partition(":")[2]) for c in world.batches if c.startswith("slow:"))
    well += sum(UNSURE_SECONDS for c in world.batches if c in ("429", "500", "503", "lost-reply"))
    if start.ended > well + 60.0 + 5.0 * work_seconds(history):
        yield f"servers were well at {well}, the start ended at {start.ended}"


@invariant
def a_server_is_asked_again(history: History) -> Problems:
    """A server that was ill is asked again within a minute of its recovery, while rows wait; not
    before the end of a Retry-After of its own. With fewer slots than servers some are always idle.
    """
    network, concurrency = history.network, history.world.job.concurrency
    if concurrency != "auto" and int(concurrency) < len(history.world.endpoints):
        return
    for start in history.starts:
        if start.suspended or start.woken:
            continue
        for index, endpoint in enumerate(history.world.endpoints):
            own = [s for s in sent_in(history, start.number) if s.endpoint == index]
            ends = [_end_of_pauses(own, window.end) for window in endpoint.windows]
            others = [s for s in sent_in(history, start.number) if s.endpoint != index]
            asked = [at for at, server in network.asked_at if server == index]
            for end in ends:
                due = end + LONGEST_SILENCE
                waiting = {row for s in others if end + 30.0 < s.at < due for row in s.rows}
                waiting -= {row for sent in own if not is_answer(sent) for row in sent.rows}
                waiting = {row for row in waiting if not is_too_long(history, row, index)}
                well = network.state_at(index, end, due) is None
                if len(waiting) < 3 or not well or not start.began < end < due < start.ended:
                    continue
                if any(event.hosts for event in history.world.events):
                    continue
                if not any(end <= at <= due for at in asked):
                    yield f"server {index} was well at {end}, and was not asked until {due}"


def _end_of_pauses(requests: Sequence[Sent], at: float) -> float:
    """Return when the pauses are over for which a server has asked before a time, or that time."""
    pauses = (
        sent.done + 1.1 * min(sent.retry_after, LONGEST_RETRY_AFTER)
        for sent in requests
        if sent.done is not None and sent.done < at and sent.retry_after is not None
    )
    return max((at, *pauses))


@invariant
def a_server_that_is_down_is_asked_again_soon(history: History) -> Problems:
    """A server that refuses connections is asked every 5 s: it may be started at any time. One that
    answered nothing well shortly before, or that of a provider, is asked as often as others that
    are ill."""
    for start in history.starts:
        if start.suspended or start.woken or events_of(history, start.number) & {"hosts"}:
            continue
        for index, endpoint in enumerate(history.world.endpoints):
            for window in endpoint.windows:
                if window.kind != "down":
                    continue
                ill = any(0 <= window.begin - w.end < LONGEST_INTERVAL for w in endpoint.windows)
                rare = ill or history.world.job.hosted or history.world.job.kind == "batches"
                longest = LONGEST_INTERVAL + 1.0 if rare else LONGEST_DOWN
                asked = [at for at, server in history.network.asked_at if server == index]
                asked = [at for at in asked if max(window.begin, start.began) <= at < start.ended]
                if start.code in (0, 1):  # one that stops early asks nobody while it drains
                    asked.append(start.ended)
                for first, second in pairwise(asked):
                    if first < window.end and second - first > longest:
                        yield f"server {index}, down, was asked at {first} and at {second}"


@invariant
def a_server_that_left_gets_nothing(history: History) -> Problems:
    """A server that is no longer in the hostfile is sent nothing after a moment, and one that was
    added while rows wait is asked something soon."""
    for start in history.starts:
        events = [e for e in history.world.events if e.start == start.number and e.kind == "hosts"]
        events.sort(key=lambda event: event.at)
        written = [event for event in events if event.hosts]
        requests = sent_in(history, start.number)
        for event, later in pairwise([*written, None]):
            begin = start.began + event.at + HOSTFILE_NOTICED
            end = start.ended if later is None else start.began + later.at
            if any(event.at < other.at < event.at + HOSTFILE_NOTICED for other in events):
                continue  # it may have been replaced before it was read, by an empty one as well
            for sent in requests:
                if sent.endpoint not in event.hosts and begin < sent.at < end:
                    yield f"server {sent.endpoint} left before {begin}, sent a row at {sent.at}"
            for index in event.hosts:
                due = begin + 20.0
                rows = {row for s in requests if begin + 10.0 < s.at < due for row in s.rows}
                ill = history.network.state_at(index, start.began, due) is not None
                asked = any(at > start.began and n == index for at, n in history.network.asked_at)
                if len(rows) > 3 and due < end and not ill and not asked:
                    yield f"server {index} was added before {begin}, and was not asked until {due}"


@invariant_for("single", "schema", "lists", "agents", "stages")
def limits_are_kept(history: History) -> Problems:
    """No more rows are in flight than ``limits.concurrency`` and ``limits.per_endpoint`` allow; a
    row that is sent to two servers counts at each, and as one of the run."""
    job = history.world.job
    for start in history.starts:
        steps: list[tuple[float, int, Sent]] = []
        for sent in sent_in(history, start.number):
            over = start.ended if sent.over is None else sent.over
            steps += [(sent.at, 1, sent), (over, -1, sent)]
        running: Counter[int] = Counter()
        copies: Counter[int] = Counter()
        for at, change, sent in sorted(steps, key=lambda step: step[:2]):
            endpoint = sent.endpoint
            called = sent.rows[: sent.calls or None]  # a request for vectors counts once
            running[endpoint] += change * len(called)
            copies.update(dict.fromkeys(called, change))
            rows = running.total() - sum(number - 1 for number in copies.values() if number > 1)
            if job.concurrency != "auto" and rows > int(job.concurrency):
                yield f"{rows} in flight at {at}"
                return
            most = _most_in_flight(history, endpoint)
            if most is not None and running[endpoint] > most:
                yield f"{running[endpoint]} in flight at endpoint {endpoint} at {at}"
                return


def _most_in_flight(history: History, endpoint: int) -> int | None:
    """Return how many rows one server may have in flight; None: as many as it takes."""
    job, tag = history.world.job, history.world.endpoints[endpoint].most
    limits = [] if job.per_endpoint == "auto" else [int(job.per_endpoint)]
    return min([*limits, *([] if tag is None else [tag])], default=None)


@invariant
def shares_are_fair(history: History) -> Problems:
    """Equal servers without a fault get about equal shares of many rows."""
    world = history.world
    if not is_simple(history) or len(world.units) < 20 * len(world.endpoints):
        return
    counts = Counter(sent.endpoint for sent in history.network.sent)
    fewest = min(counts[number] for number in range(len(world.endpoints)))
    if fewest < 0.5 * len(world.units) / len(world.endpoints):
        yield f"requests by endpoint {dict(counts)}"
