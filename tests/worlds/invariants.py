"""What has to be true of every world. Each function yields what is wrong, and is named after what
it promises; CONTRACT and guides are the source, not the code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from bagent.types import PASSING_KINDS
from worlds.clock import EPOCH
from worlds.network import COUNTED, KEY, LASTING, Sent, answer_text, base_kind
from worlds.play import History, Start
from worlds.spec import RowSpec

Problems = Iterator[str]
Invariant = Callable[[History], Problems]

INVARIANTS: list[Invariant] = []

DISK = frozenset({"full", "short", "sync-fails"})
ORDERLY = (0, 1, 75, 76)
"""Exit codes after which all is written."""


def invariant(check: Invariant) -> Invariant:
    """Check this of every world."""
    INVARIANTS.append(check)
    return check


def problems(history: History) -> list[tuple[str, str]]:
    """Return the broken invariants: name and details."""
    return [(check.__name__, details) for check in INVARIANTS for details in check(history)]


def first_problem(history: History) -> tuple[str, str] | None:
    """Return the first broken invariant."""
    for check in INVARIANTS:
        for details in check(history):
            return check.__name__, details
    return None


# --- what an invariant asks -----------------------------------------------------------------------


def terminal(row: RowSpec) -> tuple[int, str]:
    """Return how many replies of a row ask for another try, and the first that does not."""
    for number, reply in enumerate(row.replies):
        kind = base_kind(reply)
        if kind in ("ok", "slow", "usage", "unreadable", *LASTING):
            return number, kind
    return len(row.replies), ""


def events_of(history: History, start: int) -> set[str]:
    """Return the kinds of events of a start."""
    return {event.kind for event in history.world.events if event.start == start}


def sent_in(history: History, start: int) -> list[Sent]:
    """Return the requests of one start."""
    return [sent for sent in history.network.sent if sent.start == start]


def by_row(requests: Sequence[Sent]) -> dict[int, list[Sent]]:
    """Return requests by row."""
    grouped: dict[int, list[Sent]] = defaultdict(list)
    for sent in requests:
        for row in sent.rows:
            grouped[row].append(sent)
    return grouped


def results_of(start: Start) -> dict[int, dict[str, Any]]:
    """Return the results after a start by row."""
    return {result["row"]: result for result in start.results}


def before(history: History, start: Start) -> Start | None:
    """Return the start before this one."""
    return history.starts[start.number - 1] if start.number else None


def new_results(history: History, start: Start) -> dict[int, dict[str, Any]]:
    """Return the results that this start made."""
    return {
        row: result
        for row, result in results_of(start).items()
        if (result["finished_at"] or 0.0) >= EPOCH + start.began - 0.001
    }


def is_simple(history: History) -> bool:
    """Return whether servers and processes of a world have no fault of their own."""
    world = history.world
    return not world.events and not any(
        endpoint.windows or endpoint.capacity for endpoint in world.endpoints
    )


# --- no start waits for ever, and each leads on ---------------------------------------------------


@invariant
def no_start_waits_for_ever(history: History) -> Problems:
    """A start ends within virtual hours, and the event loop never spins."""
    for start in history.starts:
        if start.stuck:
            yield f"start {start.number}: {start.stuck}"


@invariant
def the_program_has_no_fault(history: History) -> Problems:
    """No exception of the program itself reaches a person or a row."""
    for start in history.starts:
        if start.traceback:
            yield f"start {start.number}: {start.traceback}"
        if start.ending is not None and "a fault in bagent" in start.ending.reason:
            yield f"start {start.number}: {start.ending.reason}"
        for error in start.loop_errors:
            yield f"start {start.number}: {error}"
        for row, result in results_of(start).items():
            if result["error_kind"] == "internal":
                yield f"start {start.number} row {row}: {result['error']}"


@invariant
def the_same_command_leads_to_an_end(history: History) -> Problems:
    """Once people, disks and servers let it, a run comes to 0 or 1."""
    codes = [start.code for start in history.starts]
    if not history.starts[-1].stuck and codes[-1] not in (0, 1):
        yield f"exit codes {codes}; {history.starts[-1].error}"


# --- rows and outcomes ----------------------------------------------------------------------------


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
        synced &= "sync-fails" not in events_of(history, earlier.number)
        for row, result in results_of(earlier).items():
            if result["status"] != "ok":
                continue
            lost_power = later.killed_by_power and (
                result["finished_at"] >= EPOCH + later.ended - 1.0 or not synced
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
        for row, requests in by_row(sent_in(history, start.number)).items():
            result = results.get(row)
            if result is None:
                continue
            passing = result["error_kind"] in PASSING_KINDS
            if result["status"] == "ok" or not (passing or result["error_kind"] in ("auth",)):
                yield (
                    f"row {row} was {result['status']} {result['error_kind']} and was sent again"
                    f" at {requests[0].at}"
                )


@invariant
def an_answer_that_arrived_is_finished(history: History) -> Problems:
    """A row whose answer came is on disk, from the moment after."""
    for start in history.starts:
        if events_of(history, start.number) & DISK or start.killed_by_power:
            continue
        results = results_of(start)
        for row, requests in by_row(sent_in(history, start.number)).items():
            for sent in requests:
                good = sent.reply in ("ok", "usage") or sent.reply.startswith("slow")
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
                if last not in ("ok", "slow", "usage") or result["text"] != answer_text(row):
                    yield f"{where}, text {result['text']!r}"
            elif last == "unreadable":
                if status != "bad_input":
                    yield where
            elif kind not in PASSING_KINDS and kind != LASTING.get(last):
                yield f"{where}, its replies end with {last!r}"


# --- attempts and retries -------------------------------------------------------------------------


@invariant
def a_row_is_sent_once_at_a_time(history: History) -> Problems:
    """A request for a row follows the failure of the one before it."""
    for start in history.starts:
        for row, requests in by_row(sent_in(history, start.number)).items():
            for first, second in pairwise(requests):
                over = first.done if first.done is not None else first.gone
                if over is None or second.at < over:
                    yield f"row {row} was sent at {first.at} and {second.at}, over at {over}"
                elif first.status == 200 and first.reply in ("ok", "usage"):
                    yield f"row {row} was answered at {first.done} and sent again at {second.at}"


@invariant
def each_request_is_in_the_attempts(history: History) -> Problems:
    """The table of attempts has each request that was answered, with its status."""
    counted = 0
    for start in history.starts:
        attempts = start.attempts[counted:]
        counted = len(start.attempts)
        if start.code not in ORDERLY or start.killed_by_power:
            continue
        expected = Counter(
            (row, sent.status)
            for sent in sent_in(history, start.number)
            for row in sent.rows
            if sent.status is not None and sent.gone is None
        )
        recorded = Counter(
            (attempt["row"], attempt["status_code"])
            for attempt in attempts
            if attempt.get("status_code") is not None
        )
        if expected != recorded:
            yield (
                f"start {start.number}: not recorded {expected - recorded},"
                f" not sent {recorded - expected}"
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
        for row, requests in by_row(sent_in(history, start.number)).items():
            kinds = [base_kind(sent.reply) for sent in requests]
            counted = sum(kind in COUNTED for kind in kinds)
            maybe = sum(kind in ("reset", "cut", "503", "529") for kind in kinds)
            failed = row in results and results[row]["error_kind"] in PASSING_KINDS
            if counted - kinds.count("cut") > limit or (failed and counted + maybe < limit):
                yield f"row {row}: {kinds} with {limit} attempts allowed, {results.get(row)}"


@invariant
def no_row_fails_for_an_endpoint(history: History) -> Problems:
    """A row fails for a passing reason only if healthy servers failed it."""
    for start in history.starts:
        requests = by_row(sent_in(history, start.number))
        for row, result in new_results(history, start).items():
            if result["status"] == "ok" or result["error_kind"] not in PASSING_KINDS | {"auth"}:
                continue
            if not any(not sent.by_endpoint for sent in requests.get(row, ())):
                yield (
                    f"start {start.number} row {row}: {result['error_kind']} {result['error']!r}"
                    f" after {[sent.reply for sent in requests.get(row, ())]}"
                )


@invariant
def retry_after_is_kept(history: History) -> Problems:
    """A row is not sent again before the time that the server named, at most 120 s."""
    for start in history.starts:
        for row, requests in by_row(sent_in(history, start.number)).items():
            for first, second in pairwise(requests):
                if first.retry_after is None or first.done is None:
                    continue
                if first.endpoint != second.endpoint:
                    continue
                due = first.done + min(first.retry_after, 120.0)
                if second.at < due - 0.05:
                    yield f"row {row}: {first.reply} at {first.done}, sent again at {second.at}"


@invariant
def retries_do_not_wait_needlessly(history: History) -> Problems:
    """On healthy servers a retry comes within its backoff, or soon after its Retry-After."""
    if not is_simple(history):
        return
    for start in history.starts:
        for row, requests in by_row(sent_in(history, start.number)).items():
            for number, (first, second) in enumerate(pairwise(requests)):
                over = first.done if first.done is not None else first.gone
                if over is None:
                    continue
                longest = 3.0 * min(30.0, 0.5 * 2.0 ** (number + 1)) + 5.0
                if first.retry_after is not None:
                    longest += 1.2 * first.retry_after
                longest += _work(history)
                if second.at - over > longest:
                    yield f"row {row}: {first.reply} at {over}, sent again at {second.at}"


def _work(history: History) -> float:
    """Return the seconds in which the rows of a world are done one after the other, in slots."""
    world = history.world
    slots = min(
        len(world.endpoints) * (8 if world.job.per_endpoint == "auto" else world.job.per_endpoint),
        8 if world.job.concurrency == "auto" else world.job.concurrency,
    )  # type: ignore[type-var, operator]
    seconds = sum(row.seconds * 2 * len(row.replies) + 4 for row in world.rows)
    return seconds / float(slots)


@invariant
def slots_are_used(history: History) -> Problems:
    """Without a fault the rows take no longer than their slots need."""
    if not is_simple(history) or any(row.replies != ("ok",) for row in history.world.rows):
        return
    world, start = history.world, history.starts[0]
    slots = 64 * len(world.endpoints)
    if world.job.per_endpoint != "auto":
        slots = int(world.job.per_endpoint) * len(world.endpoints)
    if world.job.concurrency != "auto":
        slots = min(slots, int(world.job.concurrency))
    slowest = max(endpoint.speed for endpoint in world.endpoints)
    seconds = sum(row.seconds for row in world.rows) * slowest / slots
    longest = max(row.seconds for row in world.rows) * slowest
    if start.ended - start.began > 1.1 * seconds + longest + 2.0:
        yield f"{start.ended - start.began:.2f} s for {seconds:.2f} s of work"


@invariant
def limits_are_kept(history: History) -> Problems:
    """No more rows are in flight than ``limits.concurrency`` and ``limits.per_endpoint`` allow."""
    job = history.world.job
    for start in history.starts:
        steps: list[tuple[float, int, int]] = []
        for sent in sent_in(history, start.number):
            over = sent.done if sent.done is not None else sent.gone
            steps.append((sent.at, 1, sent.endpoint))
            steps.append((start.ended if over is None else over, -1, sent.endpoint))
        running: Counter[int] = Counter()
        for at, change, endpoint in sorted(steps, key=lambda step: (step[0], step[1])):
            running[endpoint] += change
            if job.concurrency != "auto" and running.total() > int(job.concurrency):
                yield f"{running.total()} in flight at {at}"
                return
            if job.per_endpoint != "auto" and running[endpoint] > int(job.per_endpoint):
                yield f"{running[endpoint]} in flight at endpoint {endpoint} at {at}"
                return


@invariant
def shares_are_fair(history: History) -> Problems:
    """Equal servers without a fault get about equal shares of many rows."""
    world = history.world
    if not is_simple(history) or len(world.rows) < 20 * len(world.endpoints):
        return
    counts = Counter(sent.endpoint for sent in history.network.sent)
    fewest = min(counts[number] for number in range(len(world.endpoints)))
    if fewest < 0.5 * len(world.rows) / len(world.endpoints):
        yield f"requests by endpoint {dict(counts)}"


# --- ends and totals ------------------------------------------------------------------------------


@invariant
def the_exit_code_agrees(history: History) -> Problems:
    """0: every row ok; 1: rows failed; 74: the disk; 75 and 76: a reason; 2: nothing was sent."""
    for start in history.starts:
        kinds = events_of(history, start.number)
        failed = sum(result["status"] != "ok" for result in start.results)
        where = f"start {start.number}: {start.code} {start.error}"
        if start.ending is not None:
            where += f" {start.ending.reason}"
        if start.code == 0 and failed:
            yield f"{where}, {failed} rows failed"
        if start.code == 1 and not failed:
            yield f"{where}, no row failed"
        if start.code == 2 and sent_in(history, start.number):
            yield f"{where}, but requests were sent"
        if start.code == 2 and "rival" not in kinds and history.world.pause > 60:
            yield where
        if start.code == 74 and not kinds & DISK:
            yield where
        if start.code in (75, 76) and start.ending is not None and not start.ending.reason:
            yield f"{where}: no reason"
        well = not any(endpoint.windows for endpoint in history.world.endpoints)
        asked = kinds & {"term", "int", "stop-file", "rival", "hosts"}
        if start.code in (75, 76) and well and not asked and not kinds & DISK:
            alike = len(history.world.rows) >= 50
            busy = any(
                base_kind(r) in ("429", "503") for w in history.world.rows for r in w.replies
            )
            if not alike and not busy:
                yield f"{where}: servers are well, and nobody asked it to stop"


@invariant
def an_early_end_says_what_comes_next(history: History) -> Problems:
    """The summary of every orderly end has a next command."""
    for start in history.starts:
        if start.code not in ORDERLY or not start.lines:
            continue
        if not any(line.startswith("next") and "bagent" in line for line in start.lines):
            yield f"start {start.number}, {start.code}: {start.lines}"


@invariant
def totals_are_equal_everywhere(history: History) -> Problems:
    """Summary, journal and run.json agree on the rows by status, by kind, and on the exit code."""
    for start in history.starts:
        if start.code not in ORDERLY or start.ending is None:
            continue
        statuses = Counter(result["status"] for result in start.results)
        totals = start.ending.snapshot.totals
        if dict(statuses) != {k: v for k, v in totals.by_status.items() if v}:
            yield f"start {start.number}: results {dict(statuses)}, summary {totals.by_status}"
        kinds = Counter(
            result["error_kind"] or result["status"]
            for result in start.results
            if result["status"] != "ok"
        )
        if dict(kinds) != {k: v for k, v in totals.by_kind.items() if v}:
            yield f"start {start.number}: results {dict(kinds)}, summary {totals.by_kind}"
        recorded = start.info.get("starts", [{}])[-1].get("exit_code")
        if recorded != start.code and "rival" not in events_of(history, start.number):
            yield f"start {start.number} ended with {start.code}, run.json has {recorded}"


@invariant
def the_summary_counts_requests(history: History) -> Problems:
    """The summary's number of requests is what the servers saw, plus those without a connection."""
    for start in history.starts:
        if start.code not in (0, 1) or start.ending is None:
            continue
        seen, counted = len(sent_in(history, start.number)), start.ending.snapshot.requests
        dead = any(
            window.kind in ("down", "silent")
            for endpoint in history.world.endpoints
            for window in endpoint.windows
        )
        if counted < seen or (counted > seen and not dead):
            yield f"start {start.number}: {seen} requests seen, {counted} in the summary"


@invariant
def a_run_has_one_owner(history: History) -> Problems:
    """Two processes never work on one run."""
    for start in history.starts:
        if start.two_owners:
            yield f"start {start.number}"


# --- what is written ------------------------------------------------------------------------------


@invariant
def no_secret_is_written(history: History) -> Problems:
    """A key is in no file and no message."""
    for name, content in history.files.items():
        if KEY.encode() in content:
            yield name
    for start in history.starts:
        if any(KEY in line for line in start.lines) or KEY in start.error:
            yield f"start {start.number}: the summary"


@invariant
def files_are_whole(history: History) -> Problems:
    """Each line of the journal is UTF-8 and JSON, and readers have nothing to complain about."""
    for name, content in history.files.items():
        if name.startswith("journal/torn-") or not name.endswith((".jsonl", ".json")):
            continue
        lines = content.split(b"\n") if name.endswith(".jsonl") else [content]
        for line in lines:
            if not line:
                continue
            try:
                line.decode()
                msgspec.json.decode(line)
            except (UnicodeDecodeError, msgspec.DecodeError) as error:
                if history.starts[-1].code is not None:
                    yield f"{name}: {error}: {line[:80]!r}"
    if history.starts[-1].reports and history.starts[-1].code in (0, 1):
        yield f"{history.starts[-1].reports}"
