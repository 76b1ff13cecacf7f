"""Pieces of the input whose rows an earlier start has read.

While rows are read, each piece of whole lines is recorded in a file: its offset, the SHA-256 of
its bytes, and the keys of its rows. A later start reads the bytes of a piece; where they are equal
and all rows are finished, it skips them without decoding. Pieces are recorded from the start of
the input and only while ids ascend, so that no row in them repeats another. From the first
difference on the records are cut off and made again.

Processes that share one input follow the records of another process that reads all of it, and
decode only their own rows.

The file is a magic line, 32 bytes that identify how keys are made, then one record a piece: length
and CRC-32 of 4 bytes each, and a MessagePack object. It is a cache: torn or missing records are
read again from the input.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from operator import lt
from pathlib import Path
from typing import Any

import msgspec

from bagent.rows.discovery import RowsConfig
from bagent.types import Json

MAGIC = b"bagent-pieces-1\n"
_LARGEST = 1 << 28  # bytes of one record; more is damage

Finished = Callable[[Sequence[int]], bool]
"""Whether the rows of all these keys are finished."""


class InputPiece(msgspec.Struct, frozen=True, array_like=True):
    """Whole lines of one file, of which each row is sound and no id comes twice.

    ``offset`` and ``size`` are bytes; ``lines`` counts line feeds; ``last_line`` is the physical
    line of the last row; ``first`` and ``last`` are the ids of the first and the last row;
    ``keys`` are the row keys, 8 bytes each, big-endian.
    """

    source: str
    offset: int
    size: int
    digest: bytes
    lines: int
    last_line: int
    first: int | str
    last: int | str
    keys: bytes

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.keys) // 8

    def key_list(self) -> array[int]:
        """Return the row keys."""
        keys = array("Q", self.keys)
        if sys.byteorder == "little":
            keys.byteswap()
        return keys

    def is_of(self, data: bytes) -> bool:
        """Return whether these are the bytes that the piece was made of."""
        return len(data) == self.size and digest_of(data) == self.digest


_decode = msgspec.msgpack.Decoder(InputPiece).decode
_encode = msgspec.msgpack.Encoder().encode


def digest_of(data: bytes) -> bytes:
    """Return the first 16 bytes of the SHA-256."""
    return sha256(data).digest()[:16]


def identity_of(config: RowsConfig) -> bytes:
    """32 bytes that are the same where the keys of the same bytes are."""
    parts = repr((config.id_field, config.fields))
    return sha256(parts.encode("utf-8", "surrogatepass")).digest()


class ResumeCache:
    """The pieces that an earlier start noted, and those that this one notes.

    Before :meth:`attach` pieces are held in memory, so no more than :meth:`RowSource.peek
    <bagent.rows.reader.RowReader.peek>` needs may be read; then they are in the file. Belongs to
    the thread that reads.
    """

    def __init__(self) -> None:
        self._pending: list[InputPiece] = []
        self._file: int | None = None
        self._finished: Finished | None = None
        self._next: InputPiece | None = None
        self._offset = self._next_offset = 0
        self._follows = False
        self._sources: set[str] = set()  # that were asked for, where it follows
        self.noting = True
        """Whether pieces are still noted; once it is False it stays so."""

    @property
    def attached(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def attach(self, path: Path, identity: bytes, finished: Finished | None) -> None:
        """Continue the cache in a file, or begin one; do without if it cannot be written.

        Args:
            path: the file.
            identity: as :func:`identity_of` makes it; notes with other keys are dropped.
            finished: whether rows need not be read; None: all are read.
        """
        start = MAGIC + identity
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.pread(self._file, len(start), 0) != start:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, start, 0)
        except OSError:
            self.stop()
            return
        self._offset = len(start)
        self._finished = finished
        self._load()
        pending, self._pending = self._pending, []
        for piece in pending:
            self.note(piece)

    def follow(self, path: Path, identity: bytes, finished: Finished | None) -> None:
        """Use the notes that another process makes meanwhile, and make none; without one if they
        are not there or of other keys.

        Args:
            path: the file.
            identity: as for :meth:`attach`.
            finished: likewise.
        """
        start = MAGIC + identity
        self._pending.clear()
        self._follows = True
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            header = os.pread(self._file, len(start), 0)
        except OSError:
            header = b""
        if header != start:
            self.stop()
            return
        self._offset = len(start)
        self._finished = finished

    def at(self, source: str, offset: int) -> InputPiece | None:
        """Return the recorded piece at this offset, if it is the next one."""
        if self._follows:
            self._catch_up(source, offset)
        piece = self._next
        if piece is None or piece.source != source or piece.offset != offset:
            return None
        return piece

    def is_finished(self, keys: Sequence[int]) -> bool:
        """Return whether all these rows are known to be finished."""
        return self._finished is not None and self._finished(keys)

    def note(self, piece: InputPiece) -> None:
        """Add the next piece of the input; a cache that differs is cut off before it."""
        if not self.noting or self._follows:
            return
        if self._file is None:
            self._pending.append(piece)
        elif piece == self._next:
            self._advance()
        else:
            self._append(piece)

    def stop(self) -> None:
        """Stop adding pieces; those in the file stay."""
        self.noting = False
        self._next = None
        self._pending.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _catch_up(self, source: str, offset: int) -> None:
        """Skip the records of earlier offsets; records may have been added meanwhile."""
        self._sources.add(source)
        while self._file is not None:
            if self._next is None:
                self._load()
            piece = self._next
            if piece is None or piece.source not in self._sources:
                return
            if piece.source == source and piece.offset >= offset:
                return
            self._offset, self._next = self._next_offset, None

    def _advance(self) -> None:
        self._offset = self._next_offset
        self._load()

    def _load(self) -> None:
        """Read the record at the current place."""
        assert self._file is not None
        self._next = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            head = os.pread(self._file, 8, self._offset)
            size = int.from_bytes(head[:4], "little")
            if len(head) == 8 and 0 < size <= _LARGEST:
                body = os.pread(self._file, size, self._offset + 8)
                if len(body) == size and zlib.crc32(body) == int.from_bytes(head[4:], "little"):
                    self._next = _decode(body)
                    self._next_offset = self._offset + 8 + size

    def _append(self, piece: InputPiece) -> None:
        assert self._file is not None
        body = _encode(piece)
        head = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
        try:
            # What stood here was of an input that has changed.
            os.ftruncate(self._file, self._offset)
            written = os.pwrite(self._file, head + body, self._offset)
        except OSError:
            written = -1
        if written != len(head) + len(body):
            self.stop()
            return
        self._offset += written
        self._next = None


StoredIds = Iterator[tuple[Sequence[int], list[bytes]]]
"""Keys and notes of rows, some at a time."""


class AscendingIds:
    """Holds rows back from a table of what came before, for as long as every id is above the last.

    Whole numbers ascend by value, text by length and then by character, so that ``r9`` stands
    before ``r10``. What is held takes 8 bytes a row and its note; nothing where rows can be read
    again.

    Args:
        note_size: bytes of the note beside each key.
    """

    def __init__(self, note_size: int) -> None:
        self._note_size = note_size
        self._kind: type | None = None
        self._last: Any = None
        self._ended = False
        self._pending: list[tuple[array[int], bytes] | Callable[[], StoredIds]] = []

    def add(self, ids: list[Json], keys: Sequence[int], notes: list[bytes]) -> bool:
        """Add rows if their ids ascend from the last one; else change nothing."""
        if self._ended:
            return False
        kinds = set(map(type, ids))
        order: list[Any] = ids
        if kinds == {str}:
            order = list(zip(map(len, ids), ids, strict=True))
        elif kinds != {int}:
            return False
        kind = type(ids[0])
        if not self._continues(kind, order[0]):
            return False
        if not all(map(lt, order, islice(order, 1, None))):
            return False
        self._kind, self._last = kind, order[-1]
        self._pending.append((array("Q", keys), b"".join(notes)))
        return True

    def skip(self, first: int | str, last: int | str, again: Callable[[], StoredIds]) -> bool:
        """Add rows that ascend from one id to another, if they continue the order.

        Args:
            first: the lowest id.
            last: the highest, of the same type.
            again: reads their keys and notes when they are needed.
        """
        kind = type(first)
        low: Any = first if isinstance(first, int) else (len(first), first)
        if self._ended or not self._continues(kind, low):
            return False
        self._kind = kind
        self._last = last if isinstance(last, int) else (len(last), last)
        self._pending.append(again)
        return True

    def replace_since(self, mark: int, again: Callable[[], StoredIds]) -> None:
        """Replace the rows added since :attr:`mark` was ``mark`` by a reader of them."""
        if not self._ended:
            self._pending[mark:] = [again]

    @property
    def mark(self) -> int:
        """How many times rows were taken in."""
        return len(self._pending)

    @property
    def ended(self) -> bool:
        """Whether the order was broken."""
        return self._ended

    def _continues(self, kind: type, first: Any) -> bool:
        return self._kind is None or (kind is self._kind and bool(self._last < first))

    def drain(self) -> StoredIds:
        """Yield the keys and notes of all rows added, once; nothing is added afterwards."""
        self._ended = True
        self._pending.reverse()
        size = self._note_size
        while self._pending:
            entry = self._pending.pop()
            if callable(entry):
                yield from entry()
                continue
            keys, flat = entry
            yield keys, [flat[at : at + size] for at in range(0, len(flat), size)]
