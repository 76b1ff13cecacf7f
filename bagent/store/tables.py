"""Makes the tables of a run from its journal, in a process of its own.

``python -m bagent.store.tables RUN_DIR [--only-stale] [--out DIR] [--memory MB]``

Each table is made under a temporary name and put in place by renaming, so that who reads the old
one, or holds a lock on it, neither stops this nor is stopped by it. The journal may still grow:
what is there at the start is read, up to the last whole line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import msgspec

from bagent.errors import BagentError, WriteError
from bagent.store import columns as sql
from bagent.store.current import CurrentLines
from bagent.store.feed import Feed, InputRows, ReadInput
from bagent.store.freshness import Freshness, signatures, stale_tables
from bagent.store.rundir import RunDir, RunInfo
from bagent.store.segments import Report, Stream, list_segments, whole_lines
from bagent.store.warehouse import (
    OBJECT_BYTES,
    Limits,
    Warehouse,
    copy_file,
    is_written_by_another,
)

LOCK_SECONDS = 0.5
"""Seconds between two looks at a ``run.duckdb`` that another process writes."""

LOCK_LOOKS = 4
"""So often is it looked at before the new tables go beside it."""

_PLAIN: dict[str, tuple[Stream, dict[str, str]]] = {
    "attempts": ("attempts", sql.ATTEMPTS),
    "tool_calls": ("tools", sql.TOOL_CALLS),
    "endpoints": ("endpoints", sql.ENDPOINTS),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to make the tables.

    ``out`` is where they go, None means the run directory. ``only_stale`` leaves alone what is
    up to date. ``read_input`` reads the input rows; None takes it from ``run.json``. ``wait``
    is called between two looks at a locked ``run.duckdb`` with seconds.
    """

    out: Path | None = None
    only_stale: bool = False
    memory_mb: int = 150
    read_input: ReadInput | None = None
    wait: Callable[[float], None] = time.sleep


def make_tables(run_dir: Path, options: Options, report: Report) -> list[str]:
    """Make the tables of a run; the names of those that were made anew.

    Args:
        run_dir: the run directory.
        options: how.
        report: told what people should know, one line each.

    Raises:
        WriteError: a table cannot be written.
        UsageError: ``run.json`` is damaged.
    """
    out = options.out or run_dir
    info = RunDir(run_dir).load() or RunInfo(run_dir.name)
    if options.out is not None:
        info.parquet, info.duckdb = True, False
    now = signatures(run_dir, info)
    stale = list(sql.TABLES)
    if options.only_stale:
        stale = stale_tables(out, now, parquet=info.parquet)
    if not stale:
        return []
    try:
        out.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        prefix = f".tables-{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=out) as work:
            _Maker(run_dir, info, Path(work), options, report).make(stale, now)
    except duckdb.OutOfMemoryException as error:
        raise WriteError(
            f"DuckDB needs more than {options.memory_mb} MB for the tables of {run_dir}",
            hint=f"python -m bagent.store.tables {run_dir} --memory {2 * options.memory_mb}",
        ) from error
    except (OSError, duckdb.Error) as error:
        raise WriteError(
            f"cannot make the tables of {run_dir}: {error}",
            hint="the journal is whole; make room, then: bagent query RUN",
        ) from error
    return stale


def _remove_leftovers(out: Path) -> None:
    """Remove the temporary files of processes of this host that were killed."""
    mine = f".tables-{socket.gethostname()}-"
    for path in out.glob(f"{mine}*-*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)


class _Maker:
    """One making of tables: what all its steps need."""

    def __init__(
        self, run_dir: Path, info: RunInfo, work: Path, options: Options, report: Report
    ) -> None:
        self.run_dir = run_dir
        self.out = options.out or run_dir
        self.info = info
        self.work = work
        self.options = options
        self.report = report
        self.notes: list[str] = []

    def note(self, words: str) -> None:
        """Tell people, now and in ``tables.json``."""
        self.notes.append(words)
        self.report(words)

    def make(self, stale: list[str], now: dict[str, str]) -> None:
        """Make the stale tables, and the database of all."""
        with CurrentLines(self.run_dir, self.report, save=True) as lines:
            longest = max(OBJECT_BYTES, lines.longest + lines.longest // 8)
            warehouse = Warehouse(self.work, Limits(self.options.memory_mb, longest))
            try:
                if "results" in stale:
                    self._make_results(warehouse, lines, longest)
                self._make_others(warehouse, stale)
                if self.info.parquet:
                    for table in stale:
                        warehouse.write_parquet(table, self.work / f"{table}.parquet")
                        (self.work / f"{table}.parquet").replace(self.out / f"{table}.parquet")
                database = self._publish_database(warehouse) if self.info.duckdb else ""
            finally:
                warehouse.close()
        made = Freshness(now, database, self.notes)
        marker = self.work / "tables.json"
        marker.write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
        marker.replace(self.out / "tables.json")

    def _make_others(self, warehouse: Warehouse, stale: list[str]) -> None:
        """Make the other stale tables; the database takes the fresh ones as they are."""
        for table in sql.TABLES:
            if table not in stale:
                needed = self.info.duckdb or (table == "results" and "answers" in stale)
                if needed:
                    warehouse.load_parquet(table, self.out / f"{table}.parquet")
            elif table == "answers":
                warehouse.make_answers(self.info.answer_columns)
            elif table in _PLAIN:
                stream, columns = _PLAIN[table]
                lines = _plain_lines(self.run_dir / "journal", stream)
                warehouse.load(table, columns, sql.PLAIN_DEFAULTS, lines)

    def _make_results(self, warehouse: Warehouse, lines: CurrentLines, longest: int) -> None:
        rows = self._input_rows(lines)
        feed = Feed(lines, rows, keep_input=self.info.keep_input, longest=longest)
        names = ("failed.jsonl", "bad_lines.txt")
        with (self.work / names[0]).open("wb") as failed, (self.work / names[1]).open("wb") as bad:
            warehouse.load("results", sql.RESULTS, sql.DEFAULTS, feed.lines(failed, bad))
        if rows is not None:
            rows.close()
        broken = lines.broken + feed.broken + feed.given - warehouse.count("results")
        if broken:
            self.note(f"{broken} broken lines of the journal were left out")
        if feed.too_long:
            self.note(f"{feed.too_long} rows stand without their input: it is too long for DuckDB")
        if rows is None:
            return
        if rows.problem is not None:
            self.note(
                f"the input could not be read again, so it is not in the tables: {rows.problem}"
            )
            return
        for name, count in zip(names, (feed.failed, feed.bad), strict=True):
            if count:
                (self.work / name).replace(self.out / name)
            else:
                (self.out / name).unlink(missing_ok=True)

    def _input_rows(self, lines: CurrentLines) -> InputRows | None:
        """The input, where something needs it: a column of the table, or a list of failures."""
        read = self.options.read_input
        if read is None:
            try:
                read = input_reader(self.info)
            except (BagentError, TypeError, ValueError) as error:
                self.note(f"the input is not in the tables: {error}")
        if read is None:
            return None
        return InputRows(read, self.work / "input-spool")

    def _publish_database(self, warehouse: Warehouse) -> str:
        """Put the database in place; the name it has there, empty where there is none.

        Who has ``run.duckdb`` open for writing keeps it: the new one goes beside it.
        """
        file = warehouse.finish()
        if file is None:
            self.note(
                "no run.duckdb: this machine cannot lock DuckDB files; read the .parquet files"
            )
            return ""
        target = self.out / "run.duckdb"
        beside = self.out / "run.new.duckdb"
        if target.exists() and not warehouse.on_scratch and self._stays_locked(target):
            self._place(file, beside, warehouse)
            self.note(
                f"another program has {target} open for writing;"
                f" the new tables are in {beside.name}"
            )
            return beside.name
        try:
            self._place(file, target, warehouse)
        except OSError as error:
            self._place(file, beside, warehouse)
            self.note(f"{target} cannot be replaced ({error.strerror}); see {beside.name}")
            return beside.name
        beside.unlink(missing_ok=True)
        return target.name

    def _place(self, file: Path, target: Path, warehouse: Warehouse) -> None:
        if warehouse.on_scratch:
            copy_file(file, target)
        else:
            file.replace(target)

    def _stays_locked(self, target: Path) -> bool:
        for _ in range(LOCK_LOOKS):
            if not is_written_by_another(target):
                return False
            self.options.wait(LOCK_SECONDS)
        return is_written_by_another(target)


def input_reader(info: RunInfo) -> ReadInput | None:
    """Reads the input that ``run.json`` names; None where it names none.

    All rows are read, whatever ``where``, a sample, a limit or a shard picked among them: an
    earlier start may have picked others, and each row has the same number and key in all.

    Raises:
        TypeError, ValueError: another version wrote the configuration.
    """
    if info.rows is None:
        return None
    from bagent.rows import RowsConfig, read_again

    text = info.rows if isinstance(info.rows, str) else msgspec.json.encode(info.rows)
    config = RowsConfig.from_json(text)
    whole = replace(config, where=None, sample=None, limit=None, shard=None)
    return lambda: read_again(whole)


def _plain_lines(journal: Path, stream: Stream) -> Iterator[bytes]:
    """The whole lines of a stream, up to where it is now, each with its newline."""
    for segment in list_segments(journal, stream):
        with segment.path.open("rb") as handle:
            for _, line in whole_lines(handle, 0, segment.path.stat().st_size):
                yield line + b"\n"


def main(argv: list[str] | None = None) -> int:
    """The command line of this module; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bagent.store.tables", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--only-stale", action="store_true", help="leave fresh tables alone")
    parser.add_argument("--out", type=Path, help="put the tables there, not in the run directory")
    parser.add_argument("--memory", type=int, default=150, help="DuckDB's limit in MB")
    asked = parser.parse_args(argv)
    options = Options(asked.out, asked.only_stale, asked.memory)

    def report(words: str) -> None:
        sys.stderr.write(f"bagent: {words}\n")

    try:
        make_tables(asked.run_dir, options, report)
    except BagentError as error:
        sys.stderr.write(f"bagent: error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
