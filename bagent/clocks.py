"""Unix seconds of which the differences are right, whatever happens to the machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyUnix:
    """Stamps in Unix seconds: the wall clock as it was when this was made, and the monotonic
    seconds since.

    A wall clock that is set (by NTP, by hand, after a suspend) would show as hours of latency or
    as less than none; what is between two of these stamps is what has passed. What is compared
    with dates of others (``Retry-After``, deadlines, the times of files) needs the wall clock.

    Args:
        wall: Unix seconds.
        steady: seconds of a clock that is never set.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady = steady
        self._offset = wall() - steady()

    def __call__(self) -> float:
        """The stamp of now."""
        return self._offset + self._steady()


unix = SteadyUnix()
"""The stamps of this process."""
