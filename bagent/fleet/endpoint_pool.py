"""Selection of the endpoint for the next request, in constant time for any number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.account import Account

CHOICES = 8
"""How many endpoints with room are compared; the least loaded is selected."""


class EndpointPool:
    """All endpoints of a fleet, and a queue of those that may have room.

    Plain round robin would let a slow endpoint collect all of a run's concurrency. So the least
    loaded of the next few is selected, and of equals the one with the fewest turns by weight.
    """

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states: list[EndpointState] = []
        self.limit = 0  # rows that all endpoints together may have in flight
        self._limits: dict[EndpointState, int] = {}
        self._by_name: dict[str, EndpointState] = {}
        self._queue: deque[EndpointState] = deque()
        self._queued: set[EndpointState] = set()
        self._parked: dict[Account, list[EndpointState]] = {}
        self.add(*states)

    @property
    def up(self) -> int:
        """How many endpoints answer."""
        return sum(1 for state in self.states if state.up)

    @property
    def available(self) -> int:
        """How many endpoints may have room."""
        return len(self._queue)

    @property
    def parked(self) -> bool:
        """Whether endpoints wait for their account."""
        return bool(self._parked)

    def get(self, name: str) -> EndpointState | None:
        """Return the endpoint of that name."""
        return self._by_name.get(name)

    def add(self, *states: EndpointState) -> None:
        """Add endpoints, with as many turns as the one that had the fewest."""
        turns = min((other.turns for other in self.states), default=0.0)
        for state in states:
            state.turns = turns
            self.states.append(state)
            self._by_name[state.name] = state
            self._limits[state] = 0
            self.update(state)

    def remove(self, state: EndpointState) -> None:
        """Remove an endpoint that has nothing in flight."""
        self.states.remove(state)
        if self._by_name.get(state.name) is state:
            del self._by_name[state.name]
        self.limit -= self._limits.pop(state)
        if state in self._queued:
            self._queued.discard(state)
            self._queue.remove(state)
        for parked in self._parked.values():
            if state in parked:
                parked.remove(state)

    def update(self, state: EndpointState) -> None:
        """Queue an endpoint that may have room again, and follow its limit."""
        limit = self._limits.get(state)
        if limit is None:
            return
        self.limit += state.limit.value - limit
        self._limits[state] = state.limit.value
        if state not in self._queued:
            self._queued.add(state)
            self._queue.append(state)

    def has_alternative(self, state: EndpointState) -> bool:
        """Return whether another endpoint is usable."""
        return any(other is not state and other.usable for other in self.states)

    def unpark(self, now: float) -> float | None:
        """Queue the endpoints whose account allows requests; return the seconds until the next."""
        soonest: float | None = None
        for account in list(self._parked):
            wait = account.wait(now, 0)
            if wait > 0:
                soonest = wait if soonest is None else min(soonest, wait)
                continue
            for state in self._parked.pop(account):
                self.update(state)
        return soonest

    def select(self, now: float, other_than: EndpointState | None = None) -> EndpointState | None:
        """Return the endpoint for the next request, None if none has room.

        It is another one than ``other_than``. Those without room leave the queue until they are
        updated; those whose account has to wait are parked.
        """
        passed: list[EndpointState] = []
        best: EndpointState | None = None
        least = 0.0
        while self._queue and len(passed) < CHOICES - 1:
            state = self._queue.popleft()
            if state is other_than:
                passed.append(state)
                continue
            if state.room <= 0:
                self._queued.discard(state)
                continue
            if state.account.wait(now, 0) > 0:
                self._queued.discard(state)
                self._parked.setdefault(state.account, []).append(state)
                continue
            load = state.load
            if best is None:
                best, least = state, load
            elif load < least or (load == least and state.turns < best.turns):
                passed.append(best)
                best, least = state, load
            else:
                passed.append(state)
        self._queue.extend(passed)
        if best is not None:
            self._queue.append(best)  # behind the others, so that equals take turns
        return best

    def skip(self, state: EndpointState) -> None:
        """Drop the endpoint that was selected last from the queue until it is updated."""
        if self._queue and self._queue[-1] is state:
            self._queue.pop()
            self._queued.discard(state)
