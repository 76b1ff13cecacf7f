"""How fast a tool may be started, and how long its runs took."""

from __future__ import annotations

import asyncio
import math
from collections import deque

import msgspec

HISTORY = 1024


class Pace:
    """A token bucket of one token: runs start at least ``1 / rate`` seconds apart.

    More tokens would let a burst through after a quiet time, and with it more calls in a second
    than the job allows. Time is the event loop's.
    """

    def __init__(self, rate: float | None) -> None:
        self._gap = 1 / rate if rate else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when a run may start; waiters go in their order, and cost nothing if cancelled."""
        if not self._gap:
            return
        clock = asyncio.get_running_loop().time
        async with self._turn:
            wait = self._next - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            self._next = max(self._next, clock()) + self._gap


class Latency(msgspec.Struct, frozen=True):
    """How long runs of a tool took: percentiles in milliseconds over the last 1,024."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class LatencyHistory:
    """The last 1,024 durations of one tool's runs."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=HISTORY)
        self._count = 0

    def add(self, milliseconds: float) -> None:
        """Note one run."""
        self._last.append(milliseconds)
        self._count += 1

    def look(self) -> Latency | None:
        """The percentiles (nearest rank); None before the first run."""
        if not self._last:
            return None
        values = sorted(self._last)

        def rank(share: float) -> float:
            return values[math.ceil(share * len(values)) - 1]

        return Latency(self._count, rank(0.5), rank(0.9), rank(0.99))
