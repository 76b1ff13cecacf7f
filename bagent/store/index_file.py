"""The file that keeps the index of a segment: magic line, header, columns, ascending units."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from bagent.store.codec import Brief
from bagent.types import Outcome

MAGIC = b"bagent-index-1\n"
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
"""Bytes of one line over all columns."""


class Totals(msgspec.Struct):
    """Sums over all lines of a segment; ``unknown`` counts lines without token counts."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    cost: float = 0.0
    costed: int = 0
    unknown: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, line: Brief | Outcome) -> None:
        """Count one line."""
        prompt, completion = line.prompt_tokens, line.completion_tokens
        if prompt is None and completion is None:
            self.unknown += 1
        else:
            self.prompt += prompt or 0
            self.completion += completion or 0
            if line.cached_tokens:
                self.cached += line.cached_tokens
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
    """What an index file says of itself.

    ``size`` is how many bytes of the segment it covers, ``ok`` how many ascending units follow the
    columns; a file of an earlier version has none and -1 here.
    """

    size: int
    mtime_ns: int
    tail: str
    byteorder: str
    count: int
    lines: int
    stages: list[str]
    ranges: list[tuple[int, int, int]]
    totals: Totals
    broken: int
    ok: int = -1


def read_header(handle: BinaryIO) -> tuple[Header, int] | None:
    """The header of an index file and the byte where its columns begin; None if it is none.

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
    """What tells a file from another one that took its place."""
    found = os.fstat(handle.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


class Numbers(Sequence[int]):
    """64-bit numbers in a file, from byte ``base`` on."""

    def __init__(self, descriptor: int, base: int, count: int) -> None:
        self._descriptor = descriptor
        self._base = base
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        data = os.pread(self._descriptor, 8, self._base + 8 * at)
        return int.from_bytes(data, sys.byteorder)
