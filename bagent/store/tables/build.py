"""The build of a run's tables: made in parts in a work directory, then moved into place."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import msgspec

from bagent.batch_env import SCHEDULER_VARIABLES
from bagent.duck import Access, connect, file_source
from bagent.errors import BagentError, WriteError
from bagent.files import write_atomic
from bagent.store.journal.reader import JournalReader
from bagent.store.journal.segments import Report, Stream, list_segments
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.run_input import find_input, input_reader
from bagent.store.tables import schema
from bagent.store.tables.freshness import Freshness, signatures, stale_tables
from bagent.store.tables.outputs import DuckDBWriter, TableOutputs, copy_file, is_written_by_another
from bagent.store.tables.parquet import (
    VECTOR_LINES,
    Copy,
    MemoryLimits,
    PartMaker,
    TableChunk,
    TableJob,
    is_out_of_memory,
    longest_line,
    memory_steps,
    object_bytes,
)
from bagent.store.tables.row_feed import InputFinder, InputRows, ReadInput, RowFeed
from bagent.store.tables.schema import TABLES, WiderColumns, check_select, wider_types


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How to make the tables.

    ``out`` is their folder, None the run directory. ``only_stale`` skips tables that are up to
    date. ``read_input`` reads the input rows of the user's own run. ``wait`` sleeps between two
    checks of a locked ``run.duckdb``.
    """

    out: Path | None = None
    only_stale: bool = False
    memory_mb: int = 150
    read_input: ReadInput | None = None
    wait: Callable[[float], None] = time.sleep


def make_tables(run_dir: Path, options: TableOptions, report: Report) -> list[str]:
    """Make the tables of a run, and return the names of those that were rebuilt.

    Args:
        run_dir: the run directory.
        options: how.
        report: called with messages for the user.

    Raises:
        WriteError: a table cannot be written.
        UsageError: ``run.json`` is damaged.
    """
    out = options.out or run_dir
    info = RunDir(run_dir).load_or_report(report) or RunInfo(run_dir.name)
    if options.out is not None:
        info.parquet, info.duckdb = True, False
    now = signatures(run_dir, info)
    stale = list(TABLES)
    if options.only_stale:
        stale = stale_tables(out, info, now)
    if not stale:
        return []
    import duckdb

    try:
        out.mkdir(parents=True, exist_ok=True)
        with work_directory(out) as work:
            TableBuilder(run_dir, info, Path(work), options, report).make(stale, now)
    except (duckdb.OutOfMemoryException, MemoryError) as error:
        raise WriteError(
            f"the tables of {run_dir} need more memory than there is: {error}",
            hint="the journal is whole; on a machine with more memory: bagent query RUN",
        ) from error
    except (OSError, duckdb.Error) as error:
        raise WriteError(
            f"cannot make the tables of {run_dir}: {error}",
            hint="the journal is whole; make room, then: bagent query RUN",
        ) from error
    return stale


def main(argv: list[str] | None = None, rows: bytes = b"") -> int:
    """Run the command line of this module and return the exit code.

    ``rows`` stands for the line that ``--wait`` reads from stdin.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bagent.store.tables.build", description=__doc__
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--only-stale", action="store_true", help="leave fresh tables alone")
    parser.add_argument("--out", type=Path, help="put the tables there, not in the run directory")
    parser.add_argument(
        "--memory", type=int, default=150, help="of each DuckDB in MB, to begin with"
    )
    parser.add_argument(
        "--wait", action="store_true", help="begin at a line on stdin: the rows to read, or a word"
    )
    arguments = parser.parse_args(argv)
    if arguments.wait:
        rows = _first_line()
        if not rows:
            return 0
    read_input = input_reader(rows) if rows.startswith(b"{") else None
    options = TableOptions(arguments.out, arguments.only_stale, arguments.memory, read_input)

    def report(message: str) -> None:
        sys.stderr.write(f"{message}\n")

    try:
        make_tables(arguments.run_dir, options, report)
    except BagentError as error:
        sys.stderr.write(f"bagent: error: {error}\n")
        return error.exit_code
    return 0


def _first_line() -> bytes:
    """Import what loads slowly, then read a line; empty if the writer is gone."""
    import bagent.rows
    import bagent.store.tables.build  # noqa: F401

    connect(Access()).execute("SELECT 1").close()
    return sys.stdin.buffer.readline()


LEAST_MB = 150
"""The memory that DuckDB always gets, in MB."""

_SHARE = 0.35
"""Share of the free memory; two DuckDBs work at a time, and exceed their limits somewhat."""

_UNLIMITED = 1 << 60


def most_memory_mb(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return the most memory for a DuckDB: a third of what machine, cgroup and scheduler leave.

    Args:
        env: environment variables.
        root: where ``proc`` and ``sys`` are.
    """
    free = min([_UNLIMITED, *_limits(env, root)])
    if free == _UNLIMITED:
        return LEAST_MB * 4
    return max(LEAST_MB, int(free * _SHARE) // 1_000_000)


def _limits(env: Mapping[str, str], root: Path) -> Iterator[int]:
    """Yield every known memory limit in bytes."""
    for line in _lines(root / "proc" / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    yield from _cgroup_limits(root)
    for variables in SCHEDULER_VARIABLES.values():
        yield from variables.memory_limits(env)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the free memory of each cgroup of this process, versions 1 and 2."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = Path("sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = Path("sys/fs/cgroup/memory")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / base / path.lstrip("/")
        # In a container the path may be the host's, of which only the root is visible.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root / base):
                yield from _free_bytes(group / limit, group / used)


def _free_bytes(limit: Path, used: Path) -> Iterator[int]:
    with suppress(ValueError, IndexError):
        most, taken = int(_lines(limit)[0]), int(_lines(used)[0])
        for line in _lines(limit.with_name("memory.stat")):
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                taken -= int(value)  # the page cache is reclaimed
                break
        yield max(0, most - max(0, taken))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


LOCK_SECONDS = 0.5
"""Seconds between two checks of a ``run.duckdb`` that another process writes."""

LOCK_CHECKS = 4
"""The number of checks before the new tables are written beside it."""

LEFTOVER_SECONDS = 600.0
"""The age at which unfinished tables of dead processes are removed."""

_NAMED = 5
"""The number of shortened rows named in a message."""

_PLAIN: dict[str, Stream] = {
    "attempts": "attempts",
    "tool_calls": "tools",
    "endpoints": "endpoints",
}


def work_directory(out: Path) -> TemporaryDirectory[str]:
    """Make a temporary directory under ``out``; remove those of killed processes of this host."""
    mine = f".tables-{socket.gethostname()}-"
    for path in out.glob(f"{mine}*-*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
    return TemporaryDirectory(prefix=f"{mine}{os.getpid()}-", dir=out)


class TableBuilder:
    """One build of the tables of a run."""

    def __init__(
        self, run_dir: Path, info: RunInfo, work: Path, options: TableOptions, report: Report
    ) -> None:
        self.run_dir = run_dir
        self.out = options.out or run_dir
        self.info = info
        self.work = work
        self.options = options
        self.report = report
        self.notes: list[str] = []
        self.columns = {name: schema.stored_type(kind) for name, kind in info.answer_columns}

    def make(self, stale: list[str], now: dict[str, str]) -> None:
        """Make the stale tables and the database, with more memory at each attempt.

        Raises:
            duckdb.OutOfMemoryException: they need more memory than this machine has.
        """
        base = self.work
        with JournalReader(self.run_dir, self.report, save=True) as lines:
            group_bytes = lines.mean * min(VECTOR_LINES, lines.lines)
            steps = memory_steps(
                self.options.memory_mb, lines.longest, group_bytes, most_memory_mb()
            )
            limits = next(steps)
            for number in count():
                self.work = base / str(number)
                self.work.mkdir()
                self.notes.clear()
                try:
                    database = self._make(stale, lines, limits)
                    break
                except WiderColumns as wider_columns:
                    self.columns |= wider_columns.columns
                except duckdb.Error as error:
                    more = next(steps, None) if is_out_of_memory(error) else None
                    if more is None:
                        raise
                    limits = more
                shutil.rmtree(self.work)
        for note in self.notes:
            self.report(note)
        is_json = {
            table: schema.json_columns(table, self.columns.items()) for table in schema.TABLES
        }
        made = Freshness(now, database, self.notes, is_json)
        text = msgspec.json.format(msgspec.json.encode(made)) + b"\n"
        write_atomic(self.out / "tables.json", text)

    def _make(self, stale: list[str], lines: JournalReader, limits: MemoryLimits) -> str:
        """Make the tables within limits; return the name of the database."""
        with (
            closing(PartMaker(self.work, limits, self._sources())) as parts,
            closing(TableOutputs(self.work, limits, self.info, self._sources())) as tables,
        ):
            for table in schema.TABLES:
                if table not in stale and tables.database is not None:
                    tables.database.add(table, self.out / f"{table}.parquet")
            if "results" in stale:
                self._make_results(stale, lines, parts, tables)
            elif "answers" in stale:
                tables.add(parts.run([self._answers_job(self.out / "results.parquet")]))
            for table in stale:
                if table in _PLAIN:
                    tables.add(parts.run(self._plain_jobs(table)))
            database = None if tables.database is None else tables.database.finish()
            for table, path in tables.finished():
                path.replace(self.out / f"{table}.parquet")
            return "" if tables.database is None else self._publish(tables.database, database)

    def _sources(self) -> list[Path]:
        """Return the files outside of the work directory that DuckDB reads."""
        segments = [s.path for s in list_segments(self.run_dir / "journal")]
        return [*segments, *(self.out / f"{table}.parquet" for table in schema.TABLES)]

    def _plain_jobs(self, table: str) -> Iterator[TableJob]:
        """Yield a job for each segment, which is read up to its current end."""
        empty = self.work / "empty.jsonl"
        empty.touch()
        paths = [segment.path for segment in list_segments(self.run_dir / "journal", _PLAIN[table])]
        for number, path in enumerate(paths or [empty]):
            part = self.work / f"{table}-{number}.parquet"
            select = schema.json_select(table, path, object_bytes(longest_line(path)))
            yield TableJob((Copy(table, select, part),))

    def _answers_job(self, results: Path) -> TableJob:
        copy = self._answers_of(results, self.work / "answers-0.parquet")
        return TableJob((copy,), check=self._check_of(results))

    def _answers_of(self, results: Path, part: Path) -> Copy:
        source = f"read_parquet({file_source(results)})"
        return Copy("answers", schema.answers_select(self.columns.items(), source), part)

    def _check_of(self, results: Path) -> Callable[[duckdb.DuckDBPyConnection], None] | None:
        """Return a check for integers too wide for the columns of answers; None if not needed."""
        select = check_select(self.columns, f"read_parquet({file_source(results)})")

        def check(connection: duckdb.DuckDBPyConnection) -> None:
            row = connection.execute(select or "").fetchone()
            if row is not None and any(row):
                types = wider_types(self.columns, row)
                if types:
                    raise WiderColumns(types)

        return None if select is None else check

    def _result_jobs(self, chunks: Iterator[TableChunk], *, answers: bool) -> Iterator[TableJob]:
        for number, chunk in enumerate(chunks):
            part = self.work / f"results-{number}.parquet"
            select = schema.json_select("results", chunk.path, object_bytes(chunk.longest))
            copies = [Copy("results", select, part)]
            if answers:
                copies.append(self._answers_of(part, self.work / f"answers-{number}.parquet"))
            check = self._check_of(part) if answers else None
            yield TableJob(tuple(copies), chunk.path, check)

    def _make_results(
        self, stale: list[str], lines: JournalReader, parts: PartMaker, tables: TableOutputs
    ) -> None:
        """Make ``results``, ``answers`` from it, and the files of failed rows."""
        longest = parts.limits.line_bytes
        rows = self._input_rows()
        feed = RowFeed(lines, rows, keep_input=self.info.keep_input, longest=longest)
        names = ("failed.jsonl", "bad_lines.txt")
        with (self.work / names[0]).open("wb") as failed, (self.work / names[1]).open("wb") as bad:
            chunks = parts.chunks(feed.pieces(failed, bad))
            tables.add(parts.run(self._result_jobs(chunks, answers="answers" in stale)))
        if rows is not None:
            rows.close()
        broken = lines.broken + feed.line_count - tables.counts["results"]
        if broken:
            broken_lines = "1 broken line" if broken == 1 else f"{broken} broken lines"
            self.notes.append(f"left out: {broken_lines} of the journal")
        if feed.shortened:
            more = "" if len(feed.shortened) <= _NAMED else " ..."
            self.notes.append(
                f"{len(feed.shortened)} rows stand without their long texts, which do not fit into"
                f" {parts.limits.memory_mb} MB: {', '.join(feed.shortened[:_NAMED])}{more}"
            )
        if rows is None:
            return
        if rows.problem is not None:
            self.notes.append(
                f"the input could not be read again, so it is not in the tables: {rows.problem}"
            )
            return
        for name, lines_written in zip(names, (feed.failed, feed.bad), strict=True):
            if lines_written:
                (self.work / name).replace(self.out / name)
            else:
                (self.out / name).unlink(missing_ok=True)

    def _input_rows(self) -> InputFinder | None:
        """Return a finder of the input; None if there is none."""
        spool = self.work / "input-spool"
        if self.options.read_input is not None:
            return InputRows(self.options.read_input, spool)
        return find_input(RunDir(self.run_dir), self.info, spool, self.notes.append)

    def _publish(self, writer: DuckDBWriter, file: Path | None) -> str:
        """Move the database into place; return its name, empty if there is none.

        If another process has ``run.duckdb`` open for writing, the new one is put beside it.
        """
        if file is None:
            self.notes.append(
                "no run.duckdb: this machine cannot lock DuckDB files; read the .parquet files"
            )
            return ""
        target = self.out / "run.duckdb"
        beside = self.out / "run.new.duckdb"
        if target.exists() and not writer.on_scratch and self._stays_locked(target):
            self._place(file, beside, writer)
            self.notes.append(
                f"another program has {target} open for writing;"
                f" the new tables are in {beside.name}"
            )
            return beside.name
        try:
            self._place(file, target, writer)
        except OSError as error:
            self._place(file, beside, writer)
            self.notes.append(f"{target} cannot be replaced ({error.strerror}); see {beside.name}")
            return beside.name
        beside.unlink(missing_ok=True)
        return target.name

    def _place(self, file: Path, target: Path, writer: DuckDBWriter) -> None:
        if writer.on_scratch:
            copy_file(file, target)
        else:
            file.replace(target)

    def _stays_locked(self, target: Path) -> bool:
        for _ in range(LOCK_CHECKS):
            if not is_written_by_another(target):
                return False
            self.options.wait(LOCK_SECONDS)
        return is_written_by_another(target)


if __name__ == "__main__":
    sys.exit(main())
