"""The rules by which an endpoint is called slow or failing, for summary, displays and report."""

from __future__ import annotations

from collections.abc import Mapping

SLOW = 1.5
"""An endpoint that takes more than so many times the median of the others is slow."""

FEWEST = 5
"""Successful attempts from which an endpoint is called slow, failed ones from which failing."""


def times_the_others(times: Mapping[str, float]) -> dict[str, float]:
    """Return the time of each endpoint relative to the median of the others; empty for one."""
    if len(times) < 2:
        return {}
    order = sorted(times, key=lambda name: times[name])
    middle = (len(order) - 1) // 2
    ratios = {}
    for rank, name in enumerate(order):
        others = times[order[middle if rank > middle else middle + 1]]
        if others > 0:
            ratios[name] = times[name] / others
    return ratios


def failing(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
    """Return the endpoints that fail far more often than the others, the worst first.

    Each has the share of its attempts that failed, and the share of the others'.

    Args:
        counts: attempts and failed attempts of each endpoint that serves.
    """
    if len(counts) < 2:
        return {}
    all_tries = sum(tries for tries, _ in counts.values())
    all_failed = sum(failed for _, failed in counts.values())
    shares = {}
    for name, (tries, failed) in counts.items():
        share = failed / max(1, tries)
        others = (all_failed - failed) / max(1, all_tries - tries)
        if failed >= FEWEST and share > 2 * others + 0.01:
            shares[name] = share, others
    return dict(sorted(shares.items(), key=lambda item: -item[1][0]))
