"""Rows from a pipe, delivered as they arrive and kept in a file for a resume."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from bagent.errors import InputError, Position, WriteError
from bagent.rows.formats.chunks import CancelToken
from bagent.rows.formats.compression import HALF_MARKS, ByteStream, without_mark
from bagent.rows.formats.json import (
    ROWS,
    Chunk,
    ElementSplitter,
    LineSplitter,
    chunk_of,
    line_chunks,
)
from bagent.rows.row_keys import Occurrences, derive
from bagent.types import PROGRAM_ROWS

_BLOCK = 1 << 16  # what a pipe holds on Linux

MOST_HELD = 1000
"""Changes of a spool, each of a block at most, that are held back in memory."""

STDIN = "stdin"

WAITING = Chunk(STDIN, (), [])
"""Says that the next chunk may be long in coming."""

Bases = Callable[[Chunk], tuple[int, ...]]
"""Gives the base keys of a chunk's items: :meth:`bagent.rows.row_keys.RowKeyer.bases`."""


class StdinSpool:
    """The file that keeps the rows from stdin, one a line, blank lines included.

    So the line of a row in the spool is its line on stdin, as long as one pipe filled it. A last
    line that was not written to its end belongs to a row that was never delivered, and is dropped.

    Args:
        path: the file; it is made when the first row comes.
        name: the source of its rows.
        hold: change the file only once :meth:`release` was called.
    """

    def __init__(self, path: Path, name: str = STDIN, *, hold: bool = False) -> None:
        self._path = path
        self._name = name
        self._held: list[Callable[[], None]] | None = [] if hold else None
        self._file: int | None = None
        self._size = 0
        self.lines = 0
        """Lines in the file, known once :meth:`replay` was read to its end."""

    @property
    def empty(self) -> bool:
        """Whether no row was kept yet."""
        return not self._path.exists() or self._path.stat().st_size == 0

    def replay(self) -> Iterator[Chunk]:
        """Yield the rows kept so far."""
        self.lines = self._size = 0
        if not self._path.exists():
            return
        stream = ByteStream(self._path)
        try:
            yield from line_chunks(self._name, self._whole_lines(stream))
        finally:
            stream.close()

    def append(self, raws: list[bytes]) -> None:
        """Write lines behind those read by :meth:`replay`, or over others.

        Lines that the file holds there already stay, with all that follow. They survive the end of
        this process at once; a crash of the machine only after :meth:`close`.

        Raises:
            WriteError: the disk is full, or the file cannot be written.
        """
        if raws:
            self._do(partial(self._append, raws))

    def _append(self, raws: list[bytes]) -> None:
        data = memoryview(b"\n".join(raws) + b"\n")
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            longer = os.fstat(self._file).st_size > self._size
            if not longer or os.pread(self._file, len(data), self._size) != data:
                if longer:
                    os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
                remaining = data
                while remaining:
                    remaining = remaining[os.write(self._file, remaining) :]
        except OSError as error:
            raise self._write_error(error) from error
        self._size += len(data)
        self.lines += len(raws)

    def cut(self) -> None:
        """Remove the lines behind those read or written so far.

        Raises:
            WriteError: the file cannot be written.
        """
        self._do(self._cut)

    def _cut(self) -> None:
        try:
            if not self.empty:
                os.truncate(self._path, self._size)
        except OSError as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Bring the lines to the disk.

        Raises:
            WriteError: that failed.
        """
        self._do(self._close)

    def release(self) -> None:
        """Make the changes that were held back, and all others at once from now on.

        Raises:
            WriteError: the file cannot be written.
        """
        held, self._held = self._held, None
        for change in held or ():
            change()

    def _do(self, change: Callable[[], None]) -> None:
        if self._held is None:
            change()
        else:
            self._held.append(change)
            if len(self._held) > MOST_HELD:  # `where` keeps none of the first rows
                self.release()

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._write_error(error) from error
        finally:
            os.close(self._file)
            self._file = None

    def _whole_lines(self, stream: ByteStream) -> Iterator[list[bytes]]:
        splitter = LineSplitter(self._path)
        for block in stream.blocks():
            raws = splitter.feed(block)
            self.lines += len(raws)
            self._size += sum(map(len, raws)) + len(raws)
            yield raws

    def _write_error(self, error: OSError) -> WriteError:
        return WriteError(
            f"cannot keep the rows from {self._name}: {(error.strerror or str(error)).lower()}",
            hint="free space, then give the same command with the same rows",
            at=Position(self._path),
        )


class StdinReader:
    """Rows from stdin, those of an earlier run first.

    A row that came from the spool is not taken again from stdin: each counts how often it holds
    a row, and the larger number stands. So the same rows can be piped in again, or more of them.

    Args:
        spool: keeps the rows; None: they are not kept.
        stdin: the pipe; None: only the spool is read. A stream with a descriptor is read through
            it, so nothing may have been read into the stream's own buffer.
        cancel: ends the reading, also while it waits.
        replace: the pipe brings the whole input, which replaces the rows of an earlier run.
    """

    def __init__(
        self,
        spool: StdinSpool | None,
        stdin: BinaryIO | None,
        cancel: CancelToken,
        *,
        replace: bool = False,
    ) -> None:
        self._spool = spool
        self._stdin = stdin
        self._cancel = cancel
        self._replaces = replace and stdin is not None
        self._name = PROGRAM_ROWS if replace else STDIN
        self.ended_empty = False
        """Whether the pipe was read to its end and had no row."""

    def chunks(self, bases: Bases) -> Iterator[Chunk]:
        """Chunks, with :data:`WAITING` before every read of the pipe.

        Raises:
            InputError: stdin is UTF-16 or an archive, or cannot be read.
            WriteError: the spool cannot be written.
        """
        spooled = Occurrences()
        if self._spool is not None and not self._replaces:
            for chunk in self._spool.replay():
                if self._stdin is not None and chunk.items:
                    spooled.count(bases(chunk))
                yield chunk
        if self._stdin is not None:
            yield from self._read_pipe(self._stdin, spooled, bases)

    def _read_pipe(self, stdin: BinaryIO, spooled: Occurrences, bases: Bases) -> Iterator[Chunk]:
        spool, splitter, arrived = self._spool, _RecordSplitter(self._name), Occurrences()
        resumed = spool is not None and spool.lines > 0
        line = spool.lines + 1 if spool else 1
        pipe, received = _PipeReader(stdin, self._cancel), False
        try:
            block = b"-"
            while block:
                yield WAITING
                block = pipe.read()
                if self._cancel.is_set:  # cancelled: half a line is no row
                    return
                raws = splitter.feed(block) if block else splitter.finish()
                received = received or any(map(bytes.strip, raws))
                for start in range(0, len(raws), ROWS):
                    chunk = chunk_of(self._name, raws[start : start + ROWS], line)
                    written = raws[start : start + ROWS]
                    if resumed:
                        chunk = _unseen(chunk, line, spooled, arrived, bases)
                        written = chunk.raws or []
                    if spool is not None:
                        spool.append(written)
                    line += len(written)
                    yield chunk
            self.ended_empty = not received
            if spool is not None and self._replaces:
                spool.cut()
        finally:
            pipe.close()
            if spool is not None:
                spool.close()


def _unseen(
    chunk: Chunk, line: int, spooled: Occurrences, arrived: Occurrences, bases: Bases
) -> Chunk:
    """Return the items of a chunk that the spool does not hold yet, on lines from ``line`` on."""
    keys = bases(chunk)
    pairs = zip(keys, arrived.count(keys), strict=True)
    new = [at for at, (base, k) in enumerate(pairs) if derive(base, k) not in spooled.keys]
    raws = chunk.raws or []
    return Chunk(
        chunk.source,
        range(line, line + len(new)),
        [chunk.items[at] for at in new],
        [raws[at] for at in new],
    )


class _RecordSplitter:
    """Splits a stream into lines, or into the elements of an array."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""
        self._splitter: LineSplitter | ElementSplitter | None = None

    def feed(self, block: bytes) -> list[bytes]:
        if self._splitter is None:
            block = self._head = self._head + block
            if not self._decide(block):
                return []
            block = without_mark(block, self._name)
        return self._split(block)

    def finish(self) -> list[bytes]:
        if self._splitter is None:
            self._splitter = LineSplitter(self._name)
            return self._split(without_mark(self._head, self._name)) + self.finish()
        if isinstance(self._splitter, LineSplitter):
            return self._splitter.finish()
        elements = [_one_line(raw) for _, raw in self._splitter.finish()]
        # The bracket makes it unreadable, now and from the spool, even where the last element
        # itself is whole: an array without its end is cut off.
        return [b"[" + b"".join(elements)] if self._splitter.cut_off else elements

    def _decide(self, head: bytes) -> bool:
        """Choose a splitter; return False where more bytes are needed."""
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if head in HALF_MARKS or not text:
            return False
        inner = text[1:].lstrip()
        if text.startswith(b"[") and not inner:
            return False
        array = text.startswith(b"[") and inner.startswith((b"{", b"]"))
        self._splitter = (
            ElementSplitter(self._name, array=True) if array else LineSplitter(self._name)
        )
        return True

    def _split(self, block: bytes) -> list[bytes]:
        if isinstance(self._splitter, ElementSplitter):
            return [_one_line(raw) for _, raw in self._splitter.feed(block)]
        return self._splitter.feed(block) if self._splitter else []


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def _one_line(raw: bytes) -> bytes:
    """Return an element without line ends: JSON has them between tokens only.

    Inside a string they become vertical tabs, which are as invalid there.
    """
    if b"\n" in raw or b"\r" in raw:
        raw = _STRING.sub(lambda match: match[0].translate(_INVALID), raw).translate(_BLANK)
    return raw or b","


_INVALID, _BLANK = bytes.maketrans(b"\r\n", b"\v\v"), bytes.maketrans(b"\r\n", b"  ")


class _PipeReader:
    """A pipe whose reads can be cancelled."""

    def __init__(self, stdin: BinaryIO, cancel: CancelToken) -> None:
        self._read: Callable[[int], bytes] = getattr(stdin, "read1", stdin.read)
        self._cancel = cancel
        self._descriptor: int | None = None
        try:
            self._descriptor = stdin.fileno()
        except OSError:  # a stream in memory, which never waits
            return
        self._woken, self._waker = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        cancel.add(self._wake)

    def read(self) -> bytes:
        """Return some bytes; none at the end, or when halted."""
        try:
            if self._descriptor is None:
                return self._read(_BLOCK)
            while not self._cancel.is_set:
                if any(ready == self._descriptor for ready, _ in self._poll.poll()):
                    return os.read(self._descriptor, _BLOCK)
        except OSError as error:
            raise InputError(f"stdin cannot be read: {error.strerror or error}") from error
        return b""

    def close(self) -> None:
        if self._descriptor is not None:
            self._cancel.remove(self._wake)
            os.close(self._woken)
            os.close(self._waker)

    def _wake(self) -> None:
        os.write(self._waker, b"!")
