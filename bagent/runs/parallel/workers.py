"""``bagent run --workers N``: processes of one host that share a run's rows and one display.

Each worker does one part of the rows (``--shard``) and writes its own journal files in the same run
directory. The parent process sends nothing; it makes the tables and prints the summary. Equal
requests are deduplicated within one part only.
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
from bagent.observe.formatting import counted
from bagent.rows import RowReader, open_rows
from bagent.runs.context import (
    STAGE,
    WORKER,
    RunContext,
    RunOptions,
    make_redactor,
    open_input,
    prepare,
    read_shard,
)
from bagent.runs.ending import TablesChild, display_path, finish_run, print_summary
from bagent.runs.execute import make_display
from bagent.runs.parallel.progress_merge import StateMerger
from bagent.runs.parallel.worker import encode_options
from bagent.runs.resume import last_stage
from bagent.runs.run_store import open_run_dir
from bagent.runs.shutdown import STOP_SIGNALS, Stop, raise_on_signal
from bagent.store.journal.done_index import open_indexes
from bagent.store.journal.edited_rows import replaced_lines
from bagent.store.journal.journal import Journal
from bagent.store.journal.segments import Report
from bagent.store.lock import RunLock
from bagent.store.run_dir import RunDir
from bagent.store.totals import ToolCount, Totals, count_tools, run_codes, stage_causes

FEWEST = 3
"""Fewest parts for which a shared index of the input saves time."""


@contextmanager
def share_input_index(prepared: RunContext, parts: int) -> Iterator[str | None]:
    """Index the input in a thread during the block; yield the file of the index.

    Yields None where there is nothing to index or the file cannot be written.

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
    thread = threading.Thread(target=_index, args=(rows,), name="input", daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        rows.close()
        thread.join()


def _index(rows: RowReader) -> None:
    # The workers report errors of the input.
    with contextlib.suppress(BagentError, OSError):
        rows.note_all()


STARTS = 3
"""How often a worker is started again after the kernel killed it."""

TICK_SECONDS = 0.25
_LONGEST_LINE = 16 * 1024 * 1024
_CODES_WORST_FIRST = (
    EXIT_INTERRUPTED,
    EXIT_CANNOT_WRITE,
    EXIT_NEEDS_PERSON,
    EXIT_USAGE,
    EXIT_STOPPED,
)
_ERRORS: Mapping[int, type[BagentError]] = {
    EXIT_USAGE: UsageError,
    EXIT_CANNOT_WRITE: WriteError,
    EXIT_STOPPED: StoppedEarly,
    EXIT_NEEDS_PERSON: NeedsPerson,
}
_SHARED_LIMITS = ("concurrency", "per_endpoint", "rpm", "tpm")


@dataclass(slots=True)
class Worker:
    """One process: its options, its last reported state, how it ended."""

    options: RunOptions
    state: Snapshot | None = None
    code: int | None = None
    reason: str = ""
    action: str = ""
    process: asyncio.subprocess.Process | None = None
    notes: list[str] = field(default_factory=list)


def run_workers(options: RunOptions, count: int) -> int:
    """Run a job in ``count`` processes and return the exit code of the run.

    Raises:
        UsageError: something the user wrote is wrong, or cannot be shared; nothing was sent.
    """
    prepared = prepare(options)
    refuse_unshared(prepared)

    def work(workers: Sequence[Worker], progress: Progress, merger: StateMerger) -> None:
        asyncio.run(WorkerPool(workers, progress, merger).run())

    with raise_on_signal():
        open_input(prepared).close()
        parts = part_options(prepared, count)
        summary = counted(len(parts), "process", "processes")
        if len(parts) < count:
            key = min(_shares(prepared.job.limits).items(), key=lambda item: item[1])[0]
            summary += f", not {count} ({key} is {len(parts)})"
        return run_parts(prepared, parts, summary, work)


def run_parts(
    prepared: RunContext,
    parts: Sequence[RunOptions],
    summary: str,
    work: Callable[[Sequence[Worker], Progress, StateMerger], None],
) -> int:
    """Run the parts of a job with one display and return the exit code of the run.

    Args:
        parts: the options of each part.
        summary: how many parts run, and where.
        work: runs all parts; gets their workers, the display, and what merges their states.
    """
    notes: list[str] = []
    open_run_dir(prepared, prepared.fingerprints(), notes)
    merger = StateMerger(count_earlier_codes(prepared))
    progress = make_display(prepared.options)
    for text in (*prepared.warnings, *notes):
        progress.note(text, warning=True)
    run = display_path(prepared.run_dir, prepared.options.cwd)
    progress.start(f"{prepared.job.name}: {summary}, results in {run}")
    try:
        with share_input_index(prepared, len(parts)) as index:
            workers = [Worker(replace(part, input_index=index)) for part in parts]
            work(workers, progress, merger)
        state = final_state(prepared, workers, progress, merger)
    finally:
        progress.stop()
    return finish_parts(prepared, workers, progress, state)


def max_concurrent_parts(limits: LimitsSpec, count: int) -> int:
    """Return how many of ``count`` processes can share these limits with at least 1 of each."""
    return min([count, *_shares(limits).values()])


def _shares(limits: LimitsSpec) -> dict[str, int]:
    """Return the limits that processes share, by job key."""
    values = {f"limits.{key}": getattr(limits, key) for key in _SHARED_LIMITS}
    return {key: value for key, value in values.items() if isinstance(value, int)}


def part_options(prepared: RunContext, count: int, at_once: int | None = None) -> list[RunOptions]:
    """Return the options of each part: its rows and its share of the limits.

    Args:
        count: how many parts; fewer where a limit would be less than 1 for each.
        at_once: how many of them run at the same time; None for all.
    """
    options, limits = prepared.options, prepared.job.limits
    shares = _shares(limits)
    all_at_once = at_once is None
    if at_once is None:
        count = at_once = max_concurrent_parts(limits, count)
    if all_at_once:
        shares.pop("limits.per_endpoint", None)  # shared endpoint by endpoint
    budget = limits.budget_usd
    budget_share = {} if budget is None else {"limits.budget_usd": budget / count}
    part, parts = read_shard(options.shard, options.env) or (1, 1)
    common = replace(
        options,
        progress=WORKER,
        tables=False,
        metrics_port=None,
        fresh=False,
        on_change="refuse" if options.on_change == "fresh" else options.on_change,
    )
    return [
        replace(
            common,
            limit_part=number if all_at_once else 0,
            limit_parts=count if all_at_once else 1,
            # Part i of n becomes every n-th of the smaller parts, from i on.
            shard=f"{part + number * parts}/{parts * count}",
            overrides={
                **options.overrides,
                **budget_share,
                # The first parts get the remainder, where all run at once.
                **{
                    key: n // at_once + (all_at_once and number < n % at_once)
                    for key, n in shares.items()
                },
            },
        )
        for number in range(count)
    ]


def refuse_unshared(prepared: RunContext, option: str = "--workers") -> None:
    """Refuse what several processes cannot share; ``option`` is the option that asks for them.

    Raises:
        UsageError: rows from stdin, rows to stdout, or an embedded model.
    """
    backend = prepared.job.backend
    if prepared.piped:
        reason, hint = "rows from stdin cannot be shared", "write them to a file first"
    elif prepared.options.output == "-":
        reason, hint = "-o - prints one stream", "print them afterwards: bagent results"
    elif backend is not None and backend.kind == "local":
        reason, hint = "the local model is one process already", f"leave {option} out"
    else:
        return
    raise UsageError(f"{option}: {reason}", hint=hint)


class WorkerPool:
    """Starts the workers, shows their merged state, forwards signals. Use it once.

    Args:
        workers: the workers to start.
        progress: shows the state.
        merger: merges their states.
    """

    def __init__(self, workers: Sequence[Worker], progress: Progress, merger: StateMerger) -> None:
        self._workers = workers
        self._merger = merger
        self._progress = progress
        self._stopping = False

    async def run(self) -> None:
        """Run until all workers have ended."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._forward, number)
        ticker = asyncio.create_task(self._show_forever())
        try:
            await asyncio.gather(*map(self._supervise, self._workers))
        finally:
            ticker.cancel()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def _supervise(self, worker: Worker) -> None:
        for _ in range(STARTS):
            await self._run_once(worker)
            if worker.code is None or worker.code >= 0 or self._stopping:
                break
            self._progress.note(f"a worker was killed by signal {-worker.code}")
        if worker.code in (EXIT_CANNOT_WRITE, EXIT_NEEDS_PERSON, EXIT_USAGE):
            self._stop_others()  # the others would fail in the same way
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
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
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

    def _forward(self, number: int) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(number)

    def _stop_others(self) -> None:
        if not self._stopping:
            self._forward(STOP_SIGNALS[0])

    async def _show_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            state = merged_state(self._workers, self._merger)
            if state is not None:
                self._progress.update(state)


def handle_worker_line(worker: Worker, line: bytes, note: Callable[[str], None]) -> None:
    """Handle a line that a worker wrote to stderr; pass messages for people to ``note``."""
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
    """Count the outcomes of earlier starts by code.

    Return none for a job of several stages, whose workers count them as they read them.
    """
    if prepared.stages:
        return Counter()
    return run_codes(prepared.run_dir, None, None, accept=_accepts(prepared))


def _accepts(prepared: RunContext) -> bool:
    return prepared.job.output.truncated == "accept"


def merged_state(workers: Sequence[Worker], merger: StateMerger) -> Snapshot | None:
    """Return the merged state of the workers; None before the first report."""
    states = [worker.state for worker in workers if worker.state is not None]
    if not states:
        return None
    merged = merger.merge(states)
    if all(worker.state is not None or worker.code is not None for worker in workers):
        return merged
    # How many rows the others have is unknown until they report.
    return msgspec.structs.replace(
        merged,
        total=None,
        total_is_exact=False,
        remaining=None,
        to_do=None,
        fraction=None,
        eta_s=None,
    )


def worst_worker(workers: Sequence[Worker]) -> Worker | None:
    """Return the worker whose exit code is the run's; None where all reached their end."""
    for code in _CODES_WORST_FIRST:
        for worker in workers:
            if worker.code == code:
                return worker
    return None


def final_state(
    prepared: RunContext, workers: Sequence[Worker], progress: Progress, merger: StateMerger
) -> Snapshot | None:
    """Show and return the last state, if any, with totals counted from the journal."""
    state = merged_state(workers, merger)
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


def finish_parts(
    prepared: RunContext,
    workers: Sequence[Worker],
    progress: Progress,
    state: Snapshot | None,
) -> int:
    """Make the tables of a finished run, print the summary, return the exit code.

    Args:
        state: the result of :func:`final_state`.

    Raises:
        BagentError: a worker ended by a usage error, or before any worker reported a state.
    """
    stop, worst = None, worst_worker(workers)
    if worst is not None:
        stop = Stop(worst.code or EXIT_NEEDS_PERSON, worst.reason, worst.action)
        if stop.code == EXIT_USAGE or (state is None and stop.code in _ERRORS):
            raise _ERRORS[stop.code](stop.reason, hint=stop.hint)
    if state is None:
        return EXIT_OK if stop is None else stop.code
    results, tables = prepared.job.results, None
    if results.parquet or results.duckdb:
        tables = TablesChild(prepared.run_dir, prepared.rows_config.to_json())
    ending = finish_run(prepared, state, stop, tables=tables, notice=progress.note)
    if stop is None:
        # A part knows only its own rows, and nothing of the tables.
        redact = make_redactor(prepared.job, prepared.options.env)
        RunDir(prepared.run_dir).record_end(ending.code, redact(ending.reason), ending.action)
    print_summary(prepared, ending)
    return ending.code


def _take_back_replaced(
    prepared: RunContext, workers: Sequence[Worker], state: Snapshot, progress: Progress
) -> None:
    """Take back the earlier outcomes of rows that were edited since."""
    info = RunDir(prepared.run_dir).load()
    if prepared.stages or not state.this_start.done or info is None:
        return
    if len(info.starts) <= len(workers):
        return
    take_back_replaced(prepared.run_dir, progress.note)


def take_back_replaced(run_dir: Path, report: Report) -> int:
    """Take back the outcomes of edited rows that belong to another part now; return how many.

    A row's part follows from its key, which changes with its text, and a part does not read what
    another part wrote. Each outcome is taken back in its own journal. Call it after all parts
    have ended.

    Raises:
        OwnedError: a live process owns one of the parts.
        WriteError: the disk refuses.
    """
    units_by_part: dict[str, list[int]] = defaultdict(list)
    for line in replaced_lines(open_indexes(run_dir, report), STAGE):
        units_by_part[line.segment_index.segment.part].append(line.unit)
    for part, units in units_by_part.items():
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
    return sum(map(len, units_by_part.values()))
