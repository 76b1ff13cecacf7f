"""Whether many units are finished, fast where they are asked about in the order of writing."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

from bagent.store.codec import salt_of
from bagent.store.segment_index import SegmentIndex

_CHUNK = 2048
_MOST_CHUNKS = 32


def units_of(keys: Sequence[int], stage: str, answer: int) -> array[int]:
    """The unit of each row key, as :func:`bagent.store.codec.unit_of` makes it, all at once."""
    numbers = keys if isinstance(keys, array) else array("Q", keys)
    salts = salt_of(stage, answer).to_bytes(8, sys.byteorder) * len(numbers)
    # One exclusive or of two long numbers: to do it number by number costs six times as much.
    mixed = int.from_bytes(numbers.tobytes(), "little") ^ int.from_bytes(salts, "little")
    units = array("Q")
    units.frombytes(mixed.to_bytes(len(salts), "little"))
    return units


class Near:
    """Follows the lines of a journal beside the questions, and holds what was not asked for yet.

    Rows are mostly asked about in about the order in which they were written, so what is held is
    about what was in flight at a time, and a look at it costs a fifth of one at all units. Where
    the order is another one, each line is still read once only.

    Args:
        indexes: the segments in the order in which they were begun.
        void: of which segments (by place) a line was taken back.
        has: whether a unit is finished.
        chunk: lines that are read at a time.
    """

    def __init__(
        self,
        indexes: list[SegmentIndex],
        void: Container[int],
        has: Callable[[int], bool],
        chunk: int = _CHUNK,
    ) -> None:
        self._indexes = indexes
        self._void = void
        self._has = has
        self._chunks = self._finished()
        self._held: set[int] = set()
        self._chunk = self._ahead = chunk

    def has_all(self, units: Iterable[int]) -> bool:
        """Whether all these units are finished."""
        asked = set(units)
        held = self._held
        wanted = len(asked) + self._ahead
        while len(held) < wanted:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            held.update(chunk)
        before = len(held)
        held -= asked
        if before - len(held) == len(asked):
            return True
        if not all(map(self._has, asked)):
            return False
        # They are further on, or were passed: look further, unless what is held is of no use.
        self._ahead *= 2
        if self._ahead > _MOST_CHUNKS * self._chunk:
            self._ahead = self._chunk
            held.clear()
        return True

    def _finished(self) -> Iterator[Collection[int]]:
        """Units of finished lines in the order of writing, some at a time."""
        step = self._chunk
        for number, index in enumerate(self._indexes):
            units = index.column("units")
            codes = index.column("codes") if index.failures else None
            for start in range(0, len(units), step):
                chunk = units[start : start + step]
                if number in self._void:
                    yield list(filter(self._has, chunk))
                elif codes is None:
                    yield chunk
                else:
                    yield self._not_left(chunk, codes[start : start + step])

    def _not_left(self, units: array[int], codes: array[int]) -> list[int]:
        """Without the failures that are taken up again."""
        lines = zip(units, codes, strict=True)
        return [unit for unit, code in lines if not code or self._has(unit)]
