"""Output files of a build: Parquet files and a DuckDB file, filled part by part."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import duckdb

from bagent.duck import Access, connect, file_source, literal, private_folder, quoted
from bagent.store.run_dir import RunInfo
from bagent.store.tables.parquet import MemoryLimits, TableJob
from bagent.store.tables.parquet_concat import ParquetConcat, count_rows
from bagent.store.tables.schema import json_columns

_NOT_TRIED = "dictionary,chimp,patas"
"""Compressions that are slow to try and gain nothing over ``fsst`` and ``alp``."""

_STORAGE = "v1.0.0"
"""The format of the file. DuckDB 1.1 and later read it; 1.0 reads all but lists that are empty or
null in every row."""


class TableOutputs:
    """The tables of a build, to which parts are added in order.

    Args:
        work: a directory for temporary files.
        limits: memory limits of the database.
        info: which kinds of files are made.
        sources: files elsewhere that tables are copied from.
    """

    def __init__(
        self, work: Path, limits: MemoryLimits, info: RunInfo, sources: Sequence[Path] = ()
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.database = DuckDBWriter(work, limits, info, sources) if info.duckdb else None
        self._work = work
        self._parquet = info.parquet
        self._joins: dict[str, ParquetConcat] = {}

    def add(self, jobs: Iterable[TableJob]) -> None:
        """Add and remove the parts of finished jobs."""
        for job in jobs:
            for copy in job.copies:
                if self._parquet:
                    join = self._joins.get(copy.table)
                    if join is None:
                        path = self._work / f"{copy.table}.parquet"
                        join = self._joins[copy.table] = ParquetConcat(path)
                    self.counts[copy.table] += join.add(copy.part)
                else:
                    self.counts[copy.table] += count_rows(copy.part)
                if self.database is not None:
                    self.database.add(copy.table, copy.part)
                copy.part.unlink()

    def finished(self) -> Iterator[tuple[str, Path]]:
        """Finish the Parquet files; yield the tables' names and files."""
        for table, join in self._joins.items():
            join.finish()
            yield table, self._work / f"{table}.parquet"

    def close(self) -> None:
        """Close all files."""
        for join in self._joins.values():
            join.close()
        if self.database is not None:
            self.database.close()


class DuckDBWriter:
    """The DuckDB file of a build, if files can be locked.

    Args:
        work: a directory for temporary files, and for the file if files there can be locked.
        limits: memory limits.
        info: which columns are JSON.
        sources: files elsewhere that rows are copied from.
    """

    def __init__(
        self, work: Path, limits: MemoryLimits, info: RunInfo, sources: Sequence[Path]
    ) -> None:
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._con = connect(
            Access(files=sources, folders=[work, private_folder()]),
            spill=work / "spill-store",
            settings={**limits.settings, "disabled_compression_methods": _NOT_TRIED},
        )
        self._info = info
        options = f"STORAGE_VERSION '{_STORAGE}', ROW_GROUP_SIZE {limits.group_rows}"
        self.database = self._attach(work, options)
        self._tables: set[str] = set()
        self._con.execute("BEGIN")

    def _attach(self, work: Path, options: str) -> Path | None:
        """The file: in ``work``, else on the node's scratch, else None.

        DuckDB locks its files, which some shared file systems cannot.
        """
        path = work / "tables.duckdb"
        with contextlib.suppress(duckdb.IOException):
            self._con.execute(f"ATTACH {literal(str(path))} AS store ({options})")
            return path
        self._scratch = tempfile.TemporaryDirectory(dir=private_folder())
        path = Path(self._scratch.name) / "tables.duckdb"
        with contextlib.suppress(duckdb.IOException):
            self._con.execute(f"ATTACH {literal(str(path))} AS store ({options})")
            return path
        return None

    @property
    def on_scratch(self) -> bool:
        """Whether the file had to go to the scratch directory."""
        return self._scratch is not None and self.database is not None

    def add(self, table: str, part: Path) -> None:
        """Append the rows of a Parquet file to a table, which is created if needed."""
        if self.database is None:
            return
        target = f"store.{quoted(table)}"
        rows = f"FROM read_parquet({file_source(part)})"
        if table not in self._tables:
            described = self._con.execute(f"DESCRIBE {rows}").fetchall()
            is_json = frozenset(json_columns(table, self._info.answer_columns))
            columns = ", ".join(
                f"{quoted(name)} {'JSON' if name in is_json else kind}"
                for name, kind, *_ in described
            )
            self._con.execute(f"CREATE TABLE {target} ({columns})")
            self._tables.add(table)
        self._con.execute(f"INSERT INTO {target} {rows}")

    def finish(self) -> Path | None:
        """Commit and detach the file; return its path, None if there is none."""
        if self.database is not None:
            self._con.execute("COMMIT")
            self._con.execute("DETACH store")
        return self.database

    def close(self) -> None:
        """Close the connection and remove the scratch directory."""
        self._con.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def is_written_by_another(path: Path) -> bool:
    """Return whether another process has a DuckDB file open for writing, without reading it."""
    if Path(f"{path}.wal").exists():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
