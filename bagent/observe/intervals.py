"""How sure are shares: intervals of 95 %, and the test of two runs over the same rows."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""The quantile of the normal distribution for 95 %."""

_EXACT = 10_000
"""Up to so many rows in which two runs differ McNemar's test is exact."""


def wilson(right: int, rows: int) -> tuple[float, float] | None:
    """Return the Wilson score interval of a share (Wilson 1927); None without rows."""
    if not rows:
        return None
    share, square = right / rows, Z * Z / rows
    middle = share + square / 2
    half = Z * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    scale = 1 + square
    return round(max(0.0, (middle - half) / scale), 6), round(min(1.0, (middle + half) / scale), 6)


def paired_difference(only_a: int, only_b: int, rows: int) -> tuple[float, float] | None:
    """Return the interval of the share of B less that of A over the same rows.

    The adjusted Wald interval of Agresti and Min (2005). None without rows.

    Args:
        only_a: rows where only A is right.
        only_b: rows where only B is right.
        rows: all rows.
    """
    if not rows:
        return None
    a, b, n = only_a + 0.5, only_b + 0.5, rows + 2
    middle = (b - a) / n
    half = Z * math.sqrt(a + b - (b - a) ** 2 / n) / n
    return round(max(-1.0, middle - half), 6), round(min(1.0, middle + half), 6)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p of McNemar's test: how likely is so large a difference by chance.

    Exact by the binomial distribution; for very many rows the normal one with its correction.
    """
    n, least = only_a + only_b, min(only_a, only_b)
    if not n:
        return 1.0
    if n > _EXACT:
        z = max(0.0, abs(only_a - only_b) - 1) / math.sqrt(n)
        return math.erfc(z / math.sqrt(2))
    # The logarithms of n over k: 2**-n is 0 as a float from 1,075 rows on.
    half = n * math.log(2)
    whole = math.lgamma(n + 1)
    terms = (
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) - half)
        for k in range(least + 1)
    )
    return min(1.0, 2 * math.fsum(terms))
