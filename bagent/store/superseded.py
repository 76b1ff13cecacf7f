"""Which lines of a journal do not count: of the lines of one unit, the first ok one is current.

Without an ok line the last one is. Most journals hold nearly every unit once, so units that stand
twice are looked for first, and only their lines are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from bagent.store.codec import OK_CODE
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
    for twice in _twice(indexes, most):
        units, lines = array("Q"), array("Q")
        for segment, index in enumerate(indexes):
            first = segment << 33
            codes = index.column("codes")
            for place, unit in enumerate(index.column("units")):
                if unit in twice:
                    units.append(unit)
                    lines.append(first | place << 1 | (codes[place] == OK_CODE))
        yield from _losers_of(units, lines)


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
