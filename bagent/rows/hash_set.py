"""A set of 64-bit keys in about ten bytes each, and no pauses as it grows.

A Python set of integers takes 60 to 90 bytes a key; a job of ten million rows has to remember
every one of them. Here the keys of a bucket follow one another in one ``bytes`` object,
found with ``bytes.find``. The table grows by linear hashing (Litwin, VLDB 1980): one bucket is
split at a time, so memory follows the number of keys and no insertion has to rebuild the table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import compress, repeat

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
    """Set of integers from 0 to 2**64 - 1, each with a note of fixed size.

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
