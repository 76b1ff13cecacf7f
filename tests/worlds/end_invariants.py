"""Invariants of ends, totals and files."""

from __future__ import annotations

from collections import Counter

import msgspec

from worlds.evidence import (
    DISK,
    ORDERLY,
    Problems,
    before,
    events_of,
    has_opened,
    invariant,
    invariant_for,
    is_failed,
    may_lose_requests,
    outcome_invariant,
    results_of,
    sent_by_row,
    sent_in,
    units_read,
    version_of,
    work_seconds,
)
from worlds.history import History
from worlds.network import KEY
from worlds.replies import COUNTED, base_kind

REPLACED, RENEWED = 60.0, 16.0
"""Seconds after its last sign of life when an owner is replaced, and between two signs at most."""


@invariant
def no_start_waits_for_ever(history: History) -> Problems:
    """A start ends within virtual hours, and the event loop never spins. Long prompts take as long
    as ``limits.tpm`` says."""
    job, rows = history.world.job, len(history.world.units)
    if job.tpm is not None and rows * (job.retries + 1) * job.system / 4 > 60 * job.tpm:
        return
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
        for result in start.results:
            if result["error_kind"] == "internal":
                yield f"start {start.number} row {result['row']}: {result['error']}"


@invariant
def the_same_command_leads_to_an_end(history: History) -> Problems:
    """Once people, disks and servers let it, a run comes to 0 or 1. With a deadline it may take
    more starts; and it does not where rows fail in each start that take more time than it has, once
    each row has its outcome."""
    deadline, rows = history.world.job.deadline, history.world.rows
    if deadline is not None and len(history.starts) > 2:
        before_last, last = (len(results_of(start)) for start in history.starts[-3::2])
        fails = any(base_kind(row.replies[-1]) in COUNTED for row in rows)
        is_complete = last == units_read(history, history.starts[-1])
        slow = fails and is_complete and work_seconds(history) > 0.75 * deadline
        if last > before_last or slow:
            return
    codes = [start.code for start in history.starts]
    if not history.starts[-1].stuck and codes[-1] not in (0, 1):
        yield f"exit codes {codes}; {history.starts[-1].error}"


@invariant_for("single", "schema", "lists", "agents", "batches", "stages", "copies")
def the_exit_code_agrees(history: History) -> Problems:
    """0: every row ok, or no more failed than allowed; 1: rows failed; 74: the disk; 75 and 76: a
    reason; 2: nothing was sent."""
    for start in history.starts:
        kinds = events_of(history, start.number)
        failed = sum(is_failed(history, result) for result in start.results)
        allowed = history.world.job.allow_failures
        where = f"start {start.number}: {start.code} {start.error}"
        if start.ending is not None:
            where += f" {start.ending.reason}"
        if start.code == 0 and failed > allowed and history.world.job.kind != "stages":
            yield f"{where}, {failed} rows failed"
        if start.code == 1 and failed <= allowed and history.world.job.kind != "stages":
            yield f"{where}, {failed} rows failed"
        if start.code == 2 and sent_in(history, start.number):
            yield f"{where}, but requests were sent"
        killed = start.number and history.starts[start.number - 1].code is None
        if start.code == 2 and "rival" not in kinds and not (killed and start.refused):
            yield where  # a start that was killed may leave an owner file without a name
        if start.code == 74 and not kinds & DISK:
            yield where
        if start.code in (75, 76) and start.ending is not None and not start.ending.reason:
            yield f"{where}: no reason"
        well = not any(map(history.network.windows, range(len(history.world.endpoints))))
        asked = kinds & {"term", "int", "stop-file", "rival", "hosts", "reader-gone"}
        job = history.world.job
        limited = (job.deadline, job.budget, job.stop_after) != (None, None, None)
        if (
            start.code in (75, 76)
            and well
            and not (asked or start.woken or limited or kinds & DISK)
        ):
            alike = len(history.world.units) >= history.world.job.alike
            busy = any(
                base_kind(r) in ("429", "503", "529")
                for w in history.world.units
                for r in w.replies
            )
            if not alike and not busy:
                yield f"{where}: servers are well, and nobody asked it to stop"


@invariant
def an_orderly_end_is_on_disk(history: History) -> Problems:
    """A loss of power after an orderly end loses nothing; where the disk refuses a sync, the start
    ends with 74."""
    for start in history.starts:
        if start.code in ORDERLY and start.unsynced and has_opened(history, start):
            yield f"start {start.number} ended with {start.code}, not on disk: {start.unsynced}"


@invariant
def an_early_end_says_what_comes_next(history: History) -> Problems:
    """The summary of every orderly end has a next command."""
    for start in history.starts:
        if start.code not in ORDERLY or not start.lines:
            continue
        if not any(line.startswith("next") and "bagent" in line for line in start.lines):
            yield f"start {start.number}, {start.code}: {start.lines}"


@outcome_invariant
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
            if is_failed(history, result)
        )
        if dict(kinds) != {k: v for k, v in totals.by_kind.items() if v}:
            yield f"start {start.number}: results {dict(kinds)}, summary {totals.by_kind}"
        recorded = start.info.get("starts", [{}])[-1].get("exit_code")
        other = start.lost or "rival" in events_of(history, start.number)
        if recorded != start.code and not other:
            yield f"start {start.number} ended with {start.code}, run.json has {recorded}"


@outcome_invariant
def status_counts_the_results(history: History) -> Problems:
    """After every start, even a killed one, ``bagent status`` counts the rows of the results; after
    an orderly one it also agrees on the code and on what remains."""
    for start in history.starts:
        if not start.status:
            continue
        where, status = f"start {start.number}", start.status
        statuses = Counter(result["status"] for result in start.results)
        if statuses != status["by_status"]:
            yield f"{where}: results {dict(statuses)}, status {status}"
        failed = sum(is_failed(history, result) for result in start.results)
        if (status["ok"], status["failed"]) != (statuses["ok"], failed):
            yield f"{where}: results {dict(statuses)}, status {status}"
        if start.code not in ORDERLY or events_of(history, start.number) & (DISK | {"rival"}):
            continue
        if start.lost:
            continue  # the process that took the run over says how it ended
        if status["exit_code"] != start.code:
            yield f"{where} ended with {start.code}, status says {status['exit_code']}"
        state = "ended" if start.code in (0, 1) else "stopped"
        if status["state"] != state:
            yield f"{where} ended with {start.code}, status says it is {status['state']}"
        rows = units_read(history, start)
        if status["total_is_exact"] and status["total"] != rows:
            yield f"{where}: {rows} rows, status says {status['total']}"
        remain = rows - statuses.total()
        edited = sum(
            version_of(history, row, result) != start.versions.get(row, 0)
            for row, result in start.result_of.items()
        )
        if status["remaining"] not in (None, remain, remain + edited):
            yield f"{where}: {remain} rows remain, {status['remaining']} in status"


@invariant_for("single", "schema", "lists", "agents", "stages", "copies")
def the_summary_counts_requests(history: History) -> Problems:
    """The summary's number of requests is what the servers saw, plus those without a connection."""
    for start in history.starts:
        if start.code not in (0, 1) or start.ending is None or start.woken:
            continue
        snapshot = start.ending.snapshot
        seen, counted = len(sent_in(history, start.number)), snapshot.requests
        dead = may_lose_requests(history)
        if counted < seen or (counted > seen and not dead):
            yield f"start {start.number}: {seen} requests seen, {counted} in the summary"
        tries = sum(sent.calls or len(sent.rows) for sent in sent_in(history, start.number))
        if not dead and tries != snapshot.tries:
            yield f"start {start.number}: {tries} rows in requests, {snapshot.tries} tries"
        rows = sent_by_row(history, start.number)
        again = sum(len(requests) - 1 for requests in rows.values())
        once = history.world.job.kind in ("single", "lists") and history.world.job.grow is None
        if not dead and once and snapshot.retries != again:
            yield f"start {start.number}: {again} retries seen, {snapshot.retries} in the summary"


@invariant
def a_process_that_lost_its_run_stops(history: History) -> Problems:
    """A process that was suspended, and whose run another one took over, sends nothing more once
    it has seen that, and what the other one left stays."""
    for start in history.starts:
        if not start.lost or start.code is None:
            continue
        other = before(history, start)
        ended = other is not None and start.code == other.code and start.code in (0, 1)
        if start.code != 75 and not ended:  # a run that is over ends in the same way for both
            yield f"start {start.number} lost its run and ended with {start.code}"
        for sent in sent_in(history, start.number):
            if sent.at > start.began + 1.0:
                yield f"start {start.number} woke up at {start.began}, sent a row at {sent.at}"
        recorded = [entry.get("at") for entry in start.info.get("starts", [])]
        others = [entry.get("at") for entry in history.starts[start.number - 1].info["starts"]]
        if recorded != others:
            yield f"start {start.number}: run.json has starts {recorded}, before {others}"


@invariant
def a_run_has_one_owner(history: History) -> Problems:
    """Two processes never work on one run; a suspended one is replaced after a minute."""
    for start in history.starts:
        if start.two_owners:
            yield f"start {start.number}"
        previous = before(history, start)
        if previous is None or not previous.suspended or start.woken:
            continue
        silent = start.began - previous.ended
        if has_opened(history, start) and silent < REPLACED - RENEWED:
            yield f"start {start.number} replaced an owner that was silent for {silent} s"
        if start.refused and silent >= REPLACED:
            yield f"start {start.number} was refused by an owner that was silent for {silent} s"


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
