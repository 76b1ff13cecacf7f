"""Chunks of rows from a file or query of any format, and the reading progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from bagent.errors import InputError
from bagent.rows.discovery import FileSource, SqlSource, TableColumns
from bagent.rows.formats.compression import ByteStream, check_start, check_whole, text_blocks
from bagent.rows.formats.csv import CsvFile
from bagent.rows.formats.duckdb_source import Table
from bagent.rows.formats.json import (
    LONGEST,
    Chunk,
    Item,
    Unreadable,
    json_chunks,
    line_chunks,
    split_lines,
    too_long,
)
from bagent.rows.warnings import RowWarnings


def text_chunk(source: FileSource) -> Chunk:
    """Return the file as a chunk of one row; not UTF-8: a row that cannot be read.

    Raises:
        InputError: the file cannot be read, or is larger than a row may be.
    """
    stream = ByteStream(source.path, source.packing)
    try:
        raw = bytearray()
        for block in stream.blocks():
            raw += block
            if len(raw) > LONGEST:
                raise too_long(source.path, 1)
    finally:
        stream.close()
    return Chunk(source.name, [1], [_item(source, bytes(raw))])


def _item(source: FileSource, raw: bytes) -> Item:
    try:
        check_start(raw[:8], source.name)
        text = raw.decode().removeprefix("\ufeff")
    except InputError as error:
        return Unreadable(error.message, raw)
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start + 1}", raw)
    return {"path": source.name, "text": text}


CHECK_WHOLE = 64 << 20
"""Bytes of an archive up to which it is unpacked once before the run: a few seconds at most."""


class ReadProgress:
    """The number of bytes read. One thread writes, others may read.

    Args:
        total: bytes of all files; None where a source has no size.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.done = 0
        self._before = 0

    def at(self, position: int) -> None:
        """Set how far the file that is being read is."""
        self.done = self._before + position

    def finish(self, size: int) -> None:
        """The file is read to its end."""
        self._before += size
        self.done = self._before


class CancelToken:
    """Cancels a reader from another thread, and wakes it where it waits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._set = False
        self._wakers: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether to stop."""
        return self._set

    def set(self) -> None:
        """Stop for good."""
        with self._lock:
            self._set = True
            for wake in self._wakers:
                wake()

    def add(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when it is time to stop."""
        with self._lock:
            self._wakers.append(wake)

    def remove(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` no more; when this returns it is not being called either."""
        with self._lock:
            self._wakers.remove(wake)


def check_source(source: FileSource | SqlSource, base: Path) -> None:
    """Check that a source can be read.

    Raises:
        InputError: it cannot.
    """
    if isinstance(source, SqlSource) or source.format == "parquet":
        Table(source, base).close()
    elif source.format in ("csv", "tsv"):
        CsvFile(source, RowWarnings()).close()
    elif source.format != "text":
        stream = ByteStream(source.path, source.packing)
        try:
            check_start(stream.start(), source.path)
        finally:
            stream.close()
    if isinstance(source, FileSource) and source.packing and source.size <= CHECK_WHOLE:
        check_whole(source.path, source.packing)


def source_chunks(
    source: FileSource | SqlSource,
    base: Path,
    progress: ReadProgress,
    cancel: CancelToken,
    warnings: RowWarnings,
    columns: TableColumns | None = None,
) -> Iterator[Chunk]:
    """Yield the rows of one source.

    Args:
        source: a file or a query.
        base: folder that relative file names in SQL start from.
        progress: updated with the bytes of the file read so far.
        cancel: interrupts a query that runs.
        warnings: receives warnings about rows.
        columns: what to read of a table; None: all columns.

    Raises:
        InputError: the source cannot be read, or not to its end.
    """
    if isinstance(source, SqlSource) or source.format == "parquet":
        yield from _table_chunks(Table(source, base, columns), source, progress, cancel)
    elif source.format in ("csv", "tsv"):
        file = CsvFile(source, warnings)
        try:
            for chunk in file.chunks():
                progress.at(file.position())
                yield chunk
        finally:
            file.close()
    elif source.format == "text":
        yield text_chunk(source)
    else:
        yield from _json(source, progress)
    if isinstance(source, FileSource):
        progress.finish(source.size)


def _json(source: FileSource, progress: ReadProgress) -> Iterator[Chunk]:
    stream = ByteStream(source.path, source.packing)
    try:
        blocks = text_blocks(stream.blocks(), source.path)
        if source.format == "json":
            chunks = json_chunks(source.name, blocks, source.path)
        else:
            yield from _lines(source, blocks, stream, progress)
            return
        for chunk in chunks:
            progress.at(stream.position())
            yield chunk
    finally:
        stream.close()


def _lines(
    source: FileSource, blocks: Iterator[bytes], stream: ByteStream, progress: ReadProgress
) -> Iterator[Chunk]:
    """Yield the lines of a file as chunks; ``progress`` follows the lines, not the blocks."""
    line, start = 1, 0
    for lines in split_lines(blocks, source.path):
        end = stream.position()
        for chunk in line_chunks(source.name, [lines], line):
            last = chunk.lines[-1] if chunk.lines else line
            progress.at(start + (end - start) * (last + 1 - line) // max(1, len(lines)))
            yield chunk
        line, start = line + len(lines), end


def _table_chunks(
    table: Table, source: FileSource | SqlSource, progress: ReadProgress, cancel: CancelToken
) -> Iterator[Chunk]:
    cancel.add(table.interrupt)
    try:
        for chunk in table.chunks():
            if isinstance(source, FileSource) and table.rows:
                progress.at(source.size * table.read // table.rows)
            yield chunk
    finally:
        cancel.remove(table.interrupt)
        table.close()
