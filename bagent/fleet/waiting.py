"""Calls that hold no slot: ready ones, those that sleep until their next try, those in limbo."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from bagent.fleet.call import Call, Delivery
from bagent.types import Failure

Held = tuple[Call, Failure, Delivery]
"""A call that found no server: whether that costs it a try is known once a probe is back."""


class Waiting:
    """The fleet's waiting rooms. Times are on the fleet's monotonic clock."""

    def __init__(self) -> None:
        self._ready: deque[Call] = deque()
        self._urgent: deque[Call] = deque()
        self._sleeping: list[tuple[float, int, Call]] = []
        self._limbo: dict[str, list[Held]] = {}
        self._in_limbo = 0
        self._serial = itertools.count()

    @property
    def ready(self) -> int:
        """Calls that may be sent now."""
        return len(self._ready) + len(self._urgent)

    @property
    def asleep(self) -> int:
        """Calls that wait for their next try, or for a probe."""
        return len(self._sleeping) + self._in_limbo

    def add(self, call: Call, *, urgent: bool) -> None:
        """Take a call that may be sent now; urgent ones go first."""
        (self._urgent if urgent else self._ready).append(call)

    def sleep(self, call: Call, due: float) -> None:
        """Take a call that may be sent from ``due`` on."""
        call.ready_at = due
        heapq.heappush(self._sleeping, (due, next(self._serial), call))

    def hold(self, endpoint: str, held: Held) -> None:
        """Take a call until a probe of ``endpoint`` is back."""
        self._limbo.setdefault(endpoint, []).append(held)
        self._in_limbo += 1

    def release(self, endpoint: str) -> list[Held]:
        """Hand out the calls held for ``endpoint``."""
        held = self._limbo.pop(endpoint, [])
        self._in_limbo -= len(held)
        return held

    def wake(self, now: float) -> None:
        """Make the calls whose time has come ready; they are urgent."""
        while self._sleeping and self._sleeping[0][0] <= now:
            self._urgent.append(heapq.heappop(self._sleeping)[2])

    @property
    def next_due(self) -> float | None:
        """When the next sleeping call wakes, None if none sleeps."""
        return self._sleeping[0][0] if self._sleeping else None

    def next(self) -> Call:
        """The next ready call; there must be one."""
        return (self._urgent or self._ready).popleft()

    def overdue(self, now: float) -> list[Call]:
        """Hand out sleeping and ready calls whose own time limit is over."""
        late = [c for _, _, c in self._sleeping if c.give_up_at is not None and c.give_up_at <= now]
        if late:
            gone = set(map(id, late))
            self._sleeping = [entry for entry in self._sleeping if id(entry[2]) not in gone]
            heapq.heapify(self._sleeping)
        for queue in (self._urgent, self._ready):
            found = [c for c in queue if c.give_up_at is not None and c.give_up_at <= now]
            for call in found:
                queue.remove(call)
            late.extend(found)
        return late

    def clear(self) -> int:
        """Forget all; returns how many calls there were."""
        count = self.ready + self.asleep
        self._ready.clear()
        self._urgent.clear()
        self._sleeping.clear()
        self._limbo.clear()
        self._in_limbo = 0
        return count
