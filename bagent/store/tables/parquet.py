"""Parquet parts of a table, made on a few threads, each with a DuckDB of its own.

DuckDB's own threads took up to twice the CPU for the same work; connections that share nothing
do not.
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
from pathlib import Path
from typing import IO, NamedTuple

import duckdb

from bagent.duck import Access, Setting, connect, literal, private_folder

OBJECT_BYTES = 16 * 1024 * 1024
"""The longest line that DuckDB reads unless the journal holds a longer one."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Size in bytes from which a file of lines becomes a part."""

_TAIL_BYTES = 64 * 1024
VECTOR_LINES = 2048
VECTOR_BYTES = 8 * 1024 * 1024
_MEMORY_FACTOR = 12
"""DuckDB works on so many lines at a time, and takes so many times their bytes for it. A part ends
where they hold ``VECTOR_BYTES``."""

GROUP_ROWS = 30720
"""A group of rows is in memory until it is packed: the usual 122,880 rows take 150 MB."""

_SHORT_LINE = 1024 * 1024
"""Lines of so many bytes are never shortened."""

_PACKED = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 10240"
"""A group of rows is in memory until it is packed: the usual 122,880 rows take 150 MB."""


def memory_steps(
    least_mb: int, longest: int, group_bytes: int, most_mb: int
) -> Iterator[MemoryLimits]:
    """What to try, one after the other: more memory, and then shorter lines.

    Args:
        least_mb: enough for usual lines.
        longest: the longest line that is known of, in bytes.
        group_bytes: ``VECTOR_LINES`` lines in the mean, or all that there are.
        most_mb: what the machine allows.
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
    """Whether DuckDB failed for its memory limit; at a commit it says so in another error."""
    return isinstance(error, duckdb.OutOfMemoryException) or "memory_limit" in str(error)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What the child may use: memory in MB for each DuckDB, and the longest line in bytes that it
    gets; how many rows the database packs together, and how many parts are made at a time.
    """

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
    """A file of lines that becomes a part, and its longest line in bytes."""

    path: Path
    longest: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of one table: its SELECT and the Parquet file to be made."""

    table: str
    select: str
    part: Path


@dataclass(frozen=True, slots=True)
class TableJob:
    """Parts that are made one after the other: a later one may read what an earlier one made.

    ``source`` is a file of lines that is written over afterwards, None where there is none.
    ``check`` is called in the end with the connection, and may raise.
    """

    copies: tuple[Copy, ...]
    source: Path | None = None
    check: Callable[[duckdb.DuckDBPyConnection], None] | None = None


class PartMaker:
    """A pool of threads that make parts.

    Args:
        work: a directory for temporary files.
        limits: memory and line length.
        sources: files elsewhere that parts are made of.
    """

    def __init__(self, work: Path, limits: MemoryLimits, sources: Sequence[Path] = ()) -> None:
        self.work = work
        self.limits = limits
        self._idle: queue.SimpleQueue[duckdb.DuckDBPyConnection] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(limits.threads, "parts")
        for number in range(limits.threads):
            self._idle.put(
                connect(
                    Access(files=sources, folders=[work, private_folder()]),
                    spill=work / f"spill-{number}",
                    # Statistics would declare a column without nulls otherwise than the next part.
                    settings={
                        **limits.settings,
                        "disabled_optimizers": "statistics_propagation",
                    },
                )
            )
        self._spare: list[Path] = []
        self._chunks = 0

    def made(self, jobs: Iterable[TableJob]) -> Generator[TableJob]:
        """The jobs in their order, each when its files are there; a few are done ahead."""
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

    def _make(self, job: TableJob) -> None:
        con = self._idle.get()
        try:
            for copy in job.copies:
                write_parquet(con, copy.select, copy.part)
            if job.check is not None:
                job.check(con)
        finally:
            self._idle.put(con)

    def chunks(self, pieces: Iterable[Sequence[bytes | memoryview]]) -> Iterator[TableChunk]:
        """Files of some 64 MB with these lines, some hundred at a time; at least one.

        Long lines come in smaller files. The pages of a file that was used are used again: new
        ones cost as much as parsing what they hold. Each has a new name: what a reader may have
        kept of an old one under the same name would be wrong.
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
        """Stop, and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()


def _fill(handle: IO[bytes], pieces: Iterator[Sequence[bytes | memoryview]]) -> tuple[bool, int]:
    """Write lines up to the size of a part; whether there may be more, and the longest one."""
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
    """At least the longest line of a file in bytes, where that is longer than usual."""
    longest = start = 0
    with path.open("rb") as handle:
        size = handle.seek(0, os.SEEK_END)
        while size - start > OBJECT_BYTES:
            handle.seek(start + OBJECT_BYTES - _TAIL_BYTES)
            end = handle.read(_TAIL_BYTES).rfind(b"\n")
            if end >= 0:
                start += OBJECT_BYTES - _TAIL_BYTES + end + 1
                continue
            handle.seek(start)
            line = len(handle.readline())
            longest = max(longest, line)
            start += line
    return longest


def object_bytes(longest: int) -> int:
    """What DuckDB must be ready for to read a line of so many bytes."""
    return max(OBJECT_BYTES, longest + longest // 8)


def _write_all(descriptor: int, lines: Sequence[bytes | memoryview]) -> int:
    """Write some hundred lines where the file stands, without putting them together first."""
    size = sum(map(len, lines))
    written = os.writev(descriptor, lines)
    if written < size:
        data = b"".join(lines)
        while written < size:
            written += os.write(descriptor, data[written:])
    return size


def write_parquet(con: duckdb.DuckDBPyConnection, select: str, path: Path) -> None:
    """Write a selection as Parquet; through a pipe where DuckDB cannot lock the file."""
    try:
        _copy(con, select, str(path), "")
    except duckdb.IOException as error:
        if "lock" not in str(error).lower():
            raise
        pipe = private_folder() / f"{path.name}-{threading.get_ident()}"
        os.mkfifo(pipe, 0o600)
        with ThreadPoolExecutor(1, "parquet") as pool:
            # Opened for both, so that neither end waits for the other.
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
    """Copy what comes through a pipe into a file; reads on to the end also if that fails."""
    with os.fdopen(descriptor, "rb") as source:
        try:
            with path.open("wb") as target:
                shutil.copyfileobj(source, target)
        finally:
            while source.read(1 << 20):
                pass
