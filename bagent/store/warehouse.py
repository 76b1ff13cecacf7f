"""The DuckDB side of the tables: loading lines in chunks, writing Parquet, a database file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from bagent.store import columns as sql

OBJECT_BYTES = 16 * 1024 * 1024
"""The longest line that DuckDB reads unless the journal holds a longer one."""

_CHUNK_BYTES = 16 * 1024 * 1024
_BUFFER_BYTES = 256 * 1024

_STORE = "ROW_GROUP_SIZE 30720"
"""A group of rows is in memory until it is packed: the usual 122,880 rows take 150 MB."""

_NOT_TRIED = "fsst,dictionary"
"""Packings of text that cost time to try and are part of another one, ``dict_fsst``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the child may use: memory in MB for DuckDB, and the longest line in bytes."""

    memory_mb: int = 150
    object_bytes: int = OBJECT_BYTES

    @property
    def memory(self) -> str:
        """DuckDB's setting; a line longer than usual needs buffers in proportion."""
        extra = max(0, self.object_bytes - OBJECT_BYTES) * 6
        return f"{self.memory_mb + extra // 1_000_000}MB"


class Warehouse:
    """One DuckDB connection, with a store for the tables that is a file where that can be locked.

    Args:
        work: a directory for temporary files; also for the store, if files there can be locked.
        limits: memory and line length.
    """

    def __init__(self, work: Path, limits: Limits) -> None:
        self.work = work
        self.limits = limits
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._con = connect(work, limits.memory)
        self._con.execute(f"SET disabled_compression_methods = {sql.literal(_NOT_TRIED)}")
        self.database = self._attach()

    def _attach(self) -> Path | None:
        """The store's file: in ``work``, else on the node's scratch; None: in memory.

        DuckDB locks its files, which some shared file systems cannot.
        """
        path = self.work / "tables.duckdb"
        with contextlib.suppress(duckdb.IOException):
            self._con.execute(f"ATTACH {sql.literal(str(path))} AS store ({_STORE})")
            return path
        self._scratch = tempfile.TemporaryDirectory(prefix="bagent-")
        path = Path(self._scratch.name) / "tables.duckdb"
        with contextlib.suppress(duckdb.IOException):
            self._con.execute(f"ATTACH {sql.literal(str(path))} AS store ({_STORE})")
            return path
        self._con.execute("ATTACH ':memory:' AS store")
        return None

    @property
    def on_scratch(self) -> bool:
        """Whether the file had to go to the scratch directory."""
        return self._scratch is not None and self.database is not None

    def load(
        self,
        table: str,
        columns: dict[str, str],
        defaults: dict[str, str],
        lines: Iterator[bytes],
    ) -> int:
        """Make a table of JSON lines (with newlines); the number of its rows.

        Three steps go on at once: a thread writes a chunk of lines, a second parses the one
        before, and this one packs the one before that into the store.
        """
        target = f"store.{sql.quoted(table)}"
        self._con.execute(f"CREATE TABLE {target} ({sql.declared(columns)})")
        self._con.execute("BEGIN")
        select = (
            f"SELECT {sql.selected(columns, defaults)} FROM {{source}}"
            f" WHERE {sql.quoted(sql.REQUIRED[table])} IS NOT NULL"
        )
        with contextlib.closing(self._parsed(lines, columns, select)) as parsed:
            for chunk in parsed:
                self._con.execute(f"INSERT INTO {target} FROM {chunk}.lines")
        self._con.execute("COMMIT")
        return self.count(table)

    def _parsed(
        self, lines: Iterator[bytes], columns: dict[str, str], select: str
    ) -> Generator[str, None, None]:
        """Databases in memory with a table ``lines`` each, dropped after use.

        Each is a database of its own, because a transaction that has begun sees no later table
        of a database that it knows.
        """
        cursor = self._con.cursor()

        def parse(number: int, path: Path) -> str:
            name = f"chunk{number}"
            source = sql.read_json(str(path), columns, self.limits.object_bytes)
            cursor.execute(f"ATTACH ':memory:' AS {name}")
            cursor.execute(f"CREATE TABLE {name}.lines AS {select.format(source=source)}")
            return name

        with contextlib.closing(cursor), ThreadPoolExecutor(1, "parse") as pool:
            ahead: Future[str] | None = None
            for number, path in enumerate(_chunk_files(lines, self.work)):
                coming = pool.submit(parse, number, path)
                if ahead is not None:
                    yield from self._used(ahead.result())
                ahead = coming
                wait([coming])
            if ahead is not None:
                yield from self._used(ahead.result())

    def _used(self, name: str) -> Iterator[str]:
        yield name
        self._con.execute(f"DETACH {name}")

    def load_parquet(self, table: str, path: Path) -> None:
        """Make a table of a Parquet file."""
        self._con.execute(
            f"CREATE TABLE store.{sql.quoted(table)} AS FROM read_parquet({sql.literal(str(path))})"
        )

    def make_answers(self, columns: list[tuple[str | None, str]]) -> None:
        """Make ``answers`` from ``results``."""
        select = sql.answers_select(columns, "store.results")
        self._con.execute(f"CREATE TABLE store.answers AS {select}")

    def write_parquet(self, table: str, path: Path) -> None:
        """Write a table as Parquet; through a pipe where DuckDB cannot lock the file."""
        try:
            self._copy(table, str(path), "")
        except duckdb.IOException as error:
            if "lock" not in str(error).lower():
                raise
            reading, writing = os.pipe()
            with ThreadPoolExecutor(1, "parquet") as pool:
                copied = pool.submit(_drain, reading, path)
                try:
                    self._copy(table, f"/dev/fd/{writing}", ", USE_TMP_FILE false")
                finally:
                    os.close(writing)
                copied.result()

    def _copy(self, table: str, target: str, more: str) -> None:
        self._con.execute(
            f"COPY store.{sql.quoted(table)} TO {sql.literal(target)} (FORMAT parquet,"
            f" COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 5000{more})"
        )

    def count(self, table: str) -> int:
        """How many rows a table has."""
        row: Any = self._con.execute(f"SELECT count(*) FROM store.{sql.quoted(table)}").fetchone()
        return int(row[0])

    def finish(self) -> Path | None:
        """Close the store; its file, None where it was in memory."""
        self._con.execute("DETACH store")
        return self.database

    def close(self) -> None:
        """Close everything and remove the scratch directory."""
        self._con.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def _chunk_files(lines: Iterator[bytes], work: Path) -> Iterator[Path]:
    """Files of some 16 MB with these lines; each is written over after use.

    A thread writes the next one while the caller reads the one before. Each has a new name: what
    a reader may have kept of an old one under the same name would be wrong.
    """
    with ThreadPoolExecutor(1, "chunks") as pool:
        spare: Path | None = None
        number, more = 0, True
        ahead = pool.submit(_write_chunk, lines, work / "chunk-0.jsonl", spare)
        while more:
            path, more = ahead.result()
            if more:
                number += 1
                ahead = pool.submit(_write_chunk, lines, work / f"chunk-{number}.jsonl", spare)
            yield path
            spare = path
        path.unlink()


def _write_chunk(lines: Iterator[bytes], path: Path, spare: Path | None) -> tuple[Path, bool]:
    """Write lines until the file is full; the file, and whether lines are left.

    The pages of a spare file are used again: new ones cost as much as parsing what they hold.
    """
    if spare is not None:
        spare.rename(path)
    size = 0
    with path.open("wb" if spare is None else "r+b", buffering=_BUFFER_BYTES) as handle:
        for line in lines:
            handle.write(line)
            size += len(line)
            if size >= _CHUNK_BYTES:
                break
        handle.truncate()
    return path, size >= _CHUNK_BYTES


def _drain(descriptor: int, path: Path) -> None:
    """Copy what comes through a pipe into a file; reads on to the end also if that fails."""
    with os.fdopen(descriptor, "rb") as source:
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(source, target)
        finally:
            while source.read(1 << 20):
                pass


def connect(work: Path, memory: str) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection in memory: one thread, a memory limit, nothing fetched or kept at home.

    Args:
        work: where it may spill.
        memory: limit in DuckDB's words, e.g. ``150MB``.
    """
    return duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "memory_limit": memory,
            "temp_directory": str(work / "spill"),
            "preserve_insertion_order": True,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )


def is_written_by_another(path: Path) -> bool:
    """Whether another process has a DuckDB file open for writing."""
    if Path(f"{path}.wal").exists():
        return True
    try:
        duckdb.connect(str(path), read_only=True).close()
    except duckdb.IOException as error:
        return "lock" in str(error).lower()
    except duckdb.Error:
        return False
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy a file so that ``target`` appears whole or not at all."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
