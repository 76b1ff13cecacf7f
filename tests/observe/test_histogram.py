from __future__ import annotations

import math
import random

import pytest

from bagent.observe.snapshot import LogHistogram


def exact(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_quantiles_are_within_one_percent(seed: int, share: float) -> None:
    random_ = random.Random(seed)
    values = [random_.lognormvariate(5, 2.5) for _ in range(2000)]
    histogram = LogHistogram()
    for start in range(0, len(values), 100):
        histogram.add(values[start : start + 100])
    quantile = histogram.quantile(share)
    assert quantile is not None
    true = max(0.01, exact(values, share))
    assert abs(quantile - true) <= 0.01 * true * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 6.0], (3, 3.0, 6.0)),
        ([], (0, None, None)),
        ([0.01, 1e9], (2, 500000000.005, 1e9)),
    ],
)
def test_count_mean_and_maximum_are_exact(values, expected) -> None:
    histogram = LogHistogram()
    histogram.add(values[:2])
    histogram.add(values[2:])
    found = histogram.distribution()
    assert (found.count, found.mean, found.max) == expected
    assert (found.p50 is None) == (histogram.quantile(0.5) is None) == (not values)


def test_impossible_durations_are_counted_at_the_ends() -> None:
    histogram = LogHistogram()
    histogram.add([math.nan, 5.0, -3.0, 0.0, math.inf, 1e300])
    assert histogram.count == 6
    assert histogram.quantile(0.5) == pytest.approx(0.01, rel=0.011)
    assert histogram.quantile(1.0) == pytest.approx(1e9, rel=0.011)
    assert math.isfinite(histogram.total)


def test_buckets_hold_every_value_under_their_bound() -> None:
    histogram = LogHistogram()
    values = [3.0, 40.0, 41.0, 500.0]
    histogram.add(values)
    buckets = histogram.buckets()
    assert sum(count for _, count in buckets) == 4
    for limit in (3.5, 50.0, 600.0):
        below = sum(count for bound, count in buckets if bound <= limit)
        assert below == sum(value <= limit for value in values)
