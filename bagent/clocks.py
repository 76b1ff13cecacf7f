"""Unix timestamps whose differences are not affected by changes of the system clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyUnix:
    """A clock in Unix seconds: the wall clock at construction plus monotonic time since then.

    A change of the wall clock (NTP, suspend) does not show up as latency. Use the wall clock for
    comparisons with external times (``Retry-After``, deadlines, file times).

    Args:
        wall: Unix seconds.
        steady: monotonic seconds.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady = steady
        self._offset = wall() - steady()

    def __call__(self) -> float:
        """Return the current time."""
        return self._offset + self._steady()


unix = SteadyUnix()
"""The clock of this process."""
