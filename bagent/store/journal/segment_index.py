"""The index of one segment: the fields and the offset of each line.

Format of the ``.idx`` file beside a segment: a magic line, a JSON header, one array per column,
and the units of the ok lines in ascending order. The header says how many bytes of the segment it
covers; later lines are read from the segment. An index that does not match its segment is rebuilt.
"""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from bagent.files import open_regular, write_atomic
from bagent.store.journal.codec import (
    OK_CODE,
    OutcomeHeader,
    code_of,
    codes_of,
    decode_brief,
    salt_of,
)
from bagent.store.journal.segments import Report, Segment, pack_location, whole_lines
from bagent.types import Outcome

MAGIC = b"bagent-index-2\n"
COLUMNS: dict[str, str] = {
    "units": "Q",
    "requests": "Q",
    "rows": "q",
    "offsets": "I",
    "lengths": "I",
    "answers": "I",
    "stages": "H",
    "codes": "B",
}
"""Columns and their array type codes. ``requests`` is 0 where no request was sent."""

WIDTH = sum(array(code).itemsize for code in COLUMNS.values())
"""Bytes of one line in all columns."""

SMALL = 1000
"""Up to so many lines, columns are read when the index file is opened: opening it again for each of
them takes longer, the more so on a shared file system."""


class SegmentTotals(msgspec.Struct):
    """Sums over all lines of a segment; ``unknown`` counts lines without token counts."""

    prompt: int = 0
    cached: int = 0
    cached_of: int = 0
    """Prompt tokens of the lines that say how many were cached."""
    completion: int = 0
    reasoning: int = 0
    cost: float = 0.0
    costed: int = 0
    unknown: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, lines: Iterable[OutcomeHeader | Outcome]) -> None:
        """Count lines."""
        for line in lines:
            prompt, completion = line.prompt_tokens, line.completion_tokens
            if prompt is None and completion is None:
                self.unknown += 1
            else:
                self.prompt += prompt or 0
                self.completion += completion or 0
                if line.cached_tokens is not None:
                    self.cached += line.cached_tokens
                    self.cached_of += prompt or 0
                if line.reasoning_tokens:
                    self.reasoning += line.reasoning_tokens
            if line.cost_usd is not None:
                self.cost += line.cost_usd
                self.costed += 1
            if line.finished_at is not None:
                if self.first is None:
                    self.first = line.finished_at
                self.last = line.finished_at


class Header(msgspec.Struct):
    """The header of an index file.

    ``size`` is how many bytes of the segment it covers; ``ok`` how many ascending units follow the
    columns, -1 in files of earlier versions, which have none.
    """

    size: int
    mtime_ns: int
    tail: str
    byteorder: str
    count: int
    lines: int
    stages: list[str]
    ranges: list[tuple[int, int, int]]
    totals: SegmentTotals
    broken: int
    ok: int = -1


def read_header(handle: BinaryIO) -> tuple[Header, int] | None:
    """Return the header of an index file and the offset of its columns; None if it is none.

    Raises:
        msgspec.DecodeError: the header is damaged.
    """
    if handle.read(len(MAGIC)) != MAGIC:
        return None
    size = int.from_bytes(handle.read(8), "little")
    header = msgspec.json.decode(handle.read(min(size, 1 << 26)), type=Header)
    base = len(MAGIC) + 8 + size
    end = base + WIDTH * header.count + 8 * max(0, header.ok)
    if header.byteorder != sys.byteorder or os.fstat(handle.fileno()).st_size != end:
        return None
    return header, base


def identity(handle: BinaryIO) -> tuple[int, int, int]:
    """Return what distinguishes a file from its replacement."""
    status = os.fstat(handle.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


class Numbers(Sequence[int]):
    """64-bit numbers in a file, from offset ``base``."""

    def __init__(self, descriptor: int, base: int, count: int) -> None:
        self._descriptor = descriptor
        self._base = base
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        data = os.pread(self._descriptor, 8, self._base + 8 * at)
        return int.from_bytes(data, sys.byteorder)


_TAIL = 4096
_IS_OK = bytes([1]) + bytes(255)


class _Layout(NamedTuple):
    """An index file: the offset and length of its columns, its ascending units (-1: none)."""

    base: int
    lines: int
    ok: int
    identity: tuple[int, int, int]


class SegmentIndex:
    """The index of one segment, with its columns in memory or still in the index file.

    ``covered`` is how many bytes of the segment it describes, ``lines`` how many lines, including
    broken ones. ``stage_names`` are the stages in the order of their first line.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.covered = 0
        self.lines = 0
        self.broken = 0
        self.stage_names: list[str] = []
        self.totals = SegmentTotals()
        self._count = 0
        self._layout = _Layout(-1, 0, -1, (0, 0, 0))
        self._ascending: tuple[int, array[int]] = 0, array("Q")
        self._arrays: dict[str, array[int]] | None = None
        self._hold({name: array(code) for name, code in COLUMNS.items()})
        self._stage_numbers: dict[str, int] = {}
        self._ranges: list[tuple[int, int, int]] | None = None

    def __len__(self) -> int:
        """Return the number of sound lines."""
        return self._count

    def add(self, line: OutcomeHeader | Outcome, offset: int, length: int) -> None:
        """Add a line of ``length`` bytes (with newline) at ``offset``.

        Raises:
            ValueError: the key is not 16 hex digits, a number out of range, the status unknown.
        """
        stage = line.stage
        answer = line.answer
        number = self._stage_numbers.get(stage)
        if number is None:
            number = self._new_stage(stage)
        if self._arrays is None:
            self.columns()
        units, requests, rows, offsets, lengths, answers, stages, codes = self._appends
        try:
            code = code_of(line.status, line.error_kind)
            requests(int(line.request_hash, 16) if line.request_hash else 0)
            rows(line.row)
            answers(answer)
            units(int(line.key, 16) ^ salt_of(stage, answer))
        except (OverflowError, ValueError, KeyError, TypeError) as error:
            for column in self.columns().values():
                del column[self._count :]
            raise ValueError(f"not a sound outcome: {error}") from error
        offsets(offset)
        lengths(length)
        stages(number)
        codes(code)
        self.totals.add((line,))
        self._count += 1
        self.lines += 1
        self.covered = offset + length

    def add_all(
        self, outcomes: Sequence[Outcome], offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Add the lines of outcomes, which are sound; arguments as for :meth:`add`."""
        columns, numbers = self.columns(), self._stage_numbers
        stages = [o.stage for o in outcomes]
        for stage in dict.fromkeys(stages):
            if stage not in numbers:
                self._new_stage(stage)
        columns["units"].extend([int(o.key, 16) ^ salt_of(o.stage, o.answer) for o in outcomes])
        hashes = [o.request_hash for o in outcomes]
        columns["requests"].extend([int(text, 16) if text else 0 for text in hashes])
        columns["rows"].extend([o.row for o in outcomes])
        columns["offsets"].extend(offsets)
        columns["lengths"].extend(lengths)
        columns["answers"].extend([o.answer for o in outcomes])
        columns["stages"].extend([numbers[stage] for stage in stages])
        columns["codes"].extend(codes_of(outcomes))
        self.totals.add(outcomes)
        self._count += len(outcomes)
        self.lines += len(outcomes)
        self.covered = offsets[-1] + lengths[-1]

    def _new_stage(self, stage: str) -> int:
        number = len(self.stage_names)
        if number >= 1 << 16:
            raise ValueError("too many stages in one segment")
        self._stage_numbers[stage] = number
        self.stage_names.append(stage)
        return number

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return the smallest row, largest row and number of lines of each stage."""
        if self._ranges is None or sum(r[2] for r in self._ranges) != self._count:
            self._ranges = self._find_ranges()
        return self._ranges

    def _find_ranges(self) -> list[tuple[int, int, int]]:
        rows, stages = self.column("rows"), self.column("stages")
        if len(self.stage_names) == 1:
            return [(min(rows), max(rows), len(rows))] if rows else [(0, 0, 0)]
        ranges = [(1 << 63, -1 << 63, 0)] * len(self.stage_names)
        for row, stage in zip(rows, stages, strict=True):
            low, high, count = ranges[stage]
            ranges[stage] = (min(low, row), max(high, row), count + 1)
        return ranges

    def columns(self) -> dict[str, array[int]]:
        """Return all columns, read from the index file on first use."""
        if self._arrays is None:
            return self._hold({name: self.column(name) for name in COLUMNS})
        return self._arrays

    def _hold(self, arrays: dict[str, array[int]]) -> dict[str, array[int]]:
        self._arrays = arrays
        self._appends = [column.append for column in arrays.values()]
        return arrays

    def column(self, name: str) -> array[int]:
        """Return one column; if it is read from the index file, it is not cached."""
        if self._arrays is not None:
            return self._arrays[name]
        values = array(COLUMNS[name])
        with self.segment.sidecar.open("rb", buffering=0) as handle:
            layout = self._layout_now(handle)
            start = layout.base
            for other, code in COLUMNS.items():
                if other == name:
                    break
                start += array(code).itemsize * layout.lines
            handle.seek(start)
            values.frombytes(handle.read(values.itemsize * self._count))
        if len(values) != self._count:
            raise EOFError(f"{self.segment.sidecar} is cut off")
        return values

    def ok_locations(self, column: str, part: int) -> Iterator[tuple[int, int]]:
        """Yield each number of a column that is not 0 with the location of its line, if it is ok.

        Args:
            column: the name of the column.
            part: the number of the part in locations, as in :func:`pack_location`.
        """
        base = pack_location(part, self.segment.number, 0)
        columns = self.column(column), self.column("codes"), self.column("offsets")
        for value, code, offset in zip(*columns, strict=True):
            if code == OK_CODE and value:
                yield value, base | offset

    def _layout_now(self, handle: BinaryIO) -> _Layout:
        """Return the layout of the current file: its writer may have replaced it by a longer one,
        which begins with the same lines."""
        if identity(handle) == self._layout.identity:
            return self._layout
        result = read_header(handle)
        if result is None or result[0].count < self._count:
            raise EOFError(f"{self.segment.sidecar} was changed meanwhile")
        return _Layout(result[1], result[0].count, result[0].ok, identity(handle))

    @property
    def failures(self) -> bool:
        """Whether any line is not ok."""
        if self._arrays is None and self._layout.ok >= 0:
            return self._layout.ok < self._count
        codes = self.column("codes")
        return codes.count(OK_CODE) < len(codes)

    def ok_units(self, low: int = 0, high: int = 1 << 64) -> array[int]:
        """Return the units of ok lines with ``low <= unit < high``, ascending, with repeats."""
        if self._arrays is None and self._layout.ok >= 0:
            return self._read_ok(low, high)
        count, ascending = self._ascending
        if count != self._count:
            ascending = self._sort_ok()
        return ascending[bisect_left(ascending, low) : bisect_left(ascending, high)]

    def _sort_ok(self) -> array[int]:
        ok = self.column("codes").tobytes().translate(_IS_OK)
        ascending = array("Q", sorted(compress(self.column("units"), ok)))
        self._ascending = self._count, ascending
        return ascending

    def _read_ok(self, low: int, high: int) -> array[int]:
        values = array("Q")
        with self.segment.sidecar.open("rb", buffering=0) as handle:
            layout = self._layout_now(handle)
            base = layout.base + layout.lines * WIDTH
            numbers = Numbers(handle.fileno(), base, layout.ok)
            start = bisect_left(numbers, low) if low else 0
            end = bisect_left(numbers, high, start) if high < 1 << 64 else len(numbers)
            values.frombytes(os.pread(handle.fileno(), 8 * (end - start), base + 8 * start))
        if len(values) != end - start:
            raise EOFError(f"{self.segment.sidecar} is cut off")
        return values

    def scan(self, end: int, report: Report) -> None:
        """Read the lines from the end of this index to byte ``end`` of the segment.

        Broken lines are reported with file and line number and left out. Zero bytes before a line
        are skipped.
        """
        with self.segment.path.open("rb") as handle:
            for offset, line in whole_lines(handle, self.covered, end):
                self._scan_line(offset, line, report)

    def _scan_line(self, offset: int, line: bytes, report: Report) -> None:
        length = len(line) + 1
        sound = line.lstrip(b"\0")
        try:
            if sound:
                start = offset + len(line) - len(sound)
                self.add(decode_brief(sound), start, len(sound) + 1)
                return
            if not line:
                self.lines += 1
                self.covered = offset + length
                return
        except (msgspec.DecodeError, ValueError, KeyError, OverflowError):
            pass
        self.lines += 1
        self.broken += 1
        self.covered = offset + length
        report(f"{self.segment.path}:{self.lines}: broken line of {len(line)} bytes, left out")

    def save(self) -> None:
        """Write the index file; an error is ignored, since the index can be rebuilt."""
        columns = self.columns()
        ascending = self.ok_units()
        header = msgspec.json.encode(
            Header(
                size=self.covered,
                mtime_ns=_mtime_ns(self.segment.path),
                tail=_tail_hash(self.segment.path, self.covered),
                byteorder=sys.byteorder,
                count=self._count,
                lines=self.lines,
                stages=self.stage_names,
                ranges=self.ranges(),
                totals=self.totals,
                broken=self.broken,
                ok=len(ascending),
            )
        )
        start = MAGIC + len(header).to_bytes(8, "little") + header
        arrays = (*(columns[name] for name in COLUMNS), ascending)
        with contextlib.suppress(OSError):
            write_atomic(self.segment.sidecar, start, *(values.tobytes() for values in arrays))

    def _load(self, handle: BinaryIO, size: int) -> bool:
        result = read_header(handle)
        if result is None:
            return False
        header, base = result
        if header.size > size:
            return False
        if header.size == size and header.mtime_ns != _mtime_ns(self.segment.path):
            return False
        if header.tail != _tail_hash(self.segment.path, header.size):
            return False
        self.covered, self.lines, self.broken = header.size, header.lines, header.broken
        self.stage_names, self._ranges, self.totals = header.stages, header.ranges, header.totals
        self._stage_numbers = {name: number for number, name in enumerate(header.stages)}
        self._count, self._arrays = header.count, None
        self._layout = _Layout(base, header.count, header.ok, identity(handle))
        if header.count <= SMALL:
            self._hold(_split_columns(handle.read(WIDTH * header.count), header.count))
        return True


def _split_columns(data: bytes, count: int) -> dict[str, array[int]]:
    """Return the columns of ``count`` lines, which follow one another in ``data``."""
    columns, start = {}, 0
    for name, code in COLUMNS.items():
        column = columns[name] = array(code)
        end = start + column.itemsize * count
        column.frombytes(data[start:end])
        start = end
    return columns


def open_index(segment: Segment, report: Report, *, save: bool = False) -> SegmentIndex:
    """Return the index of a segment: from its index file if that matches, else by reading it.

    Args:
        segment: the segment.
        report: called with each broken line, as ``FILE:LINE: ...``.
        save: write the index file if it was missing or too short.
    """
    size = segment.path.stat().st_size
    index = SegmentIndex(segment)
    try:
        with open_regular(segment.sidecar) as handle:
            if not index._load(handle, size):
                index = SegmentIndex(segment)
    except (OSError, msgspec.DecodeError):
        index = SegmentIndex(segment)
    if index.covered < size:
        before = index.covered
        index.scan(size, report)
        if save and index.covered > before:
            index.save()
    return index


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _tail_hash(path: Path, size: int) -> str:
    start = max(0, size - _TAIL)
    try:
        with path.open("rb") as handle:
            handle.seek(start)
            return blake2b(handle.read(size - start), digest_size=8).hexdigest()
    except OSError:
        return ""
