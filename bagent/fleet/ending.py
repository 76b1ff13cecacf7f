"""The end of a run: a slow endpoint that would hold up all others gets nothing more. A pure object.

Who takes a row last decides when a run ends, and a row on an endpoint at a tenth of the speed may
take longer than all that is left takes on the others.
"""

from __future__ import annotations

from collections import deque

WINDOW = 512
"""Requests by which the speed of all together is measured."""

ENOUGH = 4
"""Requests of an endpoint before its time is judged."""

SOME = 64
"""Requests of all before any is."""

WEIGHT = 0.1
"""Of a new request in the running mean of times."""

SLOWER = 1.5
"""Only an endpoint that takes so many times what others take is slow: means are not exact."""

MARGIN = 1.5
"""The last answers, here as there, take so many times what answers take on average: the longest
of some decides."""


class Ending:
    """Judges who may still take rows near the end; times are on the fleet's clock."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def served(self, endpoint: str, now: float, seconds: float, rows: int = 1) -> None:
        """An endpoint answered a request of ``rows``, ``seconds`` after it was sent."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._usual += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._usual)
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._rows -= self._ends.popleft()[1]

    def is_too_slow(self, endpoint: str, now: float, left: int) -> bool:
        """Whether what the endpoint took now would come after all have done ``left`` rows more.

        False as long as too little is known.
        """
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < ENOUGH or len(self._ends) < SOME or mean < SLOWER * self._usual:
            return False
        others = left * (now - self._ends[0][0]) / self._rows
        return MARGIN * (mean - self._usual) > others
