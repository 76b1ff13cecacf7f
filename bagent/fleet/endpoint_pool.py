"""Which endpoint gets the next request: in constant time, however many there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.account import Account

CHOICES = 8
"""Of how many endpoints with room the least busy one is taken."""


class Endpoints:
    """All endpoints of a fleet, and which of them may have room.

    By turns alone a slow endpoint would come to hold all of a run's concurrency, so the least
    busy of the next few in turn is taken. Equal ones get equal shares; of those equally busy the
    one goes first that had the fewest turns for its weight.

    ``limit`` is how many rows all of them may have in flight together.
    """

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states: list[EndpointState] = []
        self.limit = 0
        self._counted: dict[EndpointState, int] = {}
        self._by_name: dict[str, EndpointState] = {}
        self._open: deque[EndpointState] = deque()
        self._listed: set[EndpointState] = set()
        self._parked: dict[Account, list[EndpointState]] = {}
        self.add(*states)

    @property
    def up(self) -> int:
        """How many endpoints answer."""
        return sum(1 for state in self.states if state.up)

    @property
    def open(self) -> int:
        """How many endpoints may have room."""
        return len(self._open)

    def named(self, name: str) -> EndpointState | None:
        """The endpoint of that name."""
        return self._by_name.get(name)

    def add(self, *states: EndpointState) -> None:
        """Take in endpoints; they begin level with the others."""
        level = min((other.turns for other in self.states), default=0.0)
        for state in states:
            state.turns = level
            self.states.append(state)
            named = self._by_name.get(state.name)
            if named is None or named.leaving:  # one that came back, or has other tags now
                self._by_name[state.name] = state
            self._counted[state] = 0
            self.changed(state)

    def remove(self, state: EndpointState) -> None:
        """Forget an endpoint; it must have nothing in flight."""
        self.states.remove(state)
        if self._by_name.get(state.name) is state:
            del self._by_name[state.name]
        self.limit -= self._counted.pop(state)
        if state in self._listed:
            self._listed.discard(state)
            self._open.remove(state)
        for parked in self._parked.values():
            if state in parked:
                parked.remove(state)

    def changed(self, state: EndpointState) -> None:
        """To be called when an endpoint may have got room, or its limit may have changed."""
        counted = self._counted.get(state)
        if counted is None:
            return
        value = state.limit.value
        if value != counted:
            self.limit += value - counted
            self._counted[state] = value
        if state not in self._listed:
            self._listed.add(state)
            self._open.append(state)

    def others(self, state: EndpointState) -> bool:
        """Whether another endpoint may be sent something, or may soon."""
        return any(other is not state and other.usable for other in self.states)

    def unpark(self, now: float) -> float | None:
        """List again the endpoints whose account may be asked; seconds until the next may."""
        soonest: float | None = None
        for account in list(self._parked):
            wait = account.wait(now, 0)
            if wait > 0:
                soonest = wait if soonest is None else min(soonest, wait)
                continue
            for state in self._parked.pop(account):
                self.changed(state)
        return soonest

    def next(self, now: float) -> EndpointState | None:
        """The endpoint that should take the next request, None where none has room."""
        passed: list[EndpointState] = []
        best: EndpointState | None = None
        least = 0.0
        while self._open and len(passed) < CHOICES - 1:
            state = self._open.popleft()
            if state.room <= 0:
                self._listed.discard(state)
                continue
            if state.account.wait(now, 0) > 0:
                self._listed.discard(state)
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
        self._open.extend(passed)
        if best is not None:
            self._open.append(best)  # behind those passed over, so that equal ones take turns
        return best

    def pass_over(self, state: EndpointState) -> None:
        """Leave out the endpoint that :meth:`next` gave last, until it changes."""
        if self._open and self._open[-1] is state:
            self._open.pop()
            self._listed.discard(state)

    @property
    def parked(self) -> bool:
        """Whether endpoints wait for their account."""
        return bool(self._parked)
