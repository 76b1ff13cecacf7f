"""One making of the tables of a run: fill the warehouse, then put the files in place."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bagent.errors import BagentError
from bagent.store import columns as sql
from bagent.store.current import CurrentLines
from bagent.store.feed import Feed, InputRows
from bagent.store.freshness import Freshness
from bagent.store.rundir import RunInfo
from bagent.store.segments import Report, Stream, list_segments, whole_lines
from bagent.store.tables import Options, input_reader
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

LEFTOVER_SECONDS = 600.0
"""Unfinished tables of a process that is gone are removed when this old."""

_PLAIN: dict[str, tuple[Stream, dict[str, str]]] = {
    "attempts": ("attempts", sql.ATTEMPTS),
    "tool_calls": ("tools", sql.TOOL_CALLS),
    "endpoints": ("endpoints", sql.ENDPOINTS),
}


def work_directory(out: Path) -> TemporaryDirectory[str]:
    """A directory under ``out`` for unfinished tables, removed at its end.

    Those that killed processes of this host left behind are removed too.
    """
    mine = f".tables-{socket.gethostname()}-"
    for path in out.glob(f"{mine}*-*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
    return TemporaryDirectory(prefix=f"{mine}{os.getpid()}-", dir=out)


class Maker:
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
        rows = self._input_rows()
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

    def _input_rows(self) -> InputRows | None:
        """The input, where something needs it: a column of the table, or a list of failures."""
        try:
            read = self.options.read_input or input_reader(self.info)
        except (BagentError, TypeError, ValueError) as error:
            self.note(f"the input is not in the tables: {error}")
            return None
        return None if read is None else InputRows(read, self.work / "input-spool")

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


def _plain_lines(journal: Path, stream: Stream) -> Iterator[bytes]:
    """The whole lines of a stream, up to where it is now, each with its newline."""
    for segment in list_segments(journal, stream):
        with segment.path.open("rb") as handle:
            for _, line in whole_lines(handle, 0, segment.path.stat().st_size):
                yield line + b"\n"
