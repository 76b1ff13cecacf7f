"""The rule that keeps the last rows of a run from slow endpoints."""

from __future__ import annotations

from collections import deque

WINDOW = 512
"""Requests over which the throughput of the fleet is measured."""

MIN_ENDPOINT_REQUESTS = 4
MIN_REQUESTS = 64
"""Requests of one endpoint, and of all, before an endpoint can be called slow."""

WEIGHT = 0.1
"""Weight of a new request in the running mean of latencies."""

SLOW_FACTOR = 1.5
"""An endpoint is slow if it takes at least this many times as long as the others."""

LAST_ANSWER_FACTOR = 1.5
"""The slowest of the last answers takes about this many times the mean."""


class TailRule:
    """Decides whether an endpoint is too slow for the last rows; times on the fleet's clock."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def add(self, endpoint: str, now: float, seconds: float, rows: int = 1) -> None:
        """Record that an endpoint answered a request of ``rows`` after ``seconds``."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._mean += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._mean)
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._rows -= self._ends.popleft()[1]

    def is_too_slow(self, endpoint: str, now: float, remaining: int) -> bool:
        """Return whether all others would finish the ``remaining`` rows before this endpoint
        answered one more; False while too few requests are known."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < MIN_ENDPOINT_REQUESTS or len(self._ends) < MIN_REQUESTS:
            return False
        if mean < SLOW_FACTOR * self._mean:
            return False
        others = remaining * (now - self._ends[0][0]) / self._rows
        return LAST_ANSWER_FACTOR * (mean - self._mean) > others
