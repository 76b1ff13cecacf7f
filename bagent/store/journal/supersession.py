"""Superseded lines of a journal.

The current line of a unit is its first ok line, or its last line if none is ok. A tombstone
removes the lines before it. Most units have one line, so the units with several are found first,
and only their lines are compared.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import compress

from bagent.store.journal.codec import OK_CODE, VOID_CODE
from bagent.store.journal.segment_index import SegmentIndex

_PART_LINES = 65536
"""About how many units are compared at a time."""

MAX_DUPLICATES = 250_000
"""About how many units with several lines are held in memory."""


def superseded_lines(indexes: list[SegmentIndex], most: int = MAX_DUPLICATES) -> Iterator[int]:
    """Yield the lines that are not the current one of their unit, as segment << 32 | ordinal.

    Args:
        indexes: the segments in their order.
        most: about how many units with several lines are held in memory.
    """
    void = voided(indexes)
    for segment, mask in void.items():
        yield from (segment << 32 | ordinal for ordinal, gone in enumerate(mask) if gone)
    for twice in _twice(indexes, most):
        units, lines = array("Q"), array("Q")
        for segment, index in enumerate(indexes):
            first = segment << 33
            codes = index.column("codes")
            gone = void.get(segment)
            for ordinal, unit in enumerate(index.column("units")):
                if unit in twice and not (gone and gone[ordinal]):
                    units.append(unit)
                    lines.append(first | ordinal << 1 | (codes[ordinal] == OK_CODE))
        yield from _superseded_of(units, lines)


def voided(indexes: list[SegmentIndex]) -> dict[int, bytearray]:
    """Return one byte a line for each segment with tombstoned lines: 1 where it was removed.

    Keys are positions in ``indexes``. Tombstones themselves count as removed.
    """
    last: dict[int, tuple[int, int]] = {}
    for segment, index in enumerate(indexes):
        codes = index.column("codes").tobytes()
        if VOID_CODE in codes:
            units = index.column("units")
            for ordinal, code in enumerate(codes):
                if code == VOID_CODE:
                    last[units[ordinal]] = segment, ordinal
    masks: dict[int, bytearray] = {}
    for segment, index in enumerate(indexes if last else ()):
        for ordinal, unit in enumerate(index.column("units")):
            upto = last.get(unit)
            if upto is not None and (segment, ordinal) <= upto:
                masks.setdefault(segment, bytearray(len(index)))[ordinal] = 1
    return masks


def _twice(indexes: list[SegmentIndex], most: int) -> Iterator[set[int]]:
    """Yield sets of units that have several lines."""
    bits = (sum(map(len, indexes)) // _PART_LINES).bit_length()
    shift = 64 - bits
    parts = [array("Q") for _ in range(1 << bits)]
    appends = [part.append for part in parts]
    for index in indexes:
        for unit in index.column("units"):
            appends[unit >> shift](unit)
    appends.clear()
    duplicates: set[int] = set()
    for number, part in enumerate(parts):
        parts[number] = array("Q")
        once = set(part)
        if len(once) == len(part):
            continue
        for unit in part:
            if unit in once:
                once.discard(unit)
            else:
                duplicates.add(unit)
        if len(duplicates) > most:
            yield duplicates
            duplicates = set()
    if duplicates:
        yield duplicates


def _superseded_of(units: array[int], lines: array[int]) -> Iterator[int]:
    best: dict[int, int] = {}
    for unit, line in zip(units, lines, strict=True):
        before = best.get(unit)
        if before is None:
            best[unit] = line
        elif before & 1:
            yield line >> 1
        else:
            yield before >> 1
            best[unit] = line


_READ_AT_ONCE = 1 << 18
"""About how many units are read at a time: 2 MB."""

UNIT_BITS = 64


class OutcomeRanges:
    """The current outcome of each unit, in ranges of units.

    Args:
        indexes: the segments in the order of writing.
        bits: how many of the highest bits name a range.
    """

    def __init__(self, indexes: list[SegmentIndex], bits: int) -> None:
        self.void = voided(indexes)
        self._indexes = indexes
        self._bits = bits
        self._ok_of_voided = {n: _ok_not_voided(indexes[n], gone) for n, gone in self.void.items()}

    def ranges(self) -> Iterator[tuple[array[int], Mapping[int, int]]]:
        """Yield for each range, ascending, its ok units and the codes of its other units.

        Each unit comes once; units of one range are unordered.
        """
        shift = UNIT_BITS - self._bits
        failed = self._failed(shift)
        for number, part in enumerate(self._ok_parts(shift)):
            once = set(part)
            ok = part if len(once) == len(part) else array("Q", once)
            bad: dict[int, int] = {}
            if failed:
                units, codes = failed[number]
                # The last line of a unit counts.
                last = zip(units, codes, strict=True)
                bad = {unit: code for unit, code in dict(last).items() if unit not in once}
            yield ok, bad

    def _ok_parts(self, shift: int) -> Iterator[array[int]]:
        """Yield the units of ok lines by range, with repeats."""
        total = sum(len(index) for index in self._indexes)
        ranges = 1 << self._bits
        step = max(1, ranges * _READ_AT_ONCE // max(total, 1))
        for first in range(0, ranges, step):
            end = min(first + step, ranges)
            columns = [
                self._ok_units(number, first << shift, end << shift)
                for number in range(len(self._indexes))
            ]
            columns = [column for column in columns if column]
            starts = [0] * len(columns)
            for number in range(first, end):
                part = array("Q")
                for position, column in enumerate(columns):
                    start = starts[position]
                    upto = starts[position] = bisect_left(column, number + 1 << shift, start)
                    part += column[start:upto]
                yield part

    def _ok_units(self, number: int, low: int, high: int) -> array[int]:
        units = self._ok_of_voided.get(number)
        if units is None:
            return self._indexes[number].ok_units(low, high)
        return units[bisect_left(units, low) : bisect_left(units, high)]

    def _failed(self, shift: int) -> list[tuple[array[int], bytearray]]:
        """Return failed units and their codes in order, by range; empty if nothing failed."""
        by_range: list[tuple[array[int], bytearray]] = []
        for number, index in enumerate(self._indexes):
            if not index.failures:
                continue
            by_range = by_range or [(array("Q"), bytearray()) for _ in range(1 << self._bits)]
            codes = index.column("codes").tobytes()
            if number in self.void:
                gone = self.void[number]
                codes = bytes(OK_CODE if g else code for g, code in zip(gone, codes, strict=True))
            failing = compress(index.column("units"), codes)
            for unit, code in zip(failing, codes.replace(bytes([OK_CODE]), b""), strict=True):
                units, kinds = by_range[unit >> shift]
                units.append(unit)
                kinds.append(code)
        return by_range


def _ok_not_voided(index: SegmentIndex, gone: bytearray) -> array[int]:
    """Return the units of ok lines that were not removed, ascending."""
    units, codes = index.column("units"), index.column("codes")
    lines = zip(units, codes, gone, strict=True)
    return array("Q", sorted(unit for unit, code, lost in lines if code == OK_CODE and not lost))
