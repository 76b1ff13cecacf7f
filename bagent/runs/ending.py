"""End of a run of one or of many processes: exit code, tables, summary.

A child process makes the DuckDB and Parquet tables.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    BagentError,
    WriteError,
)
from bagent.observe.snapshot import Snapshot
from bagent.runs.context import WORKER, RunContext
from bagent.runs.shutdown import Stop
from bagent.store.journal.segments import part_order
from bagent.store.run_dir import RunDir, RunInfo, working_seconds
from bagent.text.terminal import unguarded

if TYPE_CHECKING:
    from bagent.runs.run_store import RunStore


MAKE_AGAIN = "remove the cause; the rows are safe in the journal, and bagent query makes the tables"
"""The action where the tables could not be made."""


class TablesChild:
    """Builds the tables in a child process, so that this process does not load DuckDB.

    The child starts before the rows have ended, since starting takes longer than the tables of a
    short run. It waits for a line on stdin; if this process dies before, it makes nothing.

    Args:
        run_dir: the run directory.
        rows: the rows configuration as JSON, to read the input again.
    """

    def __init__(self, run_dir: Path, rows: str = "") -> None:
        module = "bagent.store.tables.build"
        self._command = [sys.executable, "-P", "-m", module, str(run_dir), "--wait"]
        self._rows = rows
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child, unless it runs."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C goes to the run, which decides about the child
            )

    def make(self) -> tuple[int, str]:
        """Make the tables of the current journal; return the exit code and the child's messages."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed while it waited
        self.start()
        process = self._process
        assert process is not None
        try:
            _, messages = process.communicate(self._rows.encode() + b"\n")
        finally:
            self.close()
        return process.returncode, messages.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Kill the child; tables are put in place complete or not at all."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes the pipes and waits
            process.kill()


class RunEnding(msgspec.Struct, frozen=True):
    """How a run ended."""

    code: int
    """The exit code."""
    snapshot: Snapshot
    reason: str = ""
    """Why it stopped early."""
    action: str = ""
    """What a person must do first."""


def finish_run(
    context: RunContext,
    snapshot: Snapshot,
    stop: Stop | None,
    *,
    tables: TablesChild | None,
    notice: Callable[[str], None],
    store: RunStore | None = None,
) -> RunEnding:
    """Close the journal, make and publish the tables of a finished run; return how it ended.

    Args:
        stop: what ended the run early; None where all rows have ended.
        tables: makes the tables; None where the job wants none.
        store: the open run; None where each of several processes had its own and has closed it.
    """
    if stop is None:
        ending = RunEnding(rows_exit_code(context, snapshot, notice), snapshot)
    else:
        ending = RunEnding(stop.code, snapshot, stop.reason, stop.hint)
    if store is not None:
        absent = store.absent if context.stages else _absent(context, snapshot)
        ending = _close(store, ending, absent if stop is None else 0)
    if tables is None or ending.code not in (EXIT_OK, EXIT_ROWS_FAILED):
        return ending
    failure, action = make_tables(tables, notice), MAKE_AGAIN
    if not failure:
        failure, action = publish_results(context, notice)
    if not failure:
        return ending
    if store is not None:
        failure = store.journal.redact(failure)
        store.record_end(EXIT_CANNOT_WRITE, failure, action)
    return RunEnding(EXIT_CANNOT_WRITE, snapshot, failure, action)


def publish_results(context: RunContext, notice: Callable[[str], None]) -> tuple[str, str]:
    """Publish the tables where the job says so; return why that failed, and what to do."""
    target = context.job.results.publish
    if target is None:
        return "", ""
    from bagent.store.publish import publish_tables

    try:
        publish_tables(context.run_dir, target)
    except BagentError as error:
        return str(error.message), error.hint
    notice(f"published: {target}/manifest.json")
    return "", ""


def _absent(context: RunContext, snapshot: Snapshot) -> int:
    """Return how many results have no row in the input; 0 where only some rows were read."""
    from bagent.runs.resume import reads_all_rows

    feed = snapshot.feed
    if context.piped or not reads_all_rows(context):
        return 0
    return max(0, snapshot.totals.rows - feed.read * context.job.answers) if feed.ended else 0


def _close(store: RunStore, ending: RunEnding, absent: int) -> RunEnding:
    redact = store.journal.redact
    reason, action = redact(ending.reason), redact(ending.action)
    ending = msgspec.structs.replace(ending, reason=reason, action=action)
    try:
        snapshot = ending.snapshot
        store.close(
            ending.code,
            reason,
            action,
            dropped=snapshot.dropped,
            copied=snapshot.this_start.copied,
            absent=absent,
            cut_at=snapshot.cut_at,
        )
    except WriteError as error:
        return msgspec.structs.replace(ending, code=error.exit_code, reason=redact(str(error)))
    return ending


def rows_exit_code(context: RunContext, snapshot: Snapshot, notice: Callable[[str], None]) -> int:
    """Return the exit code of a run that reached its end, by the totals of all starts."""
    dropped = sum(snapshot.dropped.values())
    failed, rows = snapshot.failed + dropped, snapshot.totals.rows + dropped
    if rows == 0:
        notice("there were no rows to do")
    if not failed or context.job.results.allow_failures.allows(failed, rows):
        return EXIT_OK
    return EXIT_ROWS_FAILED


def make_tables(child: TablesChild, notice: Callable[[str], None]) -> str:
    """Make the tables; return why they could not be made, or an empty text."""
    code, output = child.make()
    if code:
        last = output.splitlines()[-1] if output else f"exit code {code}"
        return f"the tables could not be made: {last.removeprefix('bagent: error: ')}"
    for line in output.splitlines():
        notice(line)
    return ""


class Summary(msgspec.Struct, frozen=True):
    """The closing lines of a run."""

    headline: str
    """How the run ended, one line."""
    lines: list[str]


def summarize(context: RunContext, ending: RunEnding, *, color: bool = False) -> Summary:
    """Return the closing lines of a run."""
    from bagent.observe import EndInfo, summary_lines
    from bagent.observe.next_step import Advice
    from bagent.observe.summary import headline
    from bagent.runs.prompt_fields import long_field
    from bagent.runs.resume import resent_kinds
    from bagent.runs.run_state import cut_range, notes_of_results

    options, job, snapshot = context.options, context.job, ending.snapshot
    run = display_path(context.run_dir, options.cwd)
    info = RunDir(context.run_dir).load_or_report(lambda _: None)
    too_long = "context_overflow" in snapshot.by_kind
    advice = Advice(
        exit_code=ending.code,
        run=run,
        results=run,
        command=options.command,
        action=ending.action,
        resent=resent_kinds(context),
        max_tokens=job.sampling.max_tokens,
        max_turns=job.agent.max_turns if job.agent else None,
        own_bodies=context.own_bodies,
        cut_at=cut_range(info) if info else snapshot.cut_at,
        none_ok=not snapshot.ok,
        long_field=long_field(RunDir(context.run_dir), info) if info and too_long else "",
    )
    worked_s = _working_seconds(context, info)
    notes = notes_of_results(info, run) if info else ()
    end = EndInfo(advice, ending.reason, color=color, worked_s=worked_s, notes=(*notes,))
    return Summary(headline(snapshot, end), summary_lines(snapshot, end))


def _working_seconds(context: RunContext, info: RunInfo | None) -> float | None:
    """Return how long the starts of this process's part worked; of all parts, for the whole run."""
    starts = info.starts if info is not None else []
    if part_order(context.part)[0] > 1:
        starts = [start for start in starts if start.part == context.part]
    return working_seconds(starts)


def print_summary(context: RunContext, ending: RunEnding) -> None:
    """Print the closing lines of a run on standard error, or as a JSON event."""
    options = context.options
    color = (
        sys.stderr.isatty() and "NO_COLOR" not in options.env and ending.code != EXIT_INTERRUPTED
    )
    summary = summarize(context, ending, color=color)
    lines = summary.lines
    if options.progress in ("json", WORKER):
        event = {
            "event": "summary",
            "exit_code": ending.code,
            "run": display_path(context.run_dir, options.cwd),
            "lines": lines,
            "ending": summary.headline,
            "reason": ending.reason,
            "action": ending.action,
        }
        lines = [msgspec.json.encode(event).decode()]
    with contextlib.suppress(OSError, ValueError):
        stream = unguarded(sys.stderr) if color else sys.stderr
        stream.write("\n".join(lines) + "\n")


def display_path(path: Path, cwd: Path) -> str:
    """Return ``path`` relative to ``cwd`` where it is below it."""
    try:
        return str(path.relative_to(cwd))
    except ValueError:
        return str(path)
