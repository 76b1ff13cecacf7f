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
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bagent.duck import Access, Setting, connect, literal, private_folder

OBJECT_BYTES = 16 * 1024 * 1024
"""The longest line that DuckDB reads unless the journal holds a longer one."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Size in bytes from which a file of lines becomes a part."""

_PACKED = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 10240"
"""A group of rows is in memory until it is packed: the usual 122,880 rows take 150 MB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the child may use: memory in MB for each DuckDB, and the longest line in bytes."""

    memory_mb: int = 150
    object_bytes: int = OBJECT_BYTES

    @property
    def settings(self) -> dict[str, Setting]:
        """DuckDB's settings; a line longer than usual needs buffers in proportion."""
        extra = max(0, self.object_bytes - OBJECT_BYTES) * 6
        memory = f"{self.memory_mb + extra // 1_000_000}MB"
        return {"threads": 1, "memory_limit": memory, "preserve_insertion_order": True}

    @property
    def threads(self) -> int:
        """How many parts are made at a time: two, where there are two cores and usual lines."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        return 1 if self.object_bytes > OBJECT_BYTES else min(2, cores)


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of one table: its SELECT and the Parquet file to be made."""

    table: str
    select: str
    part: Path


@dataclass(frozen=True, slots=True)
class Job:
    """Parts that are made one after the other: a later one may read what an earlier one made.

    ``source`` is a file of lines that is written over afterwards, None where there is none.
    """

    copies: tuple[Copy, ...]
    source: Path | None = None


class PartMaker:
    """A pool of threads that make parts.

    Args:
        work: a directory for temporary files.
        limits: memory and line length.
        sources: files elsewhere that parts are made of.
    """

    def __init__(self, work: Path, limits: Limits, sources: Sequence[Path] = ()) -> None:
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

    def made(self, jobs: Iterable[Job]) -> Generator[Job]:
        """The jobs in their order, each when its files are there; a few are done ahead."""
        ahead: deque[tuple[Job, Future[None]]] = deque()
        for job in jobs:
            ahead.append((job, self._pool.submit(self._make, job)))
            if len(ahead) > self.limits.threads:
                yield self._finished(*ahead.popleft())
        while ahead:
            yield self._finished(*ahead.popleft())

    def _finished(self, job: Job, future: Future[None]) -> Job:
        future.result()
        if job.source is not None:
            self._spare.append(job.source)
        return job

    def _make(self, job: Job) -> None:
        con = self._idle.get()
        try:
            for copy in job.copies:
                write_parquet(con, copy.select, copy.part)
        finally:
            self._idle.put(con)

    def chunks(self, pieces: Iterable[Sequence[bytes | memoryview]]) -> Iterator[Path]:
        """Files of some 64 MB with these lines, some hundred at a time; at least one.

        The pages of a file that was used are used again: new ones cost as much as parsing what
        they hold. Each has a new name: what a reader may have kept of an old one under the same
        name would be wrong.
        """
        left = iter(pieces)
        more = True
        while more:
            path = self.work / f"chunk-{self._chunks}.jsonl"
            self._chunks += 1
            mode = "wb"
            if self._spare:
                self._spare.pop().rename(path)
                mode = "r+b"
            size, more = 0, False
            with path.open(mode, buffering=0) as handle:
                for piece in left:
                    size += _write_all(handle.fileno(), piece)
                    if size >= CHUNK_BYTES:
                        more = True
                        break
                handle.truncate(size)
            yield path

    def close(self) -> None:
        """Stop, and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()


def _write_all(descriptor: int, lines: Sequence[bytes | memoryview]) -> int:
    """Write some hundred lines where the file stands, without putting them together first."""
    size = sum(map(len, lines))
    written = os.writev(descriptor, lines)
    if written < size:
        rest = b"".join(lines)
        while written < size:
            written += os.write(descriptor, rest[written:])
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
