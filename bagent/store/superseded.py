"""Which lines of a journal do not count: of the lines of one unit, the first ok one is current.

Without an ok line the last one is. A void line takes those before it away. Most journals hold
nearly every unit once, so units that stand twice are looked for first, and only their lines are
compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from bagent.store.codec import OK_CODE, VOID_CODE
from bagent.store.segment_index import SegmentIndex

_PART_LINES = 65536
"""So many units, about, are compared at a time."""

MOST_TWICE = 250_000
"""Of so many units that stand twice, about, the lines are compared at a time."""


def losers(indexes: list[SegmentIndex], most: int = MOST_TWICE) -> Iterator[int]:
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
            for place, unit in enumerate(index.column("units")):
                if unit in twice and not (gone and gone[place]):
                    units.append(unit)
                    lines.append(first | place << 1 | (codes[place] == OK_CODE))
        yield from _losers_of(units, lines)


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
    found: dict[int, bytearray] = {}
    for segment, index in enumerate(indexes if last else ()):
        for ordinal, unit in enumerate(index.column("units")):
            upto = last.get(unit)
            if upto is not None and (segment, ordinal) <= upto:
                found.setdefault(segment, bytearray(len(index)))[ordinal] = 1
    return found


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
    found: set[int] = set()
    for number, part in enumerate(parts):
        parts[number] = array("Q")
        once = set(part)
        if len(once) == len(part):
            continue
        for unit in part:
            if unit in once:
                once.discard(unit)
            else:
                found.add(unit)
        if len(found) > most:
            yield found
            found = set()
    if found:
        yield found


def _losers_of(units: array[int], lines: array[int]) -> Iterator[int]:
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
