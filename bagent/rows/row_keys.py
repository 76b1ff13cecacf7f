"""Numbers, ids and keys of rows in the order of the input, and the set that holds the keys."""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import compress, repeat
from operator import itemgetter
from struct import pack, unpack
from typing import Any

import msgspec

from bagent.rows.formats.json import TOO_DEEP, Chunk, Item, Unreadable, is_batch_row
from bagent.rows.resume_cache import AscendingIds, InputPiece, StoredIds
from bagent.rows.warnings import RowWarnings
from bagent.text.unicode import clean_json, clean_text
from bagent.types import Json, Row, row_location

_FIRST_BITS = 8
"""The table starts with 256 buckets, so the low 8 bits of a key are known from its bucket and
only the upper 7 bytes are stored."""

_STORED = 7

_FILL = 24
"""Mean number of keys in a bucket. More makes ``find`` slower, fewer makes the cost of the
bucket itself (33 bytes of header, 8 of list slot) show; with 24 both are small and a bucket with
7-byte notes stays below 512 bytes, where Python's own allocator wastes least."""

_SET = [bytes([byte >> bit & 1 for byte in range(256)]) for bit in range(8)]
"""For each bit of a byte, a table for ``bytes.translate``: 1 where the bit is set."""

_CLEAR = [table.translate(b"\1" + bytes(255)) for table in _SET]


class CompactHashSet:
    """Set of integers from 0 to 2**64 - 1 in about ten bytes each, with a note of fixed size.

    A Python set of integers takes 60 to 90 bytes a key; a job of ten million rows has to remember
    every one of them. Here the keys of a bucket follow one another in one ``bytes`` object,
    found with ``bytes.find``. The table grows by linear hashing (Litwin, VLDB 1980): one bucket is
    split at a time, so memory follows the number of keys and no insertion has to rebuild the table.

    Args:
        note_size: bytes of note kept beside each key; 0 for a plain set.

    The low bits of the keys must be spread evenly, as those of a hash are; counting numbers make
    long buckets. Not safe for two threads at once.
    """

    __slots__ = ("_buckets", "_low", "_room", "_split", "_stride", "_wide")

    def __init__(self, note_size: int = 0) -> None:
        self._stride = _STORED + note_size
        self._buckets = [b""] * (1 << _FIRST_BITS)
        # Buckets before _split are already split and use one bit more of the key.
        self._low = (1 << _FIRST_BITS) - 1
        self._wide = 2 * self._low + 1
        self._split = 0
        self._room = _FILL << _FIRST_BITS

    def add(self, key: int, note: bytes = b"") -> bool:
        """Add ``key`` with its note; return False and keep the first note if it is present."""
        return not self.add_all((key,), (note,))

    def add_all(self, keys: Sequence[int], notes: Sequence[bytes] | None = None) -> list[int]:
        """Put many keys in; the positions of those that were there before, in order.

        Args:
            keys: may hold the same key twice: the second counts as there before.
            notes: as many as keys, each of ``note_size`` bytes; None for a plain set.
        """
        old: list[int] = []
        buckets, stride, room = self._buckets, self._stride, self._room
        low, wide, split = self._low, self._wide, self._split
        # One pack and slices of it: to_bytes for each key costs three times as much.
        packed = struct.pack(f">{len(keys)}Q", *keys)
        for position, (key, note) in enumerate(zip(keys, notes or repeat(b""), strict=False)):
            number = key & low
            if number < split:
                number = key & wide
            stored = packed[8 * position : 8 * position + _STORED]
            bucket = buckets[number]
            offset = bucket.find(stored)
            if offset >= 0 and (offset % stride == 0 or self._find(bucket, stored) >= 0):
                old.append(position)
                continue
            buckets[number] = bucket + (stored + note)
            room -= 1
            if not room:
                self._grow()
                room, low, wide, split = _FILL, self._low, self._wide, self._split
        self._room = room
        return old

    def note(self, key: int) -> bytes | None:
        """Return the note of ``key``, or None if the key is not in the set."""
        number = key & self._low
        if number < self._split:
            number = key & self._wide
        bucket = self._buckets[number]
        offset = self._find(bucket, (key >> 8).to_bytes(_STORED, "big"))
        return None if offset < 0 else bucket[offset + _STORED : offset + self._stride]

    def __contains__(self, key: int) -> bool:
        return self.note(key) is not None

    def __len__(self) -> int:
        return sum(map(len, self._buckets)) // self._stride

    def _find(self, bucket: bytes, stored: bytes) -> int:
        """Return the offset of an entry; a match across two entries does not count."""
        offset = bucket.find(stored)
        while offset >= 0 and offset % self._stride:
            offset = bucket.find(stored, offset + 1)
        return offset

    def _grow(self) -> None:
        """Split the next bucket by one more bit of its keys."""
        buckets, stride = self._buckets, self._stride
        bit = self._low.bit_length() - _FIRST_BITS
        old = buckets[self._split]
        entries = struct.unpack(f"{stride}s" * (len(old) // stride), old)
        column = old[_STORED - 1 - (bit >> 3) :: stride]  # the byte that the bit is in
        clear, set_ = _CLEAR[bit & 7], _SET[bit & 7]
        buckets[self._split] = b"".join(compress(entries, column.translate(clear)))
        buckets.append(b"".join(compress(entries, column.translate(set_))))
        self._split += 1
        if self._split > self._low:
            self._split, self._low, self._wide = 0, self._wide, 2 * self._wide + 1


_SIMPLE = {str, int}
_NONE = {type(None)}

_encode = msgspec.json.Encoder(order="deterministic").encode


class BodyEncoder:
    """Makes the bodies of rows.

    Args:
        id_field: as in :class:`bagent.rows.discovery.RowsConfig`.
        fields: likewise.
    """

    def __init__(self, id_field: str | None, fields: tuple[str, ...] | None) -> None:
        self._id_fields = ("id", "custom_id") if id_field is None else (id_field,)
        self._fields = fields
        self._used = _getter(fields)
        self._content = _getter(fields or None)

    def encode(self, chunk: Chunk) -> tuple[list[Json], list[bytes]]:
        """Return the id (None: it has none) and the body of each item.

        An id that is a list or an object becomes its compact JSON text. An item whose nesting is
        too deep to write again becomes :class:`Unreadable` in the chunk; one that could be read but
        for columns that the job does not use becomes a row.
        """
        if not chunk.items:
            return [], []
        return self._encode_uniform(chunk.items) or self._encode_each(chunk)

    def _encode_uniform(self, items: list[Item]) -> tuple[list[Json], list[bytes]] | None:
        """Return the fast way for rows that all have text or whole numbers as ids, or all none."""
        if set(map(type, items)) != {dict}:
            return None
        rows: list[dict[str, Any]] = items  # type: ignore[assignment]
        ids: list[Json] = []
        try:
            for name in self._id_fields:
                ids = [row.get(name) for row in rows]
                kinds = set(map(type, ids))
                if kinds <= _SIMPLE:
                    used = self._used
                    pairs = zip(ids, rows, strict=True)
                    return ids, [_encode((id_, used(row))) for id_, row in pairs]
                if kinds != _NONE:
                    return None
            content = self._content
            return ids, [_encode((content(row),)) for row in rows]
        except (KeyError, RecursionError, UnicodeEncodeError):
            # Some row lacks a field, is nested too deep, or holds a lone surrogate.
            return None

    def _encode_each(self, chunk: Chunk) -> tuple[list[Json], list[bytes]]:
        ids: list[Json] = []
        bodies: list[bytes] = []
        for position, item in enumerate(chunk.items):
            if isinstance(item, Unreadable) and item.row is not None and self._is_usable(item):
                chunk.items[position] = item = item.row
            try:
                id_, body = self._encode_item(item)
            except RecursionError:
                id_, body = None, chunk.raws[position] if chunk.raws else b""
                chunk.items[position] = Unreadable(TOO_DEEP, body)
            ids.append(id_)
            bodies.append(body)
        return ids, bodies

    def _encode_item(self, item: Item) -> tuple[Json, bytes]:
        if isinstance(item, Unreadable):
            return self._id_of(item.row or {}), item.raw
        id_ = self._id_of(item)
        if id_ is None:
            return None, b"[" + _values(item, self._fields or None) + b"]"
        return id_, b"[" + _encode(id_) + b"," + _values(item, self._fields) + b"]"

    def _id_of(self, row: dict[str, Any]) -> Json:
        id_ = next((row[name] for name in self._id_fields if row.get(name) is not None), None)
        if isinstance(id_, list | dict):
            return _encode_safely(id_).decode()
        return clean_text(id_) if isinstance(id_, str) else id_

    def _is_usable(self, item: Unreadable) -> bool:
        """Return whether the job uses none of the columns that could not be read."""
        used = self._fields
        return used is not None and {*used, *self._id_fields}.isdisjoint(item.columns)


class Occurrences:
    """How often each base key came before. The memory is that of a :class:`CompactHashSet`."""

    _RECENT = 4096

    def __init__(self) -> None:
        self.keys = CompactHashSet()
        self._recent: dict[int, int] = {}

    def count(self, bases: Sequence[int]) -> list[int]:
        """For each base key, how many equal ones came before it: 0 for the first."""
        counts = [0] * len(bases)
        for at in self.keys.add_all(bases):
            counts[at] = self.again(bases[at])
        return counts

    def again(self, base: int) -> int:
        """As :meth:`count`, for one base key that is known to have come before: 1 or more.

        The keys of all repeats are in the set without a gap, so the first missing one is found
        by doubling and halving; no counter is kept for each key.
        """
        before = self._recent.get(base, 0)
        if not before:
            missing = 1
            while derive(base, missing) in self.keys:
                before, missing = missing, 2 * missing
            while missing - before > 1:
                middle = (before + missing) // 2
                if derive(base, middle) in self.keys:
                    before = middle
                else:
                    missing = middle
        self.keys.add(derive(base, before + 1))
        if len(self._recent) >= self._RECENT:
            self._recent.clear()
        self._recent[base] = before + 1
        return before + 1


def _is_batch_line(item: Item) -> bool:
    return isinstance(item, dict) and is_batch_row(item)


def digests(bodies: list[bytes]) -> list[bytes]:
    """Return the base key of each body, as 8 bytes."""
    return [blake2b(body, digest_size=8).digest() for body in bodies]


def derive(base: int, k: int) -> int:
    """Return the key of a row that ``k`` rows of the same base key came before."""
    if not k:
        return base
    return int.from_bytes(blake2b(pack(">QQ", base, k), digest_size=8).digest(), "big")


def _getter(fields: tuple[str, ...] | None) -> Callable[[dict[str, Any]], Any]:
    """Return a function from a row to the values of the fields; it raises KeyError."""
    if fields is None:
        return lambda row: row
    if len(fields) < 2:
        return lambda row: tuple([row[name] for name in fields])
    return itemgetter(*fields)


def _values(row: dict[str, Any], fields: tuple[str, ...] | None) -> bytes:
    """Return what :func:`_getter` takes, encoded, and with nothing where a field is missing."""
    if fields is None:
        return _encode_safely(row)
    return b"[" + b",".join([_encode_safely(row[n]) if n in row else b"" for n in fields]) + b"]"


def _encode_safely(value: Json) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(clean_json(value))


REPEATED_ID = (
    "rows with an id that came before: {count}, each stays a row of its own; first: {example}"
)
_OTHER_ID = " (if another column names the rows: --set id=COLUMN)"
NO_ID = "rows without a value for the id, known by their content instead: {count}; {example}"

_MASK = 2**64 - 1
_SIGNED = 2**63
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio (Knuth, TAOCP 3, 6.4): spreads counters
_TAG = 3  # bytes of the base key beside an id: tells an equal row from one of only equal id
_POSITION = 4  # bytes of the place of the first row of an id
_LAST_POSITION = 2**32 - 1  # stands for all places from here on


class RowKeyer:
    """Gives each row its number, id and key.

    Args:
        id_field: as in :class:`bagent.rows.discovery.RowsConfig`.
        fields: likewise.
        warnings: receives the warnings about ids.

    Memory: about 19 bytes a row, for as long as the object lives; next to none for rows of
    ascending ids that can be read again.
    """

    def __init__(
        self, id_field: str | None, fields: tuple[str, ...] | None, warnings: RowWarnings
    ) -> None:
        self._id_field = id_field
        self._bodies = BodyEncoder(id_field, fields)
        self._warnings = warnings
        self._index = 0
        # What came before: ids, or base keys of rows without id, with tag and place of the first.
        self._seen = CompactHashSet(_TAG + _POSITION)
        self._ascending = AscendingIds(_TAG + _POSITION)
        self._more = Occurrences()  # other rows of a known id, and repeats
        self._positions = _LinePositions()

    def bases(self, chunk: Chunk) -> tuple[int, ...]:
        """Return the base key of each item; they are not counted as having come."""
        packed = digests(self._bodies.encode(chunk)[1])
        return unpack(f">{len(packed)}Q", b"".join(packed))

    def rows(self, chunk: Chunk) -> list[Row]:
        """Return the items of a chunk as rows, numbered on from the last ones."""
        if not chunk.items:
            return []
        ids, bodies = self._bodies.encode(chunk)
        packed = digests(bodies)
        bases: tuple[int, ...] = unpack(f">{len(packed)}Q", b"".join(packed))
        hashes = _hashes(ids, bases)
        notes = _notes(packed, self._positions.of(chunk), chunk.lines)
        repeats = {
            at: self._count_repeats(
                ids[at], hashes[at], bases[at], notes[at], is_batch=_is_batch_line(chunk.items[at])
            )
            for at in self._again(ids, hashes, notes)
        }
        keys = list(bases)
        for at, k in repeats.items():
            keys[at] = derive(keys[at], k)
        if None in ids:
            self._set_content_ids(ids, bases, repeats, chunk)
        numbers = range(self._index, self._index + len(ids))
        self._index = numbers.stop
        return _make_rows(chunk, numbers, keys, ids)

    @property
    def ascends(self) -> bool:
        """Whether every id was above the last one, so that no row repeats another."""
        return not self._ascending.ended

    @property
    def mark(self) -> int:
        """A mark for :meth:`replace_since`."""
        return self._ascending.mark

    def replace_since(self, mark: int, again: Callable[[], Iterator[Chunk]]) -> None:
        """Forget the rows since ``mark``, all of one source, if ``again`` can read them."""
        start = self._positions.starts[-1]
        self._ascending.replace_since(mark, partial(self._read_again, again, start))

    def skip(self, piece: InputPiece, again: Callable[[], Iterator[Chunk]]) -> bool:
        """Number the rows of a piece without decoding them, if their ids keep ascending.

        Args:
            piece: the rows.
            again: reads them, should a later id not ascend.
        """
        places = self._positions
        start = places.start_of(piece.source)
        reader = partial(self._read_again, again, start)
        if not self._ascending.skip(piece.first, piece.last, reader):
            return False
        places.next = start + piece.last_line + 1
        self._index += piece.rows
        return True

    def rows_at(
        self, chunk: Chunk, positions: Sequence[int], keys: Sequence[int]
    ) -> list[Row] | None:
        """Return some rows of the piece that comes next, which :meth:`skip` is yet to number.

        Args:
            chunk: the rows.
            positions: their indexes in the piece.
            keys: of each, the key that is noted; None is returned where one is not the row's.
        """
        if not chunk.items:
            return []
        ids, bodies = self._bodies.encode(chunk)
        packed = digests(bodies)
        if unpack(f">{len(packed)}Q", b"".join(packed)) != tuple(keys) or None in ids:
            return None
        return _make_rows(
            chunk, [self._index + position for position in positions], list(keys), ids
        )

    def _read_again(self, again: Callable[[], Iterator[Chunk]], start: int) -> StoredIds:
        for chunk in again():
            if chunk.items:
                ids, bodies = self._bodies.encode(chunk)
                packed = digests(bodies)
                bases: tuple[int, ...] = unpack(f">{len(packed)}Q", b"".join(packed))
                yield _hashes(ids, bases), _notes(packed, start, chunk.lines)

    def _again(self, ids: list[Json], hashes: Sequence[int], notes: list[bytes]) -> list[int]:
        """Return positions of the rows whose id, or content without an id, came before."""
        if self._ascending.add(ids, hashes, notes):
            return []
        for stored in self._ascending.drain():
            self._seen.add_all(*stored)
        return self._seen.add_all(hashes, notes)

    def _count_repeats(
        self, id_: Json, hash_: int, base: int, note: bytes, *, is_batch: bool
    ) -> int:
        """Return how many rows of the same base key came before one whose id, or content, did."""
        first = self._seen.note(hash_) or note
        if id_ is not None:
            example = ""
            if self._warnings.is_new(REPEATED_ID):
                here, there = self._positions.describe(note), self._positions.describe(first)
                example = f"{json.dumps(id_, ensure_ascii=False)} at {here}, before at {there}"
                example += "" if is_batch else _OTHER_ID
            self._warnings.add(REPEATED_ID, example)
        if first[:_TAG] == note[:_TAG] or base in self._more.keys:
            return self._more.again(base)
        self._more.keys.add(base)
        return 0

    def _set_content_ids(
        self, ids: list[Json], bases: Sequence[int], repeats: dict[int, int], chunk: Chunk
    ) -> None:
        lacking = 0
        for at, id_ in enumerate(ids):
            if id_ is None:
                k = repeats.get(at, 0)
                ids[at] = f"{bases[at]:016x}" + (f"-{k + 1}" if k else "")
                lacking += not isinstance(chunk.items[at], Unreadable)
        if lacking and self._id_field is not None:
            self._warnings.add(NO_ID, f"the field is '{self._id_field}'", lacking)


@dataclass
class _LinePositions:
    """Where each source begins in one count of lines over all sources."""

    starts: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    next: int = 0

    def of(self, chunk: Chunk) -> int:
        """Return what to add to a line of the chunk to get its place."""
        start = self.start_of(chunk.source)
        self.next = start + chunk.lines[-1] + 1
        return start

    def start_of(self, source: str) -> int:
        """Return the place of line 0 of a source: the one that is being read, or the next one."""
        if not self.sources or self.sources[-1] != source:
            self.starts.append(self.next)
            self.sources.append(source)
        return self.starts[-1]

    def describe(self, note: bytes) -> str:
        position = int.from_bytes(note[_TAG:], "big")
        if position == _LAST_POSITION:
            return "an earlier row"
        number = bisect_right(self.starts, position) - 1
        return row_location(self.sources[number], position - self.starts[number])


def _hashes(ids: list[Json], bases: Sequence[int]) -> Sequence[int]:
    """Return what to know each row by: its id, else its content."""
    kinds = set(map(type, ids))
    if kinds == {str}:
        return [hash(id_) & _MASK for id_ in ids]
    if kinds == {type(None)}:
        return bases
    return [base if id_ is None else _hash(id_) for id_, base in zip(ids, bases, strict=True)]


def _hash(id_: Json) -> int:
    """64 bits of an id, evenly spread; the same only within this process."""
    if type(id_) is str:
        return hash(id_) & _MASK
    if type(id_) is int and -_SIGNED <= id_ < _SIGNED:
        mixed = (id_ * _ODD) & _MASK
        return mixed ^ (mixed >> 32) or _ODD  # 0 is the hash of an empty text
    return hash((type(id_).__name__, id_)) & _MASK


def _notes(packed: list[bytes], start: int, lines: Sequence[int]) -> list[bytes]:
    """For each row: a tag of its base key, and its place."""
    if start + lines[-1] >= _LAST_POSITION:
        places = pack(">I", _LAST_POSITION) * len(lines)
    else:
        places = pack(f">{len(lines)}I", *[start + line for line in lines])
    return [
        digest[:_TAG] + places[at : at + _POSITION]
        for digest, at in zip(packed, range(0, len(places), _POSITION), strict=True)
    ]


def _make_rows(chunk: Chunk, numbers: Sequence[int], keys: list[int], ids: list[Json]) -> list[Row]:
    source, lines, items = chunk.source, chunk.lines, chunk.items
    if set(map(type, items)) == {dict}:
        return list(map(Row, numbers, keys, ids, items, repeat(source), lines))
    return [
        _unreadable_row(item, number, key, id_, source, line)
        if isinstance(item, Unreadable)
        else Row(number, key, id_, item, source, line)
        for number, key, id_, item, line in zip(numbers, keys, ids, items, lines, strict=True)
    ]


def _unreadable_row(
    item: Unreadable, number: int, key: int, id_: Json, source: str, line: int
) -> Row:
    raw = item.raw if item.row is None else None
    return Row(number, key, id_, item.row or {}, source, line, item.error, raw)
