"""``bagent run --executor parsl``: the rows in chunks, for workers that Parsl places.

A chunk is a part of the rows (``--shard I/N``) with its own lock and journal in the run directory.
A lost chunk is submitted again and resumes from its journal, so chunks need not be small. There are
a few for each worker, so that slow workers get fewer.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_STOPPED,
    EXIT_USAGE,
)
from bagent.hpc.allocation import job_end, without_allocation
from bagent.hpc.parsl import (
    BatchSettings,
    Pool,
    PoolPlan,
    check_parsl,
    is_lost,
    make_pool_plan,
    open_pool,
)
from bagent.observe import Progress
from bagent.rows import RowReader
from bagent.runs.context import SAMPLE_ROWS, RunContext, RunOptions, open_input, prepare
from bagent.runs.deadline import Deadline, read_deadline
from bagent.runs.ending import display_path
from bagent.runs.parallel.parsl_task import (
    ChunkState,
    ChunkTask,
    read_state,
    run_chunk,
    signals_path,
    state_path,
)
from bagent.runs.parallel.progress_merge import StateMerger
from bagent.runs.parallel.worker import encode_options
from bagent.runs.parallel.workers import (
    Worker,
    max_concurrent_parts,
    merged_state,
    part_options,
    refuse_unshared,
    run_parts,
)
from bagent.runs.shutdown import FLUSH_SECONDS, GRACE_SECONDS, collect_signals, raise_on_signal

PER_SLOT = 4
"""Chunks for each worker, where there are enough rows."""

FEW_CHUNKS = 64
"""Most chunks, unless there are more workers. Each chunk reads the whole input for its part, about
6 microseconds a row where the input cannot be indexed (``share_input_index``)."""

CHUNK_ROWS = 1000
"""Fewest rows of a chunk, if their number is known; starting a chunk takes about a second."""

ATTEMPTS = 4
"""How many times in succession a chunk may end without a finished row before it counts as
stopped."""

EMPTY_JOBS = 3
"""Batch jobs that may end without a worker, per requested job."""

TICK_SECONDS = 0.25
_STOP_SECONDS = 2 * (GRACE_SECONDS + FLUSH_SECONDS)


def run_parsl(options: RunOptions, workers: int) -> int:
    """Run a job in chunks, ``workers`` at once on each node, and return the exit code of the run.

    Raises:
        UsageError: something the user wrote is wrong, or cannot be shared; nothing was sent.
        NeedsPerson: Parsl could not be started.
    """
    check_parsl()
    prepared = prepare(options)
    refuse_unshared(prepared, "--executor parsl")
    plan = make_pool_plan(
        prepared.job, workers, BatchSettings(options.env, options.cwd, sys.executable)
    )
    deadline = read_deadline(
        options.deadline, options.env, time.time(), margin=options.margin, job_end=job_end
    )
    folder = prepared.run_dir.with_name(f"{prepared.run_dir.name}.batch") / "parsl"

    def work(chunks: Sequence[Worker], progress: Progress, merger: StateMerger) -> None:
        limits = ParslLimits(at_once, plan, deadline)
        with collect_signals() as signals, open_pool(plan, run_chunk, folder) as pool:
            ParslCoordinator(prepared, chunks, pool, progress, limits, merger).run(signals)

    with raise_on_signal():
        rows = open_input(prepared)
        count = chunk_count(plan, estimated_rows(rows, options))
        rows.close()
        at_once = max_concurrent_parts(prepared.job.limits, min(plan.slots, count))
        parts = [_with_deadline(part, deadline) for part in part_options(prepared, count, at_once)]
        summary = f"{count} chunks, {at_once} at once {_location(plan)}"
        return run_parts(prepared, parts, summary, work)


def chunk_count(plan: PoolPlan, rows: int | None) -> int:
    """Return into how many chunks to divide ``rows``; None is an unknown number."""
    if plan.chunks is not None:
        return plan.chunks
    most = max(plan.slots, min(plan.slots * PER_SLOT, FEW_CHUNKS))
    return most if rows is None else max(plan.slots, min(most, rows // CHUNK_ROWS))


def estimated_rows(rows: RowReader, options: RunOptions) -> int | None:
    """Estimate the number of rows from the size of the input and of the first rows."""
    first = [row.data for row in rows.peek(SAMPLE_ROWS)]
    total = rows.progress()[1]
    bounds = [n for n in (options.limit, options.sample) if n is not None]
    if total is not None:
        size = sum(len(msgspec.json.encode(data)) for data in first)
        bounds.append(int(total * len(first) / size) if size else 0)
    return min(bounds) if bounds else None


def _with_deadline(options: RunOptions, deadline: Deadline | None) -> RunOptions:
    """Return the options with the user's deadline; else a chunk follows its own batch job."""
    if deadline is None or options.deadline.strip().lower() == "auto":
        return options
    return replace(options, deadline=f"@{deadline.at:.0f}")


def _location(plan: PoolPlan) -> str:
    if plan.where == "here":
        return "on this machine"
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes"
    if plan.where == "allocation":
        return f"on {nodes}"
    jobs = "a batch job" if plan.jobs == 1 else f"{plan.jobs} batch jobs"
    return f"in {jobs} of {nodes}"


@dataclass(frozen=True, slots=True)
class ParslLimits:
    """How many chunks may run at once, where, and until when."""

    at_once: int
    plan: PoolPlan
    deadline: Deadline | None


@dataclass(slots=True)
class _Chunk:
    """A chunk that waits or runs."""

    worker: Worker
    """Its reported state."""
    part: str
    idle: int = 0
    """Ends in succession without a finished row."""


class ParslCoordinator:
    """Submits chunks to the pool, shows their merged state, stops them. Use it once.

    Args:
        chunks: the state of each chunk, which is updated.
        pool: the workers.
        progress: shows the state.
        before: the outcomes of earlier starts, by code.
    """

    def __init__(
        self,
        prepared: RunContext,
        chunks: Sequence[Worker],
        pool: Pool,
        progress: Progress,
        limits: ParslLimits,
        merger: StateMerger,
    ) -> None:
        self._merger = merger
        self._prepared = prepared
        self._chunks = chunks
        self._pool = pool
        self._progress = progress
        self._limits = limits
        self._folder = pool.folder / "chunks"
        self._env = without_allocation(prepared.options.env)
        self._waiting = deque(_Chunk(c, _part_of(c.options)) for c in chunks)
        self._running: dict[Future[Any], _Chunk] = {}
        self._stopped_at: float | None = None
        self._reason = ""

    def run(self, signals: Sequence[int]) -> None:
        """Run until all chunks have ended or stopped; ``signals`` grows as they are received."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handled = 0
        while self._running or (self._waiting and self._stopped_at is None):
            self._submit()
            done, _ = wait(self._running, TICK_SECONDS, FIRST_COMPLETED)
            for future in done:
                self._handle_end(self._running.pop(future), future)
            for number in signals[handled:]:
                handled += 1
                self._stop(f"got {signal.Signals(number).name}", number)
            self._poll()
            if self._is_over():
                break
        for chunk in (*self._waiting, *self._running.values()):
            self._abandon(chunk, signals)

    def _submit(self) -> None:
        if self._stopped_at is not None:
            return
        while self._waiting and len(self._running) < self._limits.at_once:
            chunk = self._waiting.popleft()
            # Remove the state of an earlier start.
            state_path(self._folder, chunk.part).unlink(missing_ok=True)
            task = ChunkTask(
                encode_options(chunk.worker.options),
                str(self._prepared.run_dir),
                chunk.part,
                str(self._folder),
                self._env,
            )
            self._running[self._pool.submit(task)] = chunk

    def _handle_end(self, chunk: _Chunk, future: Future[Any]) -> None:
        """Handle the end of a chunk or of its worker."""
        error = future.exception()
        worker = chunk.worker
        if error is None:
            self._update(worker, msgspec.json.decode(future.result(), type=ChunkState))
            for text in worker.notes:
                self._progress.note(text)
            worker.notes.clear()
        elif is_lost(error):
            self._update(worker, read_state(self._folder, chunk.part))
            self._progress.note(f"chunk {chunk.part} was lost: {error}")
            worker.code, worker.reason = EXIT_STOPPED, f"chunk {chunk.part} was lost"
        else:
            self._fail(worker, f"there are no workers: {_describe(error)}")
        lost = error is not None
        if worker.code is not None and worker.code < 0:
            worker.reason = f"the process of chunk {chunk.part} was killed by {-worker.code}"
            self._progress.note(worker.reason)
            worker.code, lost = EXIT_STOPPED, True
        if worker.code == EXIT_STOPPED and self._should_retry(chunk, lost=lost):
            self._waiting.append(chunk)
        elif worker.code in (EXIT_CANNOT_WRITE, EXIT_NEEDS_PERSON, EXIT_USAGE):
            self._stop(worker.reason, signal.SIGTERM)  # the others would fail in the same way

    def _should_retry(self, chunk: _Chunk, *, lost: bool) -> bool:
        """Return whether to submit a stopped chunk again.

        Its node, or its batch job's time, may have ended and not the run.
        """
        if self._stopped_at is not None:
            return False
        state = chunk.worker.state
        chunk.idle = 0 if state is not None and state.this_start.done else chunk.idle + 1
        own_jobs = self._limits.plan.scheduler is not None
        return (lost or own_jobs) and chunk.idle < ATTEMPTS

    def _update(self, worker: Worker, chunk: ChunkState | None) -> None:
        if chunk is None:
            return
        worker.state = chunk.state or worker.state
        worker.code, worker.reason, worker.action = chunk.code, chunk.reason, chunk.action
        worker.notes = list(chunk.notes)

    def _fail(self, worker: Worker, reason: str) -> None:
        worker.code, worker.reason = EXIT_NEEDS_PERSON, reason
        worker.action = f"look at {display_path(self._pool.folder, self._prepared.options.cwd)}"

    def _poll(self) -> None:
        """Show the merged state, and check whether to stop."""
        for chunk in self._running.values():
            reported = read_state(self._folder, chunk.part)
            if reported is not None and reported.state is not None:
                chunk.worker.state = reported.state
        state = merged_state(self._chunks, self._merger)
        if state is not None:
            self._progress.update(state)
        if self._stopped_at is not None:
            return
        deadline = self._limits.deadline
        if deadline is not None and time.time() >= deadline.stop_feeding_at:
            self._stop("the deadline is near", signal.SIGUSR1)
        if (self._prepared.run_dir / "stop").exists():
            self._stop(f"{self._prepared.run_dir / 'stop'} is there", signal.SIGUSR1)
        allowed = EMPTY_JOBS * self._limits.plan.jobs
        if self._pool.jobs_begun > allowed and not any(self._folder.iterdir()):
            for chunk in self._running.values():
                self._fail(chunk.worker, f"{allowed} batch jobs ended, and no worker came")
            self._stop("no worker came", signal.SIGTERM)

    def _stop(self, reason: str, number: int) -> None:
        """Tell all chunks to stop; a second call tells them not to wait for requests in flight."""
        if self._stopped_at is None:
            self._stopped_at, self._reason = time.monotonic(), reason
        with signals_path(self._folder).open("a", encoding="ascii") as file:
            file.write(f"{int(number)}\n")

    def _is_over(self) -> bool:
        """Return whether not to wait for running chunks: none began, or they take too long."""
        if self._stopped_at is None:
            return False
        begun = [c for c in self._running.values() if read_state(self._folder, c.part) is not None]
        return not begun or time.monotonic() - self._stopped_at > _STOP_SECONDS

    def _abandon(self, chunk: _Chunk, signals: Sequence[int]) -> None:
        """Set the end of a chunk that had none when the run ended."""
        worker = chunk.worker
        if worker.code in (None, EXIT_STOPPED):
            hurried = list(signals).count(signal.SIGINT) > 1
            worker.code = EXIT_INTERRUPTED if hurried else EXIT_STOPPED
            worker.reason = self._reason or worker.reason


def _part_of(options: RunOptions) -> str:
    part, _, count = (options.shard or "").partition("/")
    return f"{part}-of-{count}"


def _describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__, *lines])[:600]
