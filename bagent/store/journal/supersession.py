"""Which lines of a journal do not count: of the lines of one unit, the first ok one is current.

Without an ok line the last one is. A void line takes those before it away. Most journals hold
nearly every unit once, so units that stand twice are looked for first, and only their lines are
compared.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import compress

from bagent.store.journal.codec import OK_CODE, VOID_CODE
from bagent.store.journal.segment_index import SegmentIndex

_PART_LINES = 65536
"""So many units, about, are compared at a time."""

MAX_DUPLICATES = 250_000
"""Of so many units that stand twice, about, the lines are compared at a time."""


def superseded_lines(indexes: list[SegmentIndex], most: int = MAX_DUPLICATES) -> Iterator[int]:
    """Lines that are not the current one of their unit, as segment << 32 | ordinal.

    Args:
        indexes: the segments in their order.
        most: how many units that stand twice are kept in memory, about.
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
    """For segments (by place in ``indexes``) one byte a line: 1 where a void line took it away.

    Void lines themselves are among them; segments without any are left out.
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
    """The units that have several lines, some at a time."""
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
"""So many units, about, are read before they are cut: 2 MB."""

UNIT_BITS = 64


class OutcomeRanges:
    """The current outcome of each unit, in ranges that together hold every unit once.

    Args:
        indexes: the segments in the order in which their lines were written.
        bits: ranges differ in so many of the highest bits.
    """

    def __init__(self, indexes: list[SegmentIndex], bits: int) -> None:
        self.void = voided(indexes)
        self._indexes = indexes
        self._bits = bits
        self._ok_of_voided = {n: _ok_not_voided(indexes[n], gone) for n, gone in self.void.items()}

    def ranges(self) -> Iterator[tuple[array[int], Mapping[int, int]]]:
        """For each range, ascending: the units that are ok, and the others with their codes.

        No unit comes twice; those of one range are in no order.
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
        """Units of ok lines by range; one that stands in several lines comes several times."""
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
        """Units with the codes of their failures in order, by range; empty where there are none."""
        by_range: list[tuple[array[int], bytearray]] = []
        for number, index in enumerate(self._indexes):
            if not index.failures:
                continue
            by_range = by_range or [(array("Q"), bytearray()) for _ in range(1 << self._bits)]
            codes = index.column("codes").tobytes()
            if number in self.void:
                # What was taken back counts as little as what is ok.
                gone = self.void[number]
                codes = bytes(OK_CODE if g else code for g, code in zip(gone, codes, strict=True))
            failing = compress(index.column("units"), codes)
            for unit, code in zip(failing, codes.replace(bytes([OK_CODE]), b""), strict=True):
                units, kinds = by_range[unit >> shift]
                units.append(unit)
                kinds.append(code)
        return by_range


def _ok_not_voided(index: SegmentIndex, gone: bytearray) -> array[int]:
    """Units of the ok lines that were not taken back, ascending."""
    units, codes = index.column("units"), index.column("codes")
    lines = zip(units, codes, gone, strict=True)
    return array("Q", sorted(unit for unit, code, lost in lines if code == OK_CODE and not lost))
