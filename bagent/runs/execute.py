"""``bagent run``, from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    BagentError,
    WriteError,
)
from bagent.job.redaction import mask_text
from bagent.runs.context import SAMPLE_ROWS, RunContext, RunOptions, open_input, prepare
from bagent.runs.shutdown import defer_signals, raise_on_signal
from bagent.runs.tables_process import TablesChild
from bagent.text.terminal import unguarded

if TYPE_CHECKING:
    from bagent.observe import Progress, Snapshot
    from bagent.runs.output import ResultLines
    from bagent.runs.run_store import RunStore
    from bagent.runs.session import SessionResult

T = TypeVar("T")

WORKER = "worker"
"""The display of a worker process, whose parent shows the run."""


def run_job(options: RunOptions) -> int:
    """Run a job to its end or to an early stop, and return the exit code.

    Raises:
        UsageError: something the user wrote is wrong; nothing was sent.
    """
    prepared = prepare(options)
    with raise_on_signal():
        return _run_prepared(prepared)


def _run_prepared(prepared: RunContext) -> int:
    results = prepared.job.results
    tables: TablesChild | None = None
    if prepared.options.tables and (results.parquet or results.duckdb):
        tables = TablesChild(prepared.run_dir, prepared.rows_config.to_json())
    store: RunStore | None = None
    try:
        if not prepared.piped:
            rows = open_input(prepared)
            if tables is not None and len(rows.peek(SAMPLE_ROWS)) < SAMPLE_ROWS:
                tables.start()
        # Imported late: the child starts while this process loads the rest.
        from bagent.runs.run_store import open_run

        with defer_signals():
            store = open_run(prepared, tables)
        return _run_open(prepared, store)
    except BagentError as error:
        if store is not None:
            store.close(error.exit_code)
        raise
    finally:
        if tables is not None:
            tables.close()
        if prepared.rows is not None:
            prepared.rows.close()


def _run_open(prepared: RunContext, store: RunStore) -> int:
    from bagent.observe import RunLog
    from bagent.runs.output import ResultLines, redirect_stdout
    from bagent.runs.session import RunSession

    options = prepared.options
    log = RunLog(store.path / "run.log")
    progress = make_display(options)

    redact = store.journal.redact

    def log_text(text: str) -> None:
        log.warning(redact(text))

    store.log = log_text

    def notice(text: str) -> None:
        text = redact(text)
        log.info(text)
        progress.note(text)

    try:
        if prepared.piped:
            open_input(prepared)
        for warning in (*prepared.warnings, *store.notes):
            notice(warning)
        lines = ResultLines(store, options.ordered) if options.output == "-" else None
        progress.start(_header(prepared, store))

        async def session() -> SessionResult:
            return await RunSession(prepared, store, progress, notice, lines).run()

        try:
            with ExitStack() as stack:
                if lines is not None:
                    lines.descriptor = stack.enter_context(redirect_stdout())
                session_result = _run(session())
            progress.update(session_result.snapshot)
        finally:
            progress.stop()
        for warning in prepared.rows.warnings if prepared.rows else ():
            notice(warning)
        return _finish(prepared, store, session_result, lines, notice)
    except BagentError as error:
        error.message = redact(error.message)
        log.error(str(error))
        raise
    finally:
        log.close()


def make_display(options: RunOptions) -> Progress:
    """Make the display of a run on standard error."""
    if options.progress == WORKER:
        from bagent.runs.parallel.worker import WorkerProgress

        return WorkerProgress(sys.stderr)
    from bagent.observe import make_progress

    mode: Any = options.progress
    progress = make_progress(mode, sys.stderr, is_tty=sys.stderr.isatty(), env=options.env)
    if options.metrics_port is None:
        return progress
    from bagent.observe.prometheus import MetricsServer

    serving: Any = MetricsServer(progress, options.metrics_port)
    return cast("Progress", serving)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is installed, which saves a quarter of the CPU per request.

    Objects of the start-up live to the end, so they are frozen: the garbage collector then costs a
    third less CPU per row.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    with suppress(ImportError):
        import uvloop

        run = uvloop.run
    try:
        return run(work)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _header(prepared: RunContext, store: RunStore) -> str:
    job = prepared.job
    backend = job.backend.url.text if job.backend and job.backend.url else str(job.hostfile)
    backend = mask_text(backend, job.source.secrets)
    unit = "answers of stages" if prepared.stages else "rows"
    earlier = f", {store.finished:,} {unit} finished earlier" if store.finished else ""
    run = display_path(store.path, prepared.options.cwd)
    return f"{job.name}: {backend}, results in {run}{earlier}"


def _finish(
    prepared: RunContext,
    store: RunStore,
    result: SessionResult,
    lines: ResultLines | None,
    notice: Callable[[str], None],
) -> int:
    """Close the journal, make the tables of a finished run, print the summary."""
    options, snapshot = prepared.options, result.snapshot
    reason = action = ""
    if result.stop is not None:
        code, reason, action = result.stop.code, result.stop.reason, result.stop.hint
        if options.debug and result.stop.error is not None:
            raise result.stop.error
    else:
        code = rows_exit_code(prepared, snapshot, notice)
    redact = store.journal.redact
    try:
        store.close(code, redact(reason), redact(action), snapshot.dropped)
    except WriteError as error:
        code, reason = error.exit_code, str(error)
    if code in (EXIT_OK, EXIT_ROWS_FAILED):
        if store.tables is not None and (failure := make_tables(store.tables, notice)):
            code, reason, action = EXIT_CANNOT_WRITE, failure, MAKE_AGAIN
            store.record_end(code, redact(reason), action)
        if lines is not None and lines.late:
            lines.print_all()
    print_summary(prepared, snapshot, code, reason=redact(reason), action=redact(action))
    return code


def rows_exit_code(prepared: RunContext, snapshot: Snapshot, notice: Callable[[str], None]) -> int:
    """Return the exit code of a run that reached its end, by the totals of all starts."""
    dropped = sum(snapshot.dropped.values())
    failed, rows = snapshot.failed + dropped, snapshot.totals.rows + dropped
    if rows == 0:
        notice("there were no rows to do")
    if not failed or prepared.job.results.allow_failures.allows(failed, rows):
        return EXIT_OK
    return EXIT_ROWS_FAILED


MAKE_AGAIN = "mend that; the rows are safe in the journal, and bagent query makes the tables"
"""The action where the tables could not be made."""


def make_tables(child: TablesChild, notice: Callable[[str], None]) -> str:
    """Make the tables; return why they could not be made, or an empty text."""
    code, output = child.make()
    if code:
        last = output.splitlines()[-1] if output else f"exit code {code}"
        return f"the tables could not be made: {last.removeprefix('bagent: error: ')}"
    for line in output.splitlines():
        notice(line)
    return ""


def print_summary(
    prepared: RunContext,
    snapshot: Snapshot,
    code: int,
    *,
    reason: str = "",
    action: str = "",
) -> None:
    """Print the closing lines of a run on standard error, or as a JSON event.

    Args:
        reason: why the run stopped early.
        action: what a person must do first.
    """
    from bagent.observe import EndInfo, summary_lines
    from bagent.observe.summary import Advice, headline
    from bagent.runs.resume import resent_kinds

    options, job = prepared.options, prepared.job
    run = display_path(prepared.run_dir, options.cwd)
    advice = Advice(
        exit_code=code,
        run=run,
        results=run,
        command=options.command,
        action=action,
        resent=resent_kinds(prepared),
        max_tokens=job.sampling.max_tokens,
        max_turns=job.agent.max_turns if job.agent else None,
        own_bodies=prepared.own_bodies,
        cut_at=snapshot.cut_at,
    )
    color = sys.stderr.isatty() and "NO_COLOR" not in options.env and code != EXIT_INTERRUPTED
    info = EndInfo(advice, reason, color=color, brief=options.progress == "none")
    lines = summary_lines(snapshot, info)
    if options.progress in ("json", WORKER):
        end = {"event": "summary", "exit_code": code, "run": run, "lines": lines}
        end |= {"ending": headline(snapshot, info), "reason": reason, "action": action}
        lines = [msgspec.json.encode(end).decode()]
    with contextlib.suppress(OSError, ValueError):
        stream = unguarded(sys.stderr) if color else sys.stderr
        stream.write("\n".join(lines) + "\n")


def display_path(path: Path, cwd: Path) -> str:
    """Return ``path`` relative to ``cwd`` where it is below it."""
    try:
        return str(path.relative_to(cwd))
    except ValueError:
        return str(path)
