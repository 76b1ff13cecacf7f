"""Parquet parts of a table, made on threads with separate DuckDB connections.

DuckDB's own threads used up to twice the CPU for the same work.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import duckdb

from bagent.duck import Access, Setting, connect, literal, private_folder

OBJECT_BYTES = 16 * 1024 * 1024
"""The default of the longest line that DuckDB reads."""

CHUNK_BYTES = 64 * 1024 * 1024
"""The size in bytes at which a file of lines becomes a part."""

_BLOCK_BYTES = 64 * 1024
VECTOR_LINES = 2048
VECTOR_BYTES = 8 * 1024 * 1024
_MEMORY_FACTOR = 12
"""DuckDB's memory for ``VECTOR_LINES`` lines, in multiples of their bytes. A part ends where so
many lines hold ``VECTOR_BYTES``."""

GROUP_ROWS = 30720
"""Rows per row group, which is in memory until written; the default 122,880 rows take 150 MB."""

_SHORT_LINE = 1024 * 1024
"""Lines up to this many bytes are never shortened."""

_PACKED = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 10240"


def memory_steps(
    least_mb: int, longest: int, group_bytes: int, most_mb: int
) -> Iterator[MemoryLimits]:
    """Yield limits to try in turn: more memory, then shorter lines.

    Args:
        least_mb: enough for usual lines.
        longest: the longest known line in bytes.
        group_bytes: the bytes of ``VECTOR_LINES`` mean lines, or of all lines.
        most_mb: the most that the machine allows.
    """
    group_rows = VECTOR_LINES if group_bytes > VECTOR_BYTES else GROUP_ROWS
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    most_mb = max(least_mb, most_mb)
    extra = max(0, longest - VECTOR_BYTES) * _MEMORY_FACTOR
    extra += max(0, group_bytes - VECTOR_BYTES) * 2
    memory = min(most_mb, least_mb + extra // 1_000_000)
    line_bytes = max(VECTOR_BYTES, most_mb * 1_000_000 // _MEMORY_FACTOR)
    usual = memory == least_mb
    while memory < most_mb:
        yield MemoryLimits(memory, line_bytes, group_rows, min(2, cores) if usual else 1)
        memory, usual = 2 * memory, False
    while line_bytes > _SHORT_LINE:
        yield MemoryLimits(most_mb, line_bytes, group_rows)
        line_bytes //= 4
    yield MemoryLimits(most_mb, _SHORT_LINE, group_rows)


def is_out_of_memory(error: duckdb.Error) -> bool:
    """Return whether DuckDB failed for its memory limit; a commit raises another error."""
    return isinstance(error, duckdb.OutOfMemoryException) or "memory_limit" in str(error)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits of a build: memory of each DuckDB, longest line, rows per group, parallel parts."""

    memory_mb: int
    line_bytes: int
    group_rows: int
    threads: int = 1

    @property
    def settings(self) -> dict[str, Setting]:
        """DuckDB's settings."""
        memory = f"{self.memory_mb}MB"
        return {"threads": 1, "memory_limit": memory, "preserve_insertion_order": True}


class TableChunk(NamedTuple):
    """A file of lines for a part, and its longest line in bytes."""

    path: Path
    longest: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of one table: its SELECT and its Parquet file."""

    table: str
    select: str
    part: Path


@dataclass(frozen=True, slots=True)
class TableJob:
    """Parts that are made in order; a later one may read an earlier one.

    ``source`` is a file of lines that is reused afterwards. ``check`` is called at the end with
    the connection, and may raise.
    """

    copies: tuple[Copy, ...]
    source: Path | None = None
    check: Callable[[duckdb.DuckDBPyConnection], None] | None = None


class PartMaker:
    """A pool of threads that make parts, each over a connection that opens when it is needed.

    Args:
        work: a directory for temporary files.
        limits: memory and line length.
        sources: files elsewhere that parts are made from.
    """

    def __init__(self, work: Path, limits: MemoryLimits, sources: Sequence[Path] = ()) -> None:
        self.work = work
        self.limits = limits
        self._sources = sources
        self._idle: queue.SimpleQueue[duckdb.DuckDBPyConnection] = queue.SimpleQueue()
        self._numbers = count()
        self._pool = ThreadPoolExecutor(limits.threads, "parts")
        self._spare: list[Path] = []
        self._chunks = 0

    def run(self, jobs: Iterable[TableJob]) -> Generator[TableJob]:
        """Yield the jobs in order as they finish; a few are made ahead."""
        ahead: deque[tuple[TableJob, Future[None]]] = deque()
        for job in jobs:
            ahead.append((job, self._pool.submit(self._make, job)))
            if len(ahead) > self.limits.threads:
                yield self._finished(*ahead.popleft())
        while ahead:
            yield self._finished(*ahead.popleft())

    def _finished(self, job: TableJob, future: Future[None]) -> TableJob:
        future.result()
        if job.source is not None:
            self._spare.append(job.source)
        return job

    def _connect(self) -> duckdb.DuckDBPyConnection:
        return connect(
            Access(files=self._sources, folders=[self.work, private_folder()]),
            spill=self.work / f"spill-{next(self._numbers)}",
            # With statistics, a column without nulls would differ from other parts.
            settings={**self.limits.settings, "disabled_optimizers": "statistics_propagation"},
        )

    def _make(self, job: TableJob) -> None:
        try:
            con = self._idle.get_nowait()
        except queue.Empty:
            con = self._connect()
        try:
            for copy in job.copies:
                write_parquet(con, copy.select, copy.part)
            if job.check is not None:
                job.check(con)
        finally:
            self._idle.put(con)

    def chunks(self, pieces: Iterable[Sequence[bytes | memoryview]]) -> Iterator[TableChunk]:
        """Yield at least one file of about 64 MB with the lines; smaller files for long lines.

        Used files are overwritten, since new pages cost as much as parsing, but renamed, since
        readers may cache a file by its name.
        """
        remaining = iter(pieces)
        more = True
        while more:
            path = self.work / f"chunk-{self._chunks}.jsonl"
            self._chunks += 1
            mode = "wb"
            if self._spare:
                self._spare.pop().rename(path)
                mode = "r+b"
            handle: IO[bytes] = path.open(mode, buffering=0)
            with handle:
                more, longest = _fill(handle, remaining)
            yield TableChunk(path, longest)

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()


def _fill(handle: IO[bytes], pieces: Iterator[Sequence[bytes | memoryview]]) -> tuple[bool, int]:
    """Write lines up to the size of a part; return whether there may be more, and the longest."""
    size = longest = lines_near = bytes_near = 0
    near: deque[tuple[int, int]] = deque()
    more = False
    for piece in pieces:
        written = _write_all(handle.fileno(), piece)
        size += written
        longest = max(longest, *map(len, piece))
        near.append((len(piece), written))
        lines_near += len(piece)
        bytes_near += written
        while lines_near - near[0][0] >= VECTOR_LINES:
            lines, count = near.popleft()
            lines_near -= lines
            bytes_near -= count
        if size >= CHUNK_BYTES or bytes_near >= VECTOR_BYTES:
            more = True
            break
    handle.truncate(size)
    return more, longest


def longest_line(path: Path) -> int:
    """Return the longest line of a file in bytes, 0 if none exceeds :data:`OBJECT_BYTES`."""
    longest = start = 0
    with path.open("rb") as handle:
        size = handle.seek(0, os.SEEK_END)
        while size - start > OBJECT_BYTES:
            next_start = _last_line_start(handle, start, start + OBJECT_BYTES)
            if next_start == start:
                handle.seek(start)
                line = len(handle.readline())
                longest = max(longest, line)
                next_start += line
            start = next_start
    return longest


def _last_line_start(handle: BinaryIO, start: int, end: int) -> int:
    """Return the offset after the last line feed between two offsets, or ``start``."""
    while end > start:
        begin = max(start, end - _BLOCK_BYTES)
        handle.seek(begin)
        line_feed = handle.read(end - begin).rfind(b"\n")
        if line_feed >= 0:
            return begin + line_feed + 1
        end = begin
    return start


def object_bytes(longest: int) -> int:
    """Return DuckDB's ``maximum_object_size`` for a line of so many bytes."""
    return max(OBJECT_BYTES, longest + longest // 8)


def _write_all(descriptor: int, lines: Sequence[bytes | memoryview]) -> int:
    """Write lines without joining them first; return their bytes."""
    size = sum(map(len, lines))
    written = os.writev(descriptor, lines)
    if written < size:
        data = b"".join(lines)
        while written < size:
            written += os.write(descriptor, data[written:])
    return size


def write_parquet(con: duckdb.DuckDBPyConnection, select: str, path: Path) -> None:
    """Write a selection as Parquet; through a pipe if DuckDB cannot lock the file."""
    try:
        _copy(con, select, str(path), "")
    except duckdb.IOException as error:
        if "lock" not in str(error).lower():
            raise
        pipe = private_folder() / f"{path.name}-{threading.get_ident()}"
        os.mkfifo(pipe, 0o600)
        with ThreadPoolExecutor(1, "parquet") as pool:
            # Opened for reading too, so that opening does not block.
            writing = os.open(pipe, os.O_RDWR)
            copied = pool.submit(_drain, os.open(pipe, os.O_RDONLY), path)
            try:
                _copy(con, select, str(pipe), ", USE_TMP_FILE false")
            finally:
                os.close(writing)
                pipe.unlink()
            copied.result()


def _copy(con: duckdb.DuckDBPyConnection, select: str, target: str, more: str) -> None:
    con.execute(f"COPY ({select}) TO {literal(target)} ({_PACKED}{more})")


def _drain(descriptor: int, path: Path) -> None:
    """Copy a pipe into a file; drain it even if writing fails."""
    with os.fdopen(descriptor, "rb") as source:
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(source, target)
        finally:
            while source.read(1 << 20):
                pass
