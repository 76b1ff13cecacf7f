"""The current outcomes of a journal, in the order of writing or of the input.

Lines are selected and sorted on the narrow columns of the index; their text is read last, once.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice, pairwise
from operator import add
from pathlib import Path
from typing import NamedTuple

from bagent.store.journal.codec import FINISHED_CODES, decode_outcome, salt_of
from bagent.store.journal.done_index import DoneIndex, HashMap, open_indexes
from bagent.store.journal.segment_index import SegmentIndex
from bagent.store.journal.segments import (
    Report,
    pack_location,
    part_order,
    read_line,
    unpack_location,
)
from bagent.store.journal.supersession import superseded_lines
from bagent.types import Outcome

_WINDOW_LINES = 32768
BLOCK_LINES = 256
_BLOCK_BYTES = 8 * 1024 * 1024
_NEAR_BYTES = 65536
_ORDINAL_BITS = 24
_ORDINALS = (1 << _ORDINAL_BITS) - 1
_MOST_ROWS = 1 << 38
_FLIPPED = bytes([1, 0]) + bytes(254)
_FAILED = bytes(code not in FINISHED_CODES for code in range(256))


SegmentLines = Mapping[tuple[str, int], int]
"""How many lines segments have, by part and number."""


class LineRef(NamedTuple):
    """The location of a line: ``segment`` is a position in ``indexes``, ``code`` a ``code_of``."""

    row: int
    answer: int
    segment: int
    offset: int
    length: int
    code: int


class Block(NamedTuple):
    """Consecutive lines: their rows, codes, and bytes with newline.

    An unreadable line is empty or cut off. Lines may be views of one larger read, since copying
    each costs as much as reading it.
    """

    rows: list[int]
    codes: bytes
    texts: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter of current outcomes by stage name, code and line number; None means all."""

    stages: frozenset[str] | None = None
    codes: frozenset[int] | None = None
    first: SegmentLines | None = None


class JournalReader:
    """The current outcomes of a run, as of the reader's construction.

    Args:
        run_dir: the run directory.
        report: called with each broken line.
        save: write missing index files of sealed segments.
    """

    def __init__(self, run_dir: Path, report: Report, *, save: bool = False) -> None:
        self.indexes = open_indexes(run_dir, report, save=save)
        self.parts = sorted({i.segment.part for i in self.indexes}, key=part_order)
        self._descriptors: dict[int, int] = {}
        self._superseded: dict[int, bytearray] | None = None

    @property
    def lines(self) -> int:
        """The number of sound lines, including superseded ones."""
        return sum(map(len, self.indexes))

    @property
    def broken(self) -> int:
        """The number of broken lines, which are left out."""
        return sum(index.broken for index in self.indexes)

    @property
    def longest(self) -> int:
        """The length of the longest line in bytes."""
        return max((max(i.column("lengths"), default=0) for i in self.indexes), default=0)

    @property
    def mean(self) -> int:
        """The mean length of a line in bytes."""
        return sum(sum(i.column("lengths")) for i in self.indexes) // max(1, self.lines)

    def stages(self) -> list[str]:
        """Return the stages in the order of their first line."""
        return list(dict.fromkeys(name for i in self.indexes for name in i.stage_names))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of finished and failed current outcomes of each stage.

        Truncated answers that the job accepts are finished.
        """
        totals = {name: [0, 0] for name in self.stages()}
        for segment, index in enumerate(self.indexes):
            bad = index.column("codes").tobytes().translate(_FAILED)
            pairs: Iterable[tuple[int, int]] = zip(index.column("stages"), bad, strict=True)
            lost = self.superseded().get(segment)
            if lost is not None:
                pairs = compress(pairs, lost.translate(_FLIPPED))
            for (stage, is_bad), count in Counter(pairs).items():
                totals[index.stage_names[stage]][is_bad] += count
        return {name: (ok, not_ok) for name, (ok, not_ok) in totals.items()}

    def superseded(self) -> dict[int, bytearray]:
        """Return one byte a line, 1 where it is superseded, by position in ``indexes``."""
        if self._superseded is None:
            self._superseded = {}
            for line in superseded_lines(self.indexes):
                segment = line >> 32
                if segment not in self._superseded:
                    self._superseded[segment] = bytearray(len(self.indexes[segment]))
                self._superseded[segment][line & 0xFFFFFFFF] = 1
        return self._superseded

    def written(self, selection: Selection | None = None) -> Iterator[LineRef]:
        """Yield the current lines in the order of writing."""
        for segment, index in enumerate(self.indexes):
            selected = self._select(segment, selection or Selection())
            names = ("rows", "answers", "offsets", "lengths", "codes")
            columns = [index.column(name) for name in names]
            for ordinal, (row, answer, offset, length, code) in enumerate(
                zip(*columns, strict=True)
            ):
                if selected is None or selected[ordinal]:
                    yield LineRef(row, answer, segment, offset, length, code)

    def ordered(self, selection: Selection | None = None) -> Iterator[LineRef]:
        """Yield the current lines by stage (in the order of first lines), row and answer.

        Memory: 12 bytes a line of segments whose rows overlap, and a window of 32,768 lines.
        """
        selection = selection or Selection()
        for stage in self.stages():
            if selection.stages is None or stage in selection.stages:
                yield from self._ordered_stage(stage, selection)

    def _select(self, segment: int, selection: Selection) -> bytearray | None:
        """Return one byte a line, 1 where it is current and selected; None if all are."""
        index = self.indexes[segment]
        lost = self.superseded().get(segment)
        every = selection.stages is None or selection.stages.issuperset(index.stage_names)
        if lost is None and every and selection.codes is None and selection.first is None:
            return None
        selected = (lost or bytearray(len(index))).translate(_FLIPPED)
        if selection.codes is not None:
            for ordinal, code in enumerate(index.column("codes")):
                if code not in selection.codes:
                    selected[ordinal] = 0
        if selection.first is not None:
            count = selection.first.get((index.segment.part, index.segment.number), 0)
            selected[count:] = bytes(max(0, len(index) - count))
        if selection.stages is not None and not every:
            numbers = {n for n, s in enumerate(index.stage_names) if s in selection.stages}
            for ordinal, stage in enumerate(index.column("stages")):
                if stage not in numbers:
                    selected[ordinal] = 0
        return selected

    def _ordered_stage(self, stage: str, selection: Selection) -> Iterator[LineRef]:
        for near, low, upto in self._windows(stage, selection):
            refs = [ref for run in near for ref in run.places(low, upto)]
            refs.sort()
            yield from refs

    def _windows(self, stage: str, selection: Selection) -> Iterator[tuple[list[_Run], int, int]]:
        """Yield ascending ranges of rows of a bounded number of lines, with their runs."""
        runs = []
        for segment, index in enumerate(self.indexes):
            if stage in index.stage_names:
                low, high, count = index.ranges()[index.stage_names.index(stage)]
                runs.append(_Run(segment, _clamped(low), _clamped(high), count))
        if not runs:
            return
        low, high = min(r.low for r in runs), max(r.high for r in runs) + 1
        width = max(1, (high - low) * _WINDOW_LINES // sum(r.count for r in runs))
        narrow = Selection(frozenset({stage}), selection.codes, selection.first)
        while low < high:
            upto = min(low + width, high)
            near = [run for run in runs if run.low < upto and run.high >= low]
            for run in near:
                if run.keys is None:
                    run.load(self.indexes[run.segment], self._select(run.segment, narrow))
            while upto - low > 1 and sum(run.count_in(low, upto) for run in near) > _WINDOW_LINES:
                upto = low + (upto - low) // 2
            yield near, low, upto
            low = upto
            for run in near:
                if run.high < low:
                    run.drop()

    def blocks(self) -> Iterator[Block]:
        """Yield all current lines in the order of :meth:`ordered`, in blocks."""
        for stage in self.stages():
            for near, low, upto in self._windows(stage, Selection()):
                ends = {run.low for run in near} | {run.high + 1 for run in near}
                cuts = [low, *sorted(end for end in ends if low < end < upto), upto]
                for begin, end in pairwise(cuts):
                    yield from self._blocks_of(near, begin, end)

    def _blocks_of(self, near: list[_Run], low: int, upto: int) -> Iterator[Block]:
        """Yield the lines with ``low <= row < upto``; fastest where one run holds them all."""
        live = [run for run in near if run.count_in(low, upto)]
        if len(live) == 1 and not live[0].answered:
            run = live[0]
            for rows, offsets, lengths, codes in run.plain(low, upto):
                for part in slices(lengths):
                    texts = self._texts_of(run.segment, offsets[part], lengths[part])
                    yield Block(rows[part], codes[part], texts)
            return
        refs = [ref for run in live for ref in run.places(low, upto)]
        refs.sort()
        for start in range(0, len(refs), BLOCK_LINES):
            block = refs[start : start + BLOCK_LINES]
            for part in slices([ref.length for ref in block]):
                lines = block[part]
                codes = bytes([ref.code for ref in lines])
                yield Block([p.row for p in lines], codes, [text for _, text in self.texts(lines)])

    def _texts_of(
        self, segment: int, offsets: list[int], lengths: list[int]
    ) -> list[bytes | memoryview]:
        """Read lines of one segment, each with its newline."""
        low = min(offsets)
        size = max(map(add, offsets, lengths)) - low
        descriptor = self._descriptor(segment)
        # An index file of somebody else's run directory may name any length.
        most = self.indexes[segment].covered
        if size <= max(2 * sum(lengths), _NEAR_BYTES):
            data = os.pread(descriptor, min(size, most), low)
            if len(data) == size:
                view = memoryview(data)
                return [view[o - low : o - low + n] for o, n in zip(offsets, lengths, strict=True)]
        return [
            os.pread(descriptor, min(n, most), o) for o, n in zip(offsets, lengths, strict=True)
        ]

    def read(self, ref: LineRef) -> bytes:
        """Read a line without its newline; empty if it cannot be read."""
        most = self.indexes[ref.segment].covered
        data = os.pread(self._descriptor(ref.segment), min(ref.length - 1, most), ref.offset)
        return data if len(data) == ref.length - 1 else b""

    def texts(self, refs: Iterable[LineRef]) -> Iterator[tuple[LineRef, bytes]]:
        """Yield each reference with its line and newline; the line is empty if unreadable.

        Neighbouring lines are read at once, in at most 8 MiB.
        """
        remaining = iter(refs)
        while chunk := list(islice(remaining, BLOCK_LINES)):
            blocks = self._blocks(chunk)
            for ref in chunk:
                block = blocks.get(ref.segment)
                if block is None:
                    line = self.read(ref)
                    yield ref, line + b"\n" if line else line
                else:
                    start = ref.offset - block[0]
                    yield ref, block[1][start : start + ref.length]

    def _blocks(self, refs: list[LineRef]) -> dict[int, tuple[int, bytes]]:
        """Read segments whose lines are close together: an offset and the bytes from there."""
        bounds: dict[int, tuple[int, int, int]] = {}
        for _, _, segment, offset, length, _ in refs:
            low, high, size = bounds.get(segment, (offset, 0, 0))
            bounds[segment] = (min(low, offset), max(high, offset + length), size + length)
        blocks = {}
        for segment, (low, high, size) in bounds.items():
            if high - low <= min(2 * size, _BLOCK_BYTES):
                data = os.pread(self._descriptor(segment), high - low, low)
                if len(data) == high - low:
                    blocks[segment] = (low, data)
        return blocks

    def location(self, ref: LineRef) -> int:
        """Return a reference as one integer, for :meth:`read_at`."""
        segment = self.indexes[ref.segment].segment
        return pack_location(self.parts.index(segment.part), segment.number, ref.offset)

    def read_at(self, location: int) -> bytes:
        """Read the line at a location, without its newline."""
        part, number, offset = unpack_location(location)
        for segment, index in enumerate(self.indexes):
            if index.segment.number == number and index.segment.part == self.parts[part]:
                return read_line(self._descriptor(segment), offset)
        raise LookupError(f"no segment {number} of part {part}")

    def _descriptor(self, segment: int) -> int:
        descriptor = self._descriptors.pop(segment, -1)
        if descriptor < 0:
            if len(self._descriptors) >= 64:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            path = self.indexes[segment].segment.path
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[segment] = descriptor
        return descriptor

    def close(self) -> None:
        """Close the segments."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Run:
    """The selected lines of one segment and stage by row; its columns are loaded on demand."""

    def __init__(self, segment: int, low: int, high: int, count: int) -> None:
        self.segment = segment
        self.low = low
        self.high = high
        self.count = count
        self.keys: array[int] | None = None
        self.answered = False
        self._columns: list[array[int]] = []

    def load(self, index: SegmentIndex, selected: bytearray | None) -> None:
        """Read the columns and sort the selected lines by row."""
        rows = index.column("rows")
        if self.low > -_MOST_ROWS and self.high < _MOST_ROWS and selected is None:
            keys = [row << _ORDINAL_BITS | ordinal for ordinal, row in enumerate(rows)]
        else:
            flags: bytearray | bytes = b"\1" * len(rows) if selected is None else selected
            keys = [
                _clamped(row) << _ORDINAL_BITS | ordinal
                for ordinal, (row, flag) in enumerate(zip(rows, flags, strict=True))
                if flag
            ]
        keys.sort()
        self.keys = array("q", keys)
        names = ("rows", "answers", "offsets", "lengths", "codes")
        self._columns = [index.column(name) for name in names]
        self.answered = self._columns[1].count(0) < len(rows)

    def drop(self) -> None:
        """Free the columns: later windows do not need them."""
        self.keys = array("q")
        self._columns = []

    def count_in(self, low: int, high: int) -> int:
        """Return the number of selected lines with ``low <= row < high``."""
        keys = self.keys or array("q")
        return bisect_left(keys, high << _ORDINAL_BITS) - bisect_left(keys, low << _ORDINAL_BITS)

    def places(self, low: int, high: int) -> Iterator[LineRef]:
        """Yield the selected lines with ``low <= row < high``."""
        keys = self.keys or array("q")
        first = bisect_left(keys, low << _ORDINAL_BITS)
        last = bisect_left(keys, high << _ORDINAL_BITS, first)
        if first == last:
            return
        rows, answers, offsets, lengths, codes = self._columns
        segment = self.segment
        for key in keys[first:last]:
            n = key & _ORDINALS
            yield LineRef(rows[n], answers[n], segment, offsets[n], lengths[n], codes[n])

    def plain(self, low: int, high: int) -> Iterator[tuple[list[int], list[int], list[int], bytes]]:
        """Yield rows, offsets, lengths and codes of such lines, if all are first answers."""
        keys = self.keys or array("q")
        first = bisect_left(keys, low << _ORDINAL_BITS)
        last = bisect_left(keys, high << _ORDINAL_BITS, first)
        rows, _, offsets, lengths, codes = self._columns
        for start in range(first, last, BLOCK_LINES):
            ordinals = [key & _ORDINALS for key in keys[start : min(start + BLOCK_LINES, last)]]
            yield (
                [rows[n] for n in ordinals],
                [offsets[n] for n in ordinals],
                [lengths[n] for n in ordinals],
                bytes([codes[n] for n in ordinals]),
            )


def slices(lengths: Sequence[int], most: int = _BLOCK_BYTES) -> Iterator[slice]:
    """Yield consecutive slices of lines, each of at most ``most`` bytes or one line."""
    if sum(lengths) <= most:
        yield slice(0, len(lengths))
        return
    start = size = 0
    for end, length in enumerate(lengths):
        if end > start and size + length > most:
            yield slice(start, end)
            start, size = end, 0
        size += length
    yield slice(start, len(lengths))


def _clamped(row: int) -> int:
    """Row numbers beyond 2^38 are sorted as equal."""
    return max(-_MOST_ROWS, min(row, _MOST_ROWS))


class OutcomeLookup:
    """Finds the current outcomes of finished units, in 32 bytes of memory a line.

    Args:
        run_dir: the run directory.
        done: which units are finished.
        report: called with each broken line.
    """

    def __init__(self, run_dir: Path, done: DoneIndex, report: Report) -> None:
        self._lines = JournalReader(run_dir, report)
        self._places = HashMap(self._lines.lines)
        superseded = self._lines.superseded()
        for number, index in enumerate(self._lines.indexes):
            segment = index.segment
            base = pack_location(self._lines.parts.index(segment.part), segment.number, 0)
            lost = superseded.get(number)
            units, offsets = index.column("units"), index.column("offsets")
            for ordinal, (unit, offset) in enumerate(zip(units, offsets, strict=True)):
                if (lost is None or not lost[ordinal]) and done.has(unit):
                    self._places.add(unit, base | offset)

    def find(self, unit: int) -> int | None:
        """Return the location of a finished unit's outcome, or None."""
        return self._places.find(unit)

    def keys_of(self, stage: str) -> Iterator[int]:
        """Yield the row keys of all current outcomes of a stage with one answer a row."""
        salt = salt_of(stage, 0)
        superseded = self._lines.superseded()
        for segment, index in enumerate(self._lines.indexes):
            if stage not in index.stage_names:
                continue
            number, lost = index.stage_names.index(stage), superseded.get(segment)
            columns = zip(index.column("units"), index.column("stages"), strict=True)
            for ordinal, (unit, stage_number) in enumerate(columns):
                if stage_number == number and (lost is None or not lost[ordinal]):
                    yield unit ^ salt

    def read_at(self, location: int) -> Outcome:
        """Return the outcome at a location.

        Raises:
            msgspec.DecodeError: the line broke since.
        """
        return decode_outcome(self._lines.read_at(location))

    def close(self) -> None:
        """Close the segments."""
        self._lines.close()
