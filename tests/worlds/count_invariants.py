"""Invariants of counts, tokens and costs, recomputed from servers, results and attempts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

from worlds.clock import EPOCH
from worlds.evidence import (
    DISK,
    ORDERLY,
    Problems,
    attempts_of,
    events_of,
    invariant,
    invariant_for,
    is_cut_short,
    is_failed,
    is_too_long,
    made_results,
    new_results,
    outcome_invariant,
    sent_by_row,
    sent_in,
    unit_of,
    units_read,
)
from worlds.history import History, Start
from worlds.network import Sent
from worlds.replies import ANSWER_TOKENS, ANSWER_USD, PROMPT_TOKENS, USED, base_kind
from worlds.stages import TOPOLOGIES

Result = dict[str, Any]


@invariant_for("single", "schema", "agents")
def tokens_are_those_of_the_servers(history: History) -> Problems:
    """A row's tokens and cost are those of all its answers in the start that ended it, also of
    answers that could not be used; an answer whose counts make no sense has none. Of two copies
    that are answered at once, one counts."""
    for start in history.starts:
        if start.woken or (start.number and history.world.job.kind == "agents"):
            continue  # turns of earlier starts count too
        for row, result in new_results(history, start).items():
            requests = sent_by_row(history, start.number).get(row, [])
            used = [sent for sent in requests if _has_usage(sent)]
            unclear = "usage" in history.world.units[row].replies
            if unclear or any(_is_unclear(sent) for sent in requests):
                continue
            count = len({sent.done for sent in used})
            prompt, answer = (n * count or None for n in (PROMPT_TOKENS, ANSWER_TOKENS))
            counts = result["prompt_tokens"], result["completion_tokens"]
            replies = [sent.reply for sent in requests]
            if counts != (prompt, answer):
                yield f"start {start.number} row {row}: tokens {counts}, answered {replies}"
            cost = ANSWER_USD * count if history.priced and count else None
            if history.priced and result["cost_usd"] != cost:
                yield f"start {start.number} row {row}: ${result['cost_usd']}, answered {replies}"


def _has_usage(sent: Sent) -> bool:
    """Return whether a server told the tokens of a request."""
    return sent.arrived and sent.status == 200 and base_kind(sent.reply) in USED


def _is_unclear(sent: Sent) -> bool:
    """Return whether nobody knows whether a request was answered."""
    return sent.over is None or sent.gone is not None


@invariant
def the_summary_adds_up(history: History) -> Problems:
    """Tokens, cost and counts of the summary are those of the results that the start made."""
    kind = history.world.job.kind
    for start in history.starts:
        if start.code not in (0, 1) or start.ending is None or start.woken:
            continue
        if kind in ("shards", "stages") and start.number:
            continue  # other shards, and edited stages, made some of the results
        fleet, results = start.ending.snapshot.fleet, made_results(history, start)
        if (fleet.in_flight, fleet.ready, fleet.retrying) != (0, 0, 0):
            yield f"start {start.number}: at the end {fleet}"
        yield from _sums(history, start, results)
        if kind != "stages":
            yield from _counts(history, start, results)


def _counts(history: History, start: Start, results: list[Result]) -> Problems:
    """Compare the counts of the summary with the results."""
    assert start.ending is not None
    snapshot, where = start.ending.snapshot, f"start {start.number}"
    own = snapshot.this_start
    failed = [result for result in results if is_failed(history, result)]
    expected = (
        len(results),
        sum(result["status"] == "ok" for result in results),
        len(failed),
        sum(result["copied_from"] is not None for result in results),
    )
    if (own.done, own.ok, own.failed, own.copied) != expected:
        yield f"{where}: {own}, results {expected}"
    sent = sum(bool(result["attempts"]) and _is_own(result) for result in results)
    if own.sent != sent:
        yield f"{where}: {own.sent} were sent, {sent} of its results have attempts"
    if own.by_status != Counter(result["status"] for result in results):
        yield f"{where}: {own.by_status}, results {[r['status'] for r in results]}"
    grouped = Counter[str]()
    for group in snapshot.errors:
        grouped[group.kind] += group.count
    kinds = Counter(result["error_kind"] or result["status"] for result in failed)
    if grouped.total() + snapshot.errors_other != len(failed) or grouped - kinds:
        yield f"{where}: errors {grouped} and {snapshot.errors_other}, results {kinds}"


def _is_own(result: Result) -> bool:
    return result["copied_from"] is None


def _sums(history: History, start: Start, results: list[Result]) -> Problems:
    """Compare the sums of the summary with those of the results."""
    assert start.ending is not None
    tokens, where = start.ending.snapshot.tokens, f"start {start.number}"
    results = [result for result in results if _is_own(result)]
    if history.world.job.kind == "agents" and start.number:
        return  # an earlier start counted some turns
    for name, total in (("prompt_tokens", tokens.prompt), ("completion_tokens", tokens.completion)):
        counts = [result[name] for result in results if result[name] is not None]
        if (total.total or 0) != sum(counts):
            yield f"{where}: {name} {total}, results {counts}"
    costs = [result["cost_usd"] for result in results if result["cost_usd"] is not None]
    spent = start.ending.snapshot.cost_usd
    if history.priced and abs((spent or 0.0) - sum(costs)) > 1e-6:
        yield f"{where}: ${spent}, results {costs}"


@invariant
def status_adds_up(history: History) -> Problems:
    """After every start, even a killed one, the tokens and costs of ``bagent status`` are those of
    all lines, also of failures that were sent again, and what is ok, failed and remaining is the
    total."""
    for start in history.starts:
        status, where = start.status, f"start {start.number}"
        if not status:
            continue
        for name in ("prompt_tokens", "completion_tokens", "cost_usd"):
            lines = (line for line in start.row_records if line.get("copied_from") is None)
            counts = [line[name] for line in lines if line.get(name) is not None]
            if abs((status[name] or 0) - sum(counts)) > 1e-6:
                yield f"{where}: {name} {status[name]}, all lines {counts}"
        ended = status["ok"] + status["accepted"] + status["failed"]
        if status["remaining"] is not None and status["total"] != ended + status["remaining"]:
            yield f"{where}: {status}"
        if ended != sum(status["by_status"].values()):
            yield f"{where}: {status}"
        if status["failed"] != sum(status["by_kind"].values()):
            yield f"{where}: {status}"


@invariant_for("single", "schema", "lists", "agents", "stages", "copies")
def tries_are_the_attempts(history: History) -> Problems:
    """The summary counts the attempts of the start, and those that failed by their kind."""
    for start in history.starts:
        if start.code not in ORDERLY or start.ending is None or start.woken:
            continue
        attempts, snapshot = attempts_of(history, start), start.ending.snapshot
        if snapshot.tries != len(attempts):
            yield f"start {start.number}: {snapshot.tries} tries, {len(attempts)} attempts"
        kinds = Counter(a["error_kind"] for a in attempts if a.get("error_kind") is not None)
        if kinds != snapshot.failed_tries:
            yield f"start {start.number}: {snapshot.failed_tries}, attempts {dict(kinds)}"
        again = sum(attempt["try"] > 1 for attempt in attempts)
        if again != snapshot.retries:
            yield f"start {start.number}: {snapshot.retries} retries, attempts {again}"
        refused = sum(sent.status == 429 for sent in sent_in(history, start.number))
        if snapshot.throttled < refused:
            yield f"start {start.number}: {snapshot.throttled} throttled, servers refused {refused}"


@invariant_for("single", "schema", "lists", "agents")
def attempts_are_numbered(history: History) -> Problems:
    """The attempts of a turn of a row have the numbers 1, 2, 3 ..., and the server and the time of
    their request."""
    for start in history.starts:
        if start.code not in ORDERLY or start.killed_by_power or start.woken:
            continue
        numbers = defaultdict[tuple[Any, ...], list[int]](list)
        answered = defaultdict[int, list[tuple[float, str]]](list)
        for attempt in attempts_of(history, start):
            unit = unit_of(history, attempt)
            numbers[unit, attempt["turn"]].append(attempt["try"])
            if attempt.get("status_code") is not None and not is_cut_short(attempt):
                answered[unit].append((attempt["done"] - EPOCH, attempt["endpoint"]))
        for (row, turn), tries in numbers.items():
            if sorted(tries) != list(range(1, len(tries) + 1)):
                yield f"start {start.number} row {row} turn {turn}: tries {tries}"
        if history.world.job.hedge != "off":
            continue
        for row, requests in sent_by_row(history, start.number).items():
            seen = sorted(
                (sent.done, f"server{sent.endpoint}:8000")
                for sent in requests
                if sent.status is not None and sent.gone is None and sent.done is not None
            )
            recorded = sorted(answered[row])
            same = len(seen) == len(recorded) and all(
                abs(first[0] - second[0]) < 0.01 and first[1] == second[1]
                for first, second in zip(seen, recorded, strict=True)
            )
            if not same:
                yield f"start {start.number} row {row}: {recorded}, servers saw {seen}"


@invariant_for("single", "schema", "lists")
def an_outcome_is_written_at_once(history: History) -> Problems:
    """A row ends in the moment in which its good answer comes, and names its line of the input. One
    that failed ends with its last attempt: a process that woke up may have made it before."""
    for start in history.starts:
        began = min(s.began for s in history.starts if s is start or (start.woken and s.suspended))
        disk = events_of(history, start.number) & DISK
        for row, result in new_results(history, start).items():
            line = row // history.world.job.answers + 1
            if (result["line"], result["source"]) != (line, "rows.jsonl"):
                yield f"row {row}: line {result['line']} of {result['source']}"
            if not began - 0.01 <= result["finished_at"] - EPOCH <= start.ended + 0.01:
                yield f"row {row} ended at {result['finished_at'] - EPOCH}, not in its start"
            requests = sent_by_row(history, start.number).get(row, ())
            done = [sent.done for sent in requests if sent.done is not None and sent.status == 200]
            late = result["finished_at"] - EPOCH - max(done, default=0.0)
            if result["status"] == "ok" and done and late > 0.1 and not disk:
                yield f"row {row} was answered at {max(done)}, and ended {late:.2f} s later"


@invariant_for("single", "schema", "lists", "agents", "batches", "copies")
def skipped_rows_were_finished(history: History) -> Problems:
    """What a start skips and what it does are all rows."""
    for start in history.starts:
        if start.code not in (0, 1) or start.ending is None or start.woken:
            continue
        if history.world.job.answers > 1:
            continue  # what is skipped counts rows
        snapshot, rows = start.ending.snapshot, units_read(history, start)
        done = snapshot.this_start.done
        if snapshot.skipped + done != rows:
            yield f"start {start.number}: {snapshot.skipped} skipped and {done} done of {rows}"
        if snapshot.remaining not in (0, None) or snapshot.to_do not in (0, None):
            yield f"start {start.number}: {snapshot.remaining} remaining, {snapshot.to_do} to do"


@invariant_for("stages")
def each_stage_is_counted(history: History) -> Problems:
    """The first start's summary counts the results of each stage."""
    start = history.starts[0]
    if start.code not in (0, 1) or start.ending is None:
        return
    good, failed = Counter[str](), Counter[str]()
    for result in start.results:
        (failed if is_failed(history, result) else good)[result["stage"]] += 1
    for stage, count in start.ending.snapshot.by_stage.items():
        if stage not in TOPOLOGIES[history.world.job.topology]:
            continue  # it sends nothing
        if (count.ok, count.failed) != (good[stage], failed[stage]):
            yield f"{stage}: {count}, results {good[stage]} good, {failed[stage]} failed"


@invariant_for("single", "schema", "lists")
def a_failure_is_that_of_its_last_attempt(history: History) -> Problems:
    """A row that failed on servers has the kind of failure of its last attempt. One whose prompt
    was too long for a server waits for those that are ill: their context may be longer. Once that
    is known it may be too long for all."""
    if history.world.job.hedge != "off" or history.world.job.row_seconds is not None:
        return
    endpoints = range(len(history.world.endpoints))
    for start in history.starts:
        if start.code not in ORDERLY or start.killed_by_power or start.woken:
            continue
        last: dict[int, dict[str, Any]] = {}
        for attempt in attempts_of(history, start):
            last[unit_of(history, attempt)] = attempt
        for row, result in new_results(history, start).items():
            kind = result["error_kind"]
            if row not in last or kind in (None, "schema", "truncated", "refused"):
                continue
            too_long = [is_too_long(history, row, number) for number in endpoints]
            if kind == "context_overflow" and all(too_long):
                continue
            overflowed = last[row].get("error_kind") == "context_overflow" or any(too_long)
            if overflowed and kind == "connect" and _is_one_ill(history, last[row]["done"], result):
                continue
            if last[row].get("error_kind") != kind:
                yield f"start {start.number} row {row}: {kind}, last attempt {last[row]}"


def _is_one_ill(history: History, since: float, result: Result) -> bool:
    """Return whether a server was not well between a time and the end of a row."""
    begin, end = since - EPOCH, result["finished_at"] - EPOCH
    endpoints = range(len(history.world.endpoints))
    return any(history.network.state_at(number, begin, end) for number in endpoints)


@invariant
def tools_are_counted(history: History) -> Problems:
    """``bagent status`` counts the calls of each tool, and those that failed. The last line of a
    start that was killed may have no end yet: it counts once the next one has ended it."""
    for start in history.starts:
        status = (start.status or {}).get("tools", {})
        shown = {name: (count["calls"], count["failed"]) for name, count in status.items()}
        expected = [_count_tools(start.tool_records)]
        if start.code is None:
            expected.append(_count_tools(start.tool_records[:-1]))
        if start.status and shown not in expected:
            yield f"start {start.number}: {shown}, records {expected}"


def _count_tools(records: list[Result]) -> dict[str, tuple[int, int]]:
    """Return how often each tool was called, and how often that failed."""
    calls = Counter(record["name"] for record in records)
    failed = Counter(record["name"] for record in records if record.get("error") is not None)
    return {name: (count, failed[name]) for name, count in calls.items()}


@outcome_invariant
def the_summary_tells_the_rows(history: History) -> Problems:
    """The first line of a summary says how many rows are ok and failed."""
    for start in history.starts:
        if start.code not in ORDERLY or not start.lines or start.woken or start.lost:
            continue
        good = sum(result["status"] == "ok" for result in start.results)
        failed = sum(is_failed(history, result) for result in start.results)
        numbers = {name: int(n) for n, name in re.findall(r"(\d+) (ok|failed)\b", start.lines[0])}
        if numbers and numbers != {"ok": good, "failed": failed}:
            yield f"start {start.number}: {start.lines[0]}, {good} ok and {failed} failed"


@invariant
def the_journal_only_grows(history: History) -> Problems:
    """A later start never takes attempts from the tables, unless power was lost."""
    for first, second in pairwise(history.starts):
        if len(second.attempts) < len(first.attempts) and not second.killed_by_power:
            yield f"{len(first.attempts)} attempts after start {first.number}, then fewer"
