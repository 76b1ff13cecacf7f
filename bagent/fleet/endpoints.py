"""Which endpoint gets the next call: in constant time, however many there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bagent.fleet.endpoint_state import EndpointState

CHOICES = 8
"""Of how many endpoints with room the least busy one is taken."""


class Endpoints:
    """All endpoints of a fleet, and which of them may have room.

    By turns alone a slow endpoint would come to hold all of a run's concurrency, so the least
    busy of the next few in turn is taken. Equal ones get equal shares.

    ``limit`` is how many rows all of them may have in flight together.
    """

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states = list(states)
        self.limit = 0
        self._counted = dict.fromkeys(self.states, 0)
        self._open: deque[EndpointState] = deque()
        self._listed: set[EndpointState] = set()
        for state in self.states:
            self.changed(state)

    @property
    def up(self) -> int:
        """How many endpoints answer."""
        return sum(1 for state in self.states if state.up)

    def changed(self, state: EndpointState) -> None:
        """To be called when an endpoint may have got room, or its limit may have changed."""
        value = state.limit.value
        if value != self._counted[state]:
            self.limit += value - self._counted[state]
            self._counted[state] = value
        if state not in self._listed:
            self._listed.add(state)
            self._open.append(state)

    def next(self) -> EndpointState | None:
        """The endpoint that should take the next call, None where none has room."""
        passed: list[EndpointState] = []
        best: EndpointState | None = None
        least = 0.0
        while self._open and len(passed) < CHOICES - 1:
            state = self._open.popleft()
            if state.room <= 0:
                self._listed.discard(state)
                continue
            load = state.load
            if best is None:
                best, least = state, load
            elif load < least:
                passed.append(best)
                best, least = state, load
            else:
                passed.append(state)
            if least == 0:
                break
        self._open.extend(passed)
        if best is not None:
            self._open.append(best)  # behind those passed over, so that equal ones take turns
        return best
