"""The end of a run: a slow endpoint that would hold up all others gets nothing more. A pure object.

Who takes a row last decides when a run ends, and a row on an endpoint at a tenth of the speed may
take longer than all that is left takes on the others.
"""

from __future__ import annotations

from collections import deque

WINDOW = 512
"""Answers by which the speed of all together is measured."""

ENOUGH = 8
"""Answers of an endpoint before its time is judged."""

WEIGHT = 0.1
"""Of a new answer in the running mean of times."""

MARGIN = 1.5
"""So many times what an answer usually takes the others' last answers may come later: the longest
of them do."""


class Ending:
    """Judges who may still take rows near the end; times are on the fleet's clock."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._ends: deque[float] = deque(maxlen=WINDOW)

    def served(self, endpoint: str, now: float, seconds: float) -> None:
        """An endpoint answered a row, ``seconds`` after it was sent."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._usual += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._usual)
        self._ends.append(now)

    def is_too_slow(self, endpoint: str, now: float, left: int) -> bool:
        """Whether what the endpoint took now would come after all have done ``left`` rows more.

        False as long as too little is known.
        """
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < ENOUGH or len(self._ends) < WINDOW // 4:
            return False
        beyond = mean - MARGIN * self._usual
        return beyond > 0 and beyond > left * (now - self._ends[0]) / len(self._ends)
