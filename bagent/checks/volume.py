"""The first rows, and how many there are: counted where that is quick, else estimated by bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from bagent.types import Row

COUNT_BYTES = 16 << 20
COUNT_ROWS = 200_000
"""Reading stops past either: about a second. What is smaller is counted to its end."""


class Source(Protocol):
    """Where rows come from: a :class:`bagent.rows.RowSource`."""

    def batches(self) -> Iterable[list[Row]]:
        """All rows, in lists."""
        ...

    def progress(self) -> tuple[int, int | None]:
        """How many bytes were read, and of how many; None where no one can know."""
        ...


class Volume(msgspec.Struct, frozen=True):
    """``rows`` of the job. ``how``: ``counted``, ``about`` (by bytes), or ``at least``."""

    rows: int
    how: str


def measure(
    source: Source, keep: int, *, limit: int | None = None, piped: bool = False
) -> tuple[list[Row], Volume]:
    """The first ``keep`` rows of ``source`` and how many it has.

    Args:
        limit: the rows that are delivered at most.
        piped: rows come as they are made: read no more than are kept.
    """
    kept: list[Row] = []
    rows = before = 0
    for batch in source.batches():
        position, size = source.progress()
        enough = len(kept) >= keep
        if enough and piped:
            return kept, Volume(rows, "at least")
        if position > before:
            # This batch begins with the block just read: the rows so far took what was before it.
            if enough and (before > COUNT_BYTES or rows > COUNT_ROWS):
                return kept, _estimate(rows, before, size, limit)
            before = position
        elif enough and not position and rows > COUNT_ROWS:
            return kept, Volume(rows, "at least")
        rows += len(batch)
        if not enough:
            kept.extend(batch[: keep - len(kept)])
        if piped and rows > keep:
            return kept, Volume(rows, "at least")
    return kept, Volume(rows, "counted")


def _estimate(rows: int, read: int, size: int | None, limit: int | None) -> Volume:
    if size is None:
        return Volume(rows, "at least")
    total = max(rows, round(rows * size / read))
    if limit is not None and total >= limit:
        return Volume(limit, "counted")
    return Volume(_rounded(total), "about")


def _rounded(number: int) -> int:
    """Three significant digits: more would promise what an estimate cannot hold."""
    step = int("1" + "0" * max(0, len(str(number)) - 3))
    return round(number / step) * step
