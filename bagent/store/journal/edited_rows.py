"""Outcomes of rows whose input was edited between two starts.

The key of a row changes with its content, so the outcome of the old content stays in the journal
under the old key. It is removed by a tombstone: when the row with the same number and id gets a
new outcome, or, if it had failed, when the input no longer holds it.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, compress
from pathlib import Path
from typing import NamedTuple

import msgspec

from bagent.store.journal.codec import VOID_CODE, salt_of, unit_of
from bagent.store.journal.segment_index import SegmentIndex
from bagent.store.journal.segments import read_line
from bagent.store.journal.supersession import voided
from bagent.types import Json, Outcome

_ORDINAL_BITS = 24
_ORDINALS = (1 << _ORDINAL_BITS) - 1
_MOST_ROWS = 1 << 38
_MOST_LOADED = 16
"""How many segments' columns are cached, 2 MB each."""

_MOST_IN_SET = 1 << 18
"""Up to this many units a set is used, which is faster than a binary search."""

_WINDOW = 1 << 22
"""Rows compared at a time."""


class _Named(msgspec.Struct):
    key: str
    source: str
    id: Json = None
    finished_at: float | None = None


_decode = msgspec.json.Decoder(_Named).decode


def _named(path: Path, offset: int) -> _Named:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _decode(read_line(descriptor, offset))
    finally:
        os.close(descriptor)


class _Rows:
    """The lines of one segment, sorted by row."""

    def __init__(self, index: SegmentIndex) -> None:
        self.path = index.segment.path
        self.stages = index.column("stages")
        self.answers = index.column("answers")
        self.units = index.column("units")
        self.codes = index.column("codes")
        self.offsets = index.column("offsets")
        rows = enumerate(index.column("rows"))
        self._keys = array(
            "Q", sorted(row << _ORDINAL_BITS | n for n, row in rows if 0 <= row < _MOST_ROWS)
        )

    def lines_of(self, row: int) -> Iterator[int]:
        """Yield the ordinals of the lines of a row."""
        at = bisect_left(self._keys, row << _ORDINAL_BITS)
        while at < len(self._keys) and self._keys[at] >> _ORDINAL_BITS == row:
            yield self._keys[at] & _ORDINALS
            at += 1

    def name(self, ordinal: int) -> _Named:
        """Read the row's key, source and id from a line.

        Raises:
            OSError, msgspec.DecodeError: it cannot be read.
        """
        return _named(self.path, self.offsets[ordinal])


class EditedRows:
    """Finds the outcomes of earlier starts that a new outcome replaces.

    These have the same stage, row number, answer, id and source, but another key. Rows without an
    id of their own are never replaced.

    Args:
        indexes: the segments before this start writes.
    """

    def __init__(self, indexes: Sequence[SegmentIndex]) -> None:
        self._indexes = indexes
        by_stage: dict[str, list[tuple[int, int, int]]] = {}
        for segment, index in enumerate(indexes):
            for name, (low, high, count) in zip(index.stage_names, index.ranges(), strict=False):
                if count:
                    by_stage.setdefault(name, []).append((low, high, segment))
        self._by_stage = {name: _Ranges(ranges) for name, ranges in by_stage.items()}
        self._loaded: dict[int, _Rows] = {}

    def replaced_units(self, outcome: Outcome) -> list[int]:
        """Return the units that ``outcome`` replaces; lines are rarely read for this."""
        ranges = self._by_stage.get(outcome.stage)
        if ranges is None or outcome.row > ranges.highest:
            return []
        if outcome.id is None or outcome.id == outcome.key:
            return []
        unit = unit_of(int(outcome.key, 16), outcome.stage, outcome.answer)
        units: list[int] = []
        for segment in ranges.around(outcome.row):
            # An unreadable outcome stays beside the new one.
            with suppress(OSError, EOFError, msgspec.DecodeError):
                units.extend(self._in_segment(segment, outcome, unit))
        return units

    def _in_segment(self, segment: int, outcome: Outcome, unit: int) -> Iterator[int]:
        rows = self._rows(segment)
        names = self._indexes[segment].stage_names
        for ordinal in rows.lines_of(outcome.row):
            if rows.units[ordinal] == unit or rows.codes[ordinal] == VOID_CODE:
                continue
            if rows.answers[ordinal] != outcome.answer:
                continue
            if names[rows.stages[ordinal]] != outcome.stage:
                continue
            name = rows.name(ordinal)
            if name.source == outcome.source and _same(name.id, outcome.id):
                yield rows.units[ordinal]

    def _rows(self, segment: int) -> _Rows:
        rows = self._loaded.pop(segment, None)
        if rows is None:
            rows = _Rows(self._indexes[segment])
            if len(self._loaded) >= _MOST_LOADED:
                del self._loaded[next(iter(self._loaded))]
        self._loaded[segment] = rows
        return rows


class EditedLine(NamedTuple):
    """The ``ordinal``-th sound line of a segment, and its unit."""

    unit: int
    segment_index: SegmentIndex
    ordinal: int


def replaced_lines(indexes: list[SegmentIndex], stage: str) -> Iterator[EditedLine]:
    """Yield the lines replaced across parts, which one part's :class:`EditedRows` cannot see.

    Of the lines of one row, answer, id and source with several keys only the newest counts. Only
    lines of rows with several keys are read. Memory: 8 bytes for each of :data:`_WINDOW` rows.

    Args:
        indexes: the segments of all parts, in their order.
        stage: the stage of the lines.
    """
    void = voided(indexes)
    there = [
        (index, index.stage_names.index(stage), void.get(segment))
        for segment, index in enumerate(indexes)
        if stage in index.stage_names
    ]
    highest = max((index.ranges()[number][1] for index, number, _ in there), default=-1)
    for low in range(0, highest + 1, _WINDOW):
        window = range(low, low + _WINDOW)
        twice = _twice(there, stage, window)
        rows: dict[tuple[int, int], list[EditedLine]] = {}
        for index, number, gone in there if twice else ():
            lines = enumerate(
                zip(*_columns(index), _current_lines(index, number, gone), strict=True)
            )
            for ordinal, (row, answer, unit, current) in lines:
                if current and row in twice:
                    rows.setdefault((row, answer), []).append(EditedLine(unit, index, ordinal))
        for lines_of_row in rows.values():
            yield from _older(lines_of_row)


_Part = tuple[SegmentIndex, int, bytearray | None]
"""A segment, the number of the stage in it, and its removed lines."""


def _columns(index: SegmentIndex) -> list[Sequence[int]]:
    return [index.column(name) for name in ("rows", "answers", "units")]


def _current_lines(index: SegmentIndex, number: int, gone: bytearray | None) -> Sequence[bool]:
    """Return for each line whether it is of the stage and was not removed."""
    stages = index.column("stages")
    return [
        stage == number and not out
        for stage, out in zip(stages, gone or bytes(len(index)), strict=True)
    ]


def _twice(there: Sequence[_Part], stage: str, window: range) -> set[int]:
    """Return the rows of the window that have lines with several keys."""
    low, high = window.start, window.stop
    keys = array("Q", bytes(8 * len(window)))
    salts: dict[int, int] = {}
    duplicates: set[int] = set()
    for index, number, gone in there:
        lines: Iterable[tuple[int, int, int]] = zip(*_columns(index), strict=True)
        if gone or len(index.stage_names) > 1:
            lines = compress(lines, _current_lines(index, number, gone))
        for row, answer, unit in lines:
            if not low <= row < high:
                continue
            salt = salts.get(answer)
            if salt is None:
                salt = salts[answer] = salt_of(stage, answer)
            key, at = unit ^ salt, row - low
            if keys[at] != key:
                if keys[at]:
                    duplicates.add(row)
                keys[at] = key
    return duplicates


def _older(lines: Sequence[EditedLine]) -> Iterator[EditedLine]:
    """Return the lines of one row that a newer line with another unit replaces."""
    newest: dict[tuple[str, bytes], tuple[float, int]] = {}
    named_lines: list[tuple[tuple[str, bytes], int, EditedLine]] = []
    for line in lines:
        with suppress(OSError, EOFError, msgspec.DecodeError):
            index = line.segment_index
            named = _named(index.segment.path, index.column("offsets")[line.ordinal])
            if named.id is None or named.id == named.key:
                continue
            name = named.source, msgspec.json.encode(named.id)
            at = named.finished_at or 0.0, line.unit
            newest[name] = max(newest.get(name, at), at)
            named_lines.append((name, line.unit, line))
    return (line for name, unit, line in named_lines if unit != newest[name][1])


class _Ranges:
    """Ranges of rows as (lowest, highest, segment), searchable by row."""

    def __init__(self, ranges: list[tuple[int, int, int]]) -> None:
        self._ranges = sorted(ranges)
        self._lows = [low for low, _, _ in self._ranges]
        self._upto = list(accumulate((high for _, high, _ in self._ranges), max))
        self.highest = self._upto[-1]

    def around(self, row: int) -> Iterator[int]:
        """Yield the segments of the ranges that hold the row."""
        at = bisect_right(self._lows, row) - 1
        while at >= 0 and self._upto[at] >= row:
            _, high, segment = self._ranges[at]
            if high >= row:
                yield segment
            at -= 1


def _same(first: Json, other: Json) -> bool:
    """Return whether two ids are equal and of one type: 1 is neither "1" nor true."""
    return type(first) is type(other) and first == other


class UnseenRows:
    """Units of earlier starts, and which of them the input still holds. Memory: 9 bytes each.

    Args:
        units: the units, in any order.
    """

    def __init__(self, units: Iterable[int]) -> None:
        self._units = array("Q", sorted(units))
        self._met = bytearray(len(self._units))
        few = len(self._units) <= _MOST_IN_SET
        self._set: Container[int] | None = frozenset(self._units) if few else None

    def mark_seen(self, unit: int) -> None:
        """Mark a unit of the input as seen; other units are ignored."""
        if self._set is not None and unit not in self._set:
            return
        at = bisect_left(self._units, unit)
        if at < len(self._units) and self._units[at] == unit:
            self._met[at] = 1

    def has_seen(self, unit: int) -> bool | None:
        """Return whether a unit was marked as seen; None for other units."""
        at = bisect_left(self._units, unit)
        if at == len(self._units) or self._units[at] != unit:
            return None
        return bool(self._met[at])

    def unseen(self) -> Iterator[int]:
        """Return the units that were not seen."""
        return (unit for unit, met in zip(self._units, self._met, strict=True) if not met)
