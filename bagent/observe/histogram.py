"""Quantiles of a stream of durations in fixed memory.

The buckets are those of DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable
quantile sketch with relative-error guarantees", PVLDB 12(12), 2019): bucket i holds the values
between g^(i-1) and g^i with g = (1 + a) / (1 - a), and answering 2 g^i / (g + 1) for all of them is
wrong by at most the share a. Its package on PyPI takes longer for one value than a whole row may
cost, so the few lines are here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagent.observe.snapshot import Distribution

_LOWEST_MS = 0.01
_HIGHEST_MS = 1e9


def _clamp(value: float) -> float:
    # A comparison with NaN is false, so NaN takes the last branch.
    if value > _HIGHEST_MS:
        return _HIGHEST_MS
    return value if value >= _LOWEST_MS else _LOWEST_MS


class LogHistogram:
    """Counts of positive values in logarithmic buckets; 1,267 integers by default.

    Values under 0.01 ms (also NaN) fall in the lowest bucket, values over 1e9 ms (11 days) in
    the highest.

    Args:
        relative_error: the share by which a quantile may be wrong, e.g. 0.01.
    """

    __slots__ = ("_counts", "_gamma", "_scale", "_shift", "largest", "total")

    def __init__(self, relative_error: float = 0.01) -> None:
        self._gamma = (1 + relative_error) / (1 - relative_error)
        self._scale = 1 / math.log(self._gamma)
        # Places start at 1, so that cutting off the fraction is rounding down.
        self._shift = 1 - math.floor(math.log(_LOWEST_MS) * self._scale)
        highest = math.floor(math.log(_HIGHEST_MS) * self._scale)
        self._counts = [0] * (highest + self._shift + 1)
        self.total = 0.0
        self.largest = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count values in milliseconds."""
        if not values:
            return
        total = sum(values)
        # A NaN hides from min and max, but never from the sum.
        if min(values) < _LOWEST_MS or max(values) > _HIGHEST_MS or math.isnan(total):
            values = [_clamp(value) for value in values]
            total = sum(values)
        counts, scale, shift = self._counts, self._scale, self._shift
        for power in map(math.log, values):
            counts[int(power * scale + shift)] += 1
        self.total += total
        self.largest = max(self.largest, *values)

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self._counts)

    def _upper(self, place: int) -> float:
        return float(self._gamma ** (place - self._shift + 1))

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` (0 to 1) of all values do not exceed; None when empty."""
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(2 * self._upper(place) / (self._gamma + 1), self.largest)
        return None

    def buckets(self) -> list[tuple[float, int]]:
        """Non-empty buckets as (upper bound in milliseconds, count), rising."""
        return [(self._upper(place), n) for place, n in enumerate(self._counts) if n]

    def distribution(self) -> Distribution:
        """Mean, median, 99th percentile and maximum, for a snapshot."""
        count = self.count
        if not count:
            return Distribution(count=0)
        return Distribution(
            count=count,
            mean=self.total / count,
            p50=self.quantile(0.5),
            p99=self.quantile(0.99),
            max=self.largest,
        )
