"""The way in which a run chooses endpoints, for a load test: the fleet's own objects, told of each
request that begins and ends."""

from __future__ import annotations

from collections.abc import Mapping

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.endpoints import Endpoints
from bagent.fleet.limiter import InFlightLimit
from bagent.fleet.picking import MUCH_BUSIER
from bagent.runs.fleets import OWN_CEILING, OWN_START


class RunRouter:
    """Chooses among endpoints by turns and load, as a run does: the least busy of the next few.

    A conversation goes on where it was answered last, unless that endpoint is much busier. No
    endpoint gets more than its limit, which a run finds by itself (here by its answers alone:
    queues of engines are not looked at).

    Args:
        endpoints: by their place in the list of targets.
        limit: requests in flight at each, where a closed loop names them.
        parts: workers that share the limits of an open one.
    """

    def __init__(
        self, endpoints: Mapping[int, Endpoint], limit: int | None = None, parts: int = 1
    ) -> None:
        self._places = {endpoint.name: place for place, endpoint in endpoints.items()}
        self._states: dict[int, EndpointState] = {}
        for place, endpoint in endpoints.items():
            start = limit or max(1, OWN_START // parts)
            top = limit or max(1, OWN_CEILING // parts)
            own = InFlightLimit(start, top, growing=limit is None)
            self._states[place] = EndpointState(endpoint, own)
        self._endpoints = Endpoints(list(self._states.values()))

    def next(self, home: int | None = None) -> int | None:
        """The place that should take the next request; None where none has room."""
        state = self._endpoints.next(0.0)
        if state is None:
            return None
        if home is not None:
            kept = self._states[home]
            if kept.room > 0 and kept.load <= state.load + MUCH_BUSIER:
                return home
        return self._places[state.name]

    def begun(self, place: int) -> None:
        """A request goes there."""
        state = self._states[place]
        state.in_flight += 1
        state.turns += 1 / state.weight

    def ended(self, place: int, *, well: bool, out: bool) -> None:
        """A request ended there, well or not; ``out``: it gets no more."""
        state = self._states[place]
        if well:
            state.limit.succeeded(1, state.in_flight)
        state.in_flight -= 1
        state.up = not out
        self._endpoints.changed(state)
