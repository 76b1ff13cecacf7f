"""``bagent run --workers N``: processes of one host that share a run's rows, with one display.

Each does one part of the rows (``--shard``) and writes journal files of its own in the same run
directory; tables and the closing words come from the first process, which sends nothing itself.
Equal requests are known to be equal within one part only.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USAGE,
    BagentError,
    NeedsPerson,
    StoppedEarly,
    UsageError,
    WriteError,
)
from bagent.job.spec.limits import LimitsSpec
from bagent.observe import Progress, Snapshot
from bagent.rows import RowReader, open_rows
from bagent.runs.context import STAGE, RunContext, RunOptions, open_input, prepare, read_shard
from bagent.runs.execute import (
    MAKE_AGAIN,
    WORKER,
    display_path,
    make_display,
    make_tables,
    print_summary,
    rows_exit_code,
)
from bagent.runs.parallel.progress_merge import merge_snapshots
from bagent.runs.parallel.worker import encode_options
from bagent.runs.resume import last_stage
from bagent.runs.run_store import open_run_dir
from bagent.runs.shutdown import STOP_SIGNALS, raise_on_signal
from bagent.runs.tables_process import TablesChild
from bagent.store.journal.done_index import open_indexes
from bagent.store.journal.edited_rows import replaced_lines
from bagent.store.journal.journal import Journal
from bagent.store.journal.segments import Report
from bagent.store.lock import RunLock
from bagent.store.run_dir import RunDir
from bagent.store.stats import ToolCount, count_tools
from bagent.store.totals import Totals, run_codes, stage_causes

FEWEST = 3
"""Parts from which it pays: two read both halves for what the one reading here costs."""


@contextmanager
def share_input_index(prepared: RunContext, parts: int) -> Iterator[str | None]:
    """Note the input beside the block; gives the file for :attr:`RunOptions.notes`, None if there
    is nothing to note or nowhere to.

    Args:
        prepared: the job; its run directory exists.
        parts: how many processes share its rows.

    Raises:
        InputError: as :func:`bagent.rows.open_rows`.
    """
    if parts < FEWEST:
        yield None
        return
    rows = open_rows(replace(prepared.rows_config, shard=None))
    path = prepared.run_dir / "journal" / f"input-{prepared.part}-shared.pieces"
    rows.remember(path, lambda _: True)
    if not rows.notable:
        rows.close()
        yield None
        return
    thread = threading.Thread(target=_note, args=(rows,), name="input", daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        rows.close()
        thread.join()


def _note(rows: RowReader) -> None:
    # Who reads the rows to send them tells what is wrong with the input.
    with contextlib.suppress(BagentError, OSError):
        rows.note_all()


STARTS = 3
"""How often one worker is started: a process that the kernel killed is started again."""

TICK_SECONDS = 0.25
_LONGEST_LINE = 16 * 1024 * 1024
_WORST_FIRST = (EXIT_INTERRUPTED, EXIT_CANNOT_WRITE, EXIT_NEEDS_PERSON, EXIT_USAGE, EXIT_STOPPED)
_ERRORS: Mapping[int, type[BagentError]] = {
    EXIT_CANNOT_WRITE: WriteError,
    EXIT_STOPPED: StoppedEarly,
    EXIT_NEEDS_PERSON: NeedsPerson,
}
_SHARED = ("concurrency", "per_endpoint", "rpm", "tpm")


@dataclass(slots=True)
class Worker:
    """One process: its options, what it last told, how it ended."""

    options: RunOptions
    state: Snapshot | None = None
    code: int | None = None
    reason: str = ""
    action: str = ""
    process: asyncio.subprocess.Process | None = None
    notes: list[str] = field(default_factory=list)


def run_workers(options: RunOptions, count: int) -> int:
    """Run a job in ``count`` processes; returns the exit code of the whole.

    Raises:
        UsageError: something the user wrote is wrong, or cannot be shared; nothing was sent.
    """
    prepared = prepare(options)
    refuse_unshared(prepared)
    with raise_on_signal():
        open_input(prepared).close()
        notes: list[str] = []
        open_run_dir(prepared, prepared.job.fingerprint_parts(), notes)
        before = count_earlier_codes(prepared)
        parts = part_options(prepared, count)
        progress = make_display(options)
        for text in (*prepared.warnings, *notes):
            progress.note(text)
        run = display_path(prepared.run_dir, options.cwd)
        progress.start(f"{prepared.job.name}: {len(parts)} processes, results in {run}")
        try:
            with share_input_index(prepared, len(parts)) as notes_path:
                workers = [Worker(replace(own, notes=notes_path)) for own in parts]
                asyncio.run(WorkerPool(workers, progress, before).run())
            state = final_state(prepared, workers, progress, before)
        finally:
            progress.stop()
        return finish(prepared, workers, progress, state)


def max_concurrent_parts(limits: LimitsSpec, count: int) -> int:
    """How many of ``count`` processes may share these limits: each gets one of each at least."""
    return min([count, *_shares(limits).values()])


def _shares(limits: LimitsSpec) -> dict[str, int]:
    """The limits that processes share, by job key."""
    found = {f"limits.{key}": getattr(limits, key) for key in _SHARED}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def part_options(prepared: RunContext, count: int, at_once: int | None = None) -> list[RunOptions]:
    """The options of each part: which rows, and its share of what is limited.

    Args:
        prepared: the job.
        count: how many parts; a limit of less than one for each makes fewer.
        at_once: how many of them run at the same time; None: all.
    """
    options, limits = prepared.options, prepared.job.limits
    shares = _shares(limits)
    together = at_once is None
    if at_once is None:
        count = at_once = max_concurrent_parts(limits, count)
    budget = limits.budget_usd
    money = {} if budget is None else {"limits.budget_usd": budget / count}
    part, parts = read_shard(options.shard, options.env) or (1, 1)
    same = replace(
        options,
        progress=WORKER,
        tables=False,
        metrics_port=None,
        fresh=False,
        on_change="refuse" if options.on_change == "fresh" else options.on_change,
    )
    return [
        replace(
            same,
            # Part i of n is, among n times as many, every n-th from i on.
            shard=f"{part + number * parts}/{parts * count}",
            overrides={
                **options.overrides,
                **money,
                # What is over goes to the first ones, where they all run together.
                **{
                    key: n // at_once + (together and number < n % at_once)
                    for key, n in shares.items()
                },
            },
        )
        for number in range(count)
    ]


def refuse_unshared(prepared: RunContext, option: str = "--workers") -> None:
    """Refuse what several processes cannot share; ``option`` is what the user typed for them.

    Raises:
        UsageError: rows from stdin, rows to stdout, or the model of this one process.
    """
    backend = prepared.job.backend
    if prepared.piped:
        words, hint = "rows from stdin cannot be shared", "write them to a file first"
    elif prepared.options.output == "-":
        words, hint = "-o - prints one stream", "print them afterwards: bagent results"
    elif backend is not None and backend.kind == "local":
        words, hint = "the local model is one process already", f"leave {option} out"
    else:
        return
    raise UsageError(f"{option}: {words}", hint=hint)


class WorkerPool:
    """Starts the workers, shows their states as one, passes signals on; use it once.

    Args:
        workers: what to start.
        progress: where the states are shown.
        before: the outcomes of earlier starts, by code.
    """

    def __init__(
        self, workers: Sequence[Worker], progress: Progress, before: Mapping[int, int]
    ) -> None:
        self._workers = workers
        self._before = before
        self._progress = progress
        self._stopping = False

    async def run(self) -> None:
        """Until all workers have ended."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._pass_on, number)
        ticker = asyncio.create_task(self._show_forever())
        try:
            await asyncio.gather(*map(self._keep, self._workers))
        finally:
            ticker.cancel()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def _keep(self, worker: Worker) -> None:
        for _ in range(STARTS):
            await self._run_once(worker)
            if worker.code is None or worker.code >= 0 or self._stopping:
                break
            self._progress.note(f"a worker was killed by signal {-worker.code}")
        if worker.code in (EXIT_CANNOT_WRITE, EXIT_NEEDS_PERSON, EXIT_USAGE):
            self._stop_others()  # what one of them cannot go on from, none can
        if worker.code is not None and worker.code < 0:
            worker.reason = worker.reason or f"a worker was killed by signal {-worker.code}"
            worker.code = EXIT_STOPPED

    async def _run_once(self, worker: Worker) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bagent.runs.parallel.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
            limit=_LONGEST_LINE,
        )
        worker.process = process
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(OSError):
            process.stdin.write(encode_options(worker.options))
            await process.stdin.drain()
        async for line in process.stderr:
            handle_worker_line(worker, line, self._progress.note)
        worker.code = await process.wait()
        process.stdin.close()

    def _pass_on(self, number: int) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(number)

    def _stop_others(self) -> None:
        if not self._stopping:
            self._pass_on(STOP_SIGNALS[0])

    async def _show_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            state = merged_state(self._workers, self._before)
            if state is not None:
                self._progress.update(state)


def handle_worker_line(worker: Worker, line: bytes, note: Callable[[str], None]) -> None:
    """Take in a line that a worker wrote on stderr; ``note`` is given words for people."""
    try:
        event: dict[str, Any] = msgspec.json.decode(line)
        kind = event["event"]
    except (msgspec.DecodeError, TypeError, KeyError):
        note(line.decode("utf-8", "replace").rstrip().removeprefix("bagent: "))
        return
    if kind == "state":
        worker.state = msgspec.convert(event["state"], Snapshot, str_keys=True)
    elif kind == "note":
        note(event["text"])
    elif kind == "error":
        worker.reason = event["text"]
    elif kind == "summary":
        worker.reason, worker.action = event["reason"], event["action"]


def count_earlier_codes(prepared: RunContext) -> Counter[int]:
    """Count the outcomes that earlier starts left, by code; none for a job of several stages,
    whose workers count them as they meet them."""
    if prepared.stages:
        return Counter()
    return run_codes(prepared.run_dir, None, None, accept=_accepts(prepared))


def _accepts(prepared: RunContext) -> bool:
    return prepared.job.output.truncated == "accept"


def merged_state(workers: Sequence[Worker], before: Mapping[int, int]) -> Snapshot | None:
    """Return the states that were reported so far as one; None before the first.

    Args:
        workers: the processes.
        before: the outcomes of earlier starts, by code.
    """
    states = [worker.state for worker in workers if worker.state is not None]
    return merge_snapshots(states, before) if states else None


def worst_worker(workers: Sequence[Worker]) -> Worker | None:
    """The worker whose end stands for the run's; None where all came to their ends."""
    for code in _WORST_FIRST:
        for worker in workers:
            if worker.code == code:
                return worker
    return None


def final_state(
    prepared: RunContext, workers: Sequence[Worker], progress: Progress, before: Mapping[int, int]
) -> Snapshot | None:
    """Show and return the last state, with totals counted from the journal; None: there is none.

    Args:
        prepared: the job.
        workers: its processes, which have ended.
        progress: shows the state.
        before: the outcomes of earlier starts, by code.
    """
    state = merged_state(workers, before)
    if state is None:
        return None
    if worst_worker(workers) is None:
        _take_back_replaced(prepared, workers, state, progress)
        state = msgspec.structs.replace(state, remaining=0, total_is_exact=True)
    last = last_stage(prepared.stages)
    codes = run_codes(prepared.run_dir, None, last, accept=_accepts(prepared))
    state = state.with_totals(Totals.of(codes))
    if prepared.stages:
        causes = stage_causes(prepared.run_dir, None)
        state = msgspec.structs.replace(state, causes=causes)
    if names := {name for worker in workers if worker.state for name in worker.state.tools}:
        tools = {name: ToolCount() for name in sorted(names)} | count_tools(prepared.run_dir)
        state = msgspec.structs.replace(state, tools=tools)
    progress.update(state)
    return state


def finish(
    prepared: RunContext,
    workers: Sequence[Worker],
    progress: Progress,
    state: Snapshot | None,
) -> int:
    """The tables where the run is whole, the closing words; returns the exit code.

    Args:
        prepared: the job.
        workers: its processes, which have ended.
        progress: takes messages.
        state: as :func:`final_state` returns it.

    Raises:
        BagentError: how a worker ended, where it was for what the user wrote or before any of
            them had a state to show.
    """
    bad = worst_worker(workers)
    reason, action = (bad.reason, bad.action) if bad else ("", "")
    if bad is not None:
        code = bad.code or EXIT_NEEDS_PERSON
        if code == EXIT_USAGE:
            raise UsageError(bad.reason)
    else:
        code = EXIT_OK if state is None else rows_exit_code(prepared, state, progress.note)
        results = prepared.job.results
        if results.parquet or results.duckdb:
            child = TablesChild(prepared.run_dir, prepared.rows_config.to_json())
            if failure := make_tables(child, progress.note):
                code, reason, action = EXIT_CANNOT_WRITE, failure, MAKE_AGAIN
    if state is None and bad is not None and code in _ERRORS:
        raise _ERRORS[code](bad.reason, hint=bad.action)
    if state is None:
        return code
    print_summary(prepared, state, code, reason=reason, action=action)
    return code


def _take_back_replaced(
    prepared: RunContext, workers: Sequence[Worker], state: Snapshot, progress: Progress
) -> None:
    """Of the rows that were sent after an earlier start, some may be edited ones of that."""
    info = RunDir(prepared.run_dir).load()
    if prepared.stages or not state.this_start.done or info is None:
        return
    if len(info.starts) <= len(workers):
        return

    take_back_replaced(prepared.run_dir, progress.note)


def take_back_replaced(run_dir: Path, report: Report) -> int:
    """Take back the outcomes of edited rows that are of another part now; returns how many.

    A row's part follows from its key, and that changes with its text: the part that has it now
    does not look into what another one wrote. Each is taken back in the journal it stands in,
    whose order is sure. Call it once all parts have ended.

    Raises:
        OwnedError: a live process has one of the parts.
        WriteError: the disk refuses.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for line in replaced_lines(open_indexes(run_dir, report), STAGE):
        found[line.held_by.segment.part].append(line.unit)
    for part, units in found.items():
        owner = RunLock.acquire(run_dir, part)
        try:
            journal = Journal.open(
                run_dir, part, clock=time.monotonic, report=report, new_segment=owner.took_over
            )
            try:
                for unit in units:
                    journal.write_tombstone(unit, STAGE)
            finally:
                journal.close()
        finally:
            owner.release()
    return sum(map(len, found.values()))
