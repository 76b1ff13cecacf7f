"""``bagent run``, from its options to its exit code."""

from __future__ import annotations

import asyncio
import errno
import gc
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from bagent.errors import EXIT_NEEDS_PERSON, BagentError, NeedsPerson, UsageError, WriteError
from bagent.job.redaction import mask_text
from bagent.runs.context import (
    SAMPLE_ROWS,
    WORKER,
    RunContext,
    RunOptions,
    open_input,
    prepare,
)
from bagent.runs.ending import TablesChild
from bagent.runs.shutdown import StopRequests, defer_signals, raise_on_signal

if TYPE_CHECKING:
    from bagent.backends.http.pool import Connect
    from bagent.observe import Progress
    from bagent.rows import RowReader
    from bagent.runs.ending import RunEnding
    from bagent.runs.result_lines import ResultLines
    from bagent.runs.run_store import RunStore
    from bagent.runs.services import RunMessages
    from bagent.runs.session import SessionResult

T = TypeVar("T")

_USED = (
    *(f"journal/{stream}-*.jsonl" for stream in ("rows", "turns", "attempts")),
    *("batches/*", "input.jsonl", "local-server.log"),
)
"""Files of a run that has rows or has sent something, if they are not empty."""


@dataclass(frozen=True)
class Simulation:
    """A simulated machine for a run. The run starts no threads in it."""

    make_loop: Callable[[], asyncio.AbstractEventLoop]
    connect: Connect
    """Opens the connections to plain HTTP endpoints."""


@dataclass(frozen=True)
class RunHost:
    """The program that a run works in: ``bagent run``, or one that uses the library."""

    progress: Progress
    stdin: BinaryIO | None
    """Where piped rows come from."""
    stdout: int | None = None
    """Descriptor for result lines; None: standard output."""
    stop_requests: StopRequests | None = None
    """Requests to stop; None: the run owns the process, and signals stop it."""
    simulation: Simulation | None = None
    """Replaces the event loop and the network; None: the real ones."""

    @property
    def owns_process(self) -> bool:
        """Whether signals, standard files and the garbage collector belong to the run."""
        return self.stop_requests is None


def run_job(options: RunOptions) -> int:
    """Run a job to its end or to an early stop, print the summary, and return the exit code.

    Raises:
        UsageError: something the user wrote is wrong; nothing was sent.
    """
    context = prepare(options)
    with raise_on_signal():
        ending = execute_run(context, RunHost(make_display(options), sys.stdin.buffer))
        from bagent.runs.ending import print_summary

        print_summary(context, ending)
        return ending.code


def execute_run(context: RunContext, host: RunHost) -> RunEnding:
    """Run a checked job to its end or to an early stop, and make its tables.

    Raises:
        BagentError: something the user wrote is wrong, and nothing was sent; or results could
            not be written at all.
    """
    results = context.job.results
    with ExitStack() as stack:
        tables: TablesChild | None = None
        if context.options.tables and (results.parquet or results.duckdb):
            tables = TablesChild(context.run_dir, context.rows_config.to_json())
            stack.callback(tables.close)
        rows: RowReader | None = None
        if not context.piped:
            # The lines of `-o -` hold whole rows; tables read them again at the end.
            whole_rows = results.keep_input and context.options.output == "-"
            rows = stack.enter_context(closing(open_input(context, whole_rows=whole_rows)))
            if tables is not None and len(rows.peek(SAMPLE_ROWS)) < SAMPLE_ROWS:
                tables.start()
        # Imported late: the child starts while this process loads the rest.
        from bagent.runs.run_store import open_run

        is_new = not context.run_dir.exists()
        store: RunStore | None = None
        try:
            # A deferred signal raises where the block ends, when the store is open already.
            with defer_signals() if host.owns_process else nullcontext():
                store = open_run(context, tables, threaded=host.simulation is None)
            return _run_open(context, host, store, rows, stack)
        except BaseException as error:  # an open store would block later runs of this process
            if store is None:
                raise
            failure = _as_bagent_error(error)
            store.close(EXIT_NEEDS_PERSON if failure is None else failure.exit_code)
            if isinstance(error, UsageError) and (is_new or store.directory.aside):
                _remove_unused(context, host, store)
            if failure is None or failure is error:
                raise
            raise failure from error


def _remove_unused(context: RunContext, host: RunHost, store: RunStore) -> None:
    """Remove the run that a refused start made, unless it may hold rows, requests or a log.

    The run that the start moved aside is put back.
    """
    folder = context.run_dir
    used = [path for pattern in _USED for path in folder.glob(pattern) if path.stat().st_size]
    if context.part != "all" or used:
        return
    if store.directory.aside is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):  # it stays where the first note says
        store.directory.put_back()
        host.progress.note("the old run is back, because this start was refused")


def _as_bagent_error(error: BaseException) -> BagentError | None:
    """Return the error of a run that may have sent rows, as one line for a person; None: a fault.

    A closed pipe of standard output stays as it is.
    """
    if isinstance(error, BagentError):
        return error
    if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
        return None
    kind = WriteError if error.errno in (errno.ENOSPC, errno.EDQUOT) else NeedsPerson
    name = f"{error.filename}: " if error.filename else ""
    return kind(f"{name}{error.strerror or error}")


def _run_open(
    context: RunContext,
    host: RunHost,
    store: RunStore,
    rows: RowReader | None,
    stack: ExitStack,
) -> RunEnding:
    """Run the rows of an open run.

    Args:
        rows: None where they are piped: they are opened now that the run is locked.
        stack: closes what is opened.
    """
    from bagent.runs.ending import finish_run
    from bagent.runs.services import open_messages

    progress = host.progress
    messages = stack.enter_context(open_messages(store.path, progress, store.journal.redact))
    if rows is None:
        rows = stack.enter_context(closing(open_input(context, stdin=host.stdin)))
    for warning in (*context.warnings, *store.notes):
        messages.warn(warning)
    progress.start(_header(context, store))
    try:
        with _result_lines(context, host, store) as lines:
            stop, snapshot = _run_session(context, host, store, rows, messages, lines)
        progress.update(snapshot)
    finally:
        progress.stop()
    for warning in rows.warnings:
        messages.warn(warning)
    if context.options.debug and stop is not None and stop.error is not None:
        raise stop.error
    return finish_run(
        context, snapshot, stop, tables=store.tables, notice=messages.warn, store=store
    )


def _run_session(
    context: RunContext,
    host: RunHost,
    store: RunStore,
    rows: RowReader,
    messages: RunMessages,
    lines: ResultLines | None,
) -> SessionResult:
    """Run the session on an event loop of its own."""
    from bagent.runs.session import RunSession

    async def session() -> SessionResult:
        return await RunSession(
            context, store, rows, host.progress, messages, lines, host.stop_requests, connect
        ).run()

    connect = host.simulation.connect if host.simulation is not None else None
    factory = host.simulation.make_loop if host.simulation is not None else _uvloop_factory()
    return _run_loop(session(), factory, owns_process=host.owns_process)


@contextmanager
def _result_lines(
    context: RunContext, host: RunHost, store: RunStore
) -> Iterator[ResultLines | None]:
    """Yield what makes the lines of ``-o -``; what tools print does not mix with them."""
    from bagent.runs.result_lines import ResultLines, redirect_stdout

    if context.options.output != "-":
        yield None
        return
    with (
        nullcontext(host.stdout) if host.stdout is not None else redirect_stdout() as descriptor,
        closing(ResultLines(store, context.options.ordered, descriptor)) as lines,
    ):
        yield lines


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's loops, where it is installed: a quarter less CPU per request."""
    with suppress(ImportError):
        import uvloop

        make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return make_loop
    return None


def _run_loop(
    work: Coroutine[Any, Any, T],
    factory: Callable[[], asyncio.AbstractEventLoop] | None,
    *,
    owns_process: bool,
) -> T:
    """Run on a loop of its own.

    Objects of the start-up live to the end, so a process of its own freezes them: the garbage
    collector then costs a third less CPU per row.
    """
    thresholds = gc.get_threshold()
    if owns_process:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)
    finally:
        if owns_process:
            gc.set_threshold(*thresholds)
            gc.unfreeze()


def make_display(options: RunOptions) -> Progress:
    """Make the display of a run on standard error."""
    if options.progress == WORKER:
        from bagent.runs.parallel.worker import WorkerProgress

        return WorkerProgress(sys.stderr)
    from bagent.observe import make_progress

    mode: Any = options.progress
    progress = make_progress(mode, sys.stderr, is_tty=sys.stderr.isatty(), env=options.env)
    return with_metrics(progress, options)


def with_metrics(progress: Progress, options: RunOptions) -> Progress:
    """Return the display, also served on the port of ``--metrics-port``."""
    if options.metrics_port is None:
        return progress
    from bagent.observe.prometheus import MetricsServer

    serving: Any = MetricsServer(progress, options.metrics_port)
    return cast("Progress", serving)


def _header(context: RunContext, store: RunStore) -> str:
    from bagent.observe.formatting import counted
    from bagent.runs.ending import display_path

    job = context.job
    backend = (
        job.backend.url.text
        if job.backend and job.backend.url
        else str(job.hostfile or "no server")
    )
    backend = mask_text(backend, job.source.secrets)
    units = ("answer of stages", "answers of stages") if context.stages else ("row", "rows")
    earlier = f", {counted(store.finished, *units)} finished earlier" if store.finished else ""
    run = display_path(store.path, context.options.cwd)
    return f"{job.name}: {backend}, results in {run}{earlier}"
