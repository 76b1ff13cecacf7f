"""Which endpoint of a stage gets a request, and which endpoints are out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagent.backends.endpoint import Endpoint
from bagent.bench.records import Routing
from bagent.fleet.endpoint_pool import Endpoints
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.scheduler import MUCH_BUSIER
from bagent.servers.fleet_factory import OWN_CEILING, OWN_START

REFUSALS = 3
"""Connections in a row that could not be made, after which an endpoint is out of the stage."""


class EndpointPicker:
    """Chooses endpoints by their place in the list of targets.

    An endpoint to which no connection can be made is out for the rest of the stage: a closed loop
    would do nothing but knock there, and an open one would count knocks as requests.

    Args:
        among: the places that take part.
        start: where a round begins that looks for the fewest in flight; workers begin at
            different ones. Else the number of the request decides, which is one for all workers.
        router: what ``as-run`` asks.
    """

    def __init__(
        self,
        routing: Routing,
        among: Sequence[int],
        start: int = 0,
        router: RunRouter | None = None,
    ) -> None:
        self._routing = routing
        self.among = list(among)
        self.in_flight = dict.fromkeys(among, 0)
        self._refused = dict.fromkeys(among, 0)
        self._turn = start
        self._router = router

    def pick(self, number: int, group: int | None, home: int | None = None) -> int | None:
        """The place for request ``number`` with its prefix group; None where all are out, or none
        has room (:attr:`full`).

        Args:
            home: where its conversation was answered last.
        """
        among = self.among
        if not among:
            return None
        if self._router is not None:
            return self._router.next(home)
        if self._routing == "affinity":
            if home in among:
                return home
            if group is not None:
                return among[group % len(among)]
        if self._routing == "least-inflight":
            self._turn += 1
            order = among[self._turn % len(among) :] + among[: self._turn % len(among)]
            return min(order, key=self.in_flight.__getitem__)
        if home in among:
            return among[(among.index(home) + 1) % len(among)]
        return among[number % len(among)]

    @property
    def chooses(self) -> bool:
        """Whether a closed loop, too, asks where its next request goes."""
        return self._router is not None or self._routing == "least-inflight"

    @property
    def full(self) -> bool:
        """Whether a request has to wait until another has ended."""
        return self._router is not None and bool(self.among)

    def groups_of(self, place: int, count: int) -> list[int] | None:
        """With ``affinity``, those of ``count`` prefix groups that belong to an endpoint."""
        if self._routing != "affinity" or place not in self.among:
            return None
        return [one for one in range(count) if self.among[one % len(self.among)] == place]

    def begun(self, place: int) -> int:
        """A request goes there; returns how many are in flight there with it."""
        self.in_flight[place] += 1
        if self._router is not None:
            self._router.begun(place)
        return self.in_flight[place]

    def ended(self, place: int, error_kind: str | None) -> None:
        """A request ended there, with that failure or well."""
        self.in_flight[place] -= 1
        self._refused[place] = self._refused[place] + 1 if error_kind == "connect" else 0
        if self._refused[place] >= REFUSALS and place in self.among:
            self.among.remove(place)
        if self._router is not None:
            self._router.ended(place, well=error_kind is None, out=place not in self.among)

    def out(self, place: int) -> bool:
        """Whether an endpoint is out of the stage."""
        return place not in self.among


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
