"""Selection of rows: sample, limit and shard."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack

from bagent.types import Row


def draw(key: int, seed: int) -> int:
    """Return 64 pseudo-random bits from a row's key and the seed."""
    lot = blake2b(pack(">Q", key), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(lot, "big")


class RowSample:
    """The ``size`` rows with the lowest lots: even, and independent of the order of the rows.

    All rows are shown once to find the highest lot that is in, then again to be picked; only
    ``size`` numbers are held. A larger sample of the same seed holds the smaller one.

    Args:
        size: rows to draw, 1 or more.
        seed: another seed draws other rows.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._lots: list[int] = []  # the lowest, negated: heapq keeps the lowest in front
        self._remaining = size

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows in the first pass."""
        lots, seed = self._lots, self._seed
        for row in rows:
            lot = -draw(row.key, seed)
            if len(lots) < self._size:
                heapq.heappush(lots, lot)
            elif lot > lots[0]:
                heapq.heapreplace(lots, lot)

    def select(self, rows: list[Row]) -> list[Row]:
        """Return the drawn ones of ``rows``, in the second pass."""
        if not self._lots:
            return []
        highest, seed = -self._lots[0], self._seed
        drawn = [row for row in rows if draw(row.key, seed) <= highest][: self._remaining]
        self._remaining -= len(drawn)
        return drawn


def limited(batches: Iterator[list[Row]], limit: int) -> Iterator[list[Row]]:
    """Yield the first ``limit`` rows; then nothing more is read."""
    remaining = limit
    while remaining:
        rows = next(batches, None)
        if rows is None:
            return
        rows = rows[:remaining]
        remaining -= len(rows)
        yield rows


def shard_positions(keys: Sequence[int], shard: tuple[int, int] | None) -> Sequence[int]:
    """Return the indexes of the keys in the shard of :func:`in_shard`; None: all rows."""
    if shard is None:
        return range(len(keys))
    part, parts = shard
    remainder = part - 1
    return [at for at, key in enumerate(keys) if key % parts == remainder]


def in_shard(rows: list[Row], shard: tuple[int, int]) -> list[Row]:
    """Return the rows of part ``i`` of ``n`` (from 1): a row's part follows from its key alone."""
    part, parts = shard
    return [row for row in rows if row.key % parts == part - 1]
