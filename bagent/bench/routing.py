"""Choice of an endpoint for each request of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagent.backends.endpoint import Endpoint
from bagent.bench.records import Routing
from bagent.fleet.endpoint_state import EndpointPool, EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.queue import CONVERSATION_LOAD_MARGIN
from bagent.servers.fleet_factory import OWN_CEILING, OWN_START

REFUSALS = 3
"""Failed connections in a row after which an endpoint is removed from the stage."""


class EndpointPicker:
    """Chooses endpoints by their index in the list of targets.

    An endpoint that refuses connections is removed for the rest of the stage. Otherwise a closed
    loop would only retry the connection, and an open one would count the failures as requests.

    Args:
        active: indexes of the endpoints that take part.
        start: where a search for the fewest in flight begins; differs between workers. The other
            routings go by the request's number, which all workers share.
        router: chooses for ``as-run``.
    """

    def __init__(
        self,
        routing: Routing,
        active: Sequence[int],
        start: int = 0,
        router: RunRouter | None = None,
    ) -> None:
        self._routing = routing
        self.active = list(active)
        self.in_flight = dict.fromkeys(active, 0)
        self._refused = dict.fromkeys(active, 0)
        self._turn = start
        self._router = router

    def pick(self, number: int, group: int | None, previous: int | None = None) -> int | None:
        """Return the endpoint for request ``number``; None where none is left or has room
        (:attr:`full`).

        Args:
            previous: the endpoint that answered its conversation last.
        """
        active = self.active
        if not active:
            return None
        if self._router is not None:
            return self._router.next(previous)
        if self._routing == "affinity":
            if previous in active:
                return previous
            if group is not None:
                return active[group % len(active)]
        if self._routing == "least-inflight":
            self._turn += 1
            order = active[self._turn % len(active) :] + active[: self._turn % len(active)]
            return min(order, key=self.in_flight.__getitem__)
        if previous in active:
            return active[(active.index(previous) + 1) % len(active)]
        return active[number % len(active)]

    @property
    def chooses(self) -> bool:
        """Return whether a closed loop, too, chooses the endpoint of each request."""
        return self._router is not None or self._routing == "least-inflight"

    @property
    def full(self) -> bool:
        """Return whether a request must wait until another one has ended."""
        return self._router is not None and bool(self.active)

    def groups_of(self, index: int, count: int) -> list[int] | None:
        """Return those of ``count`` prefix groups that belong to an endpoint; None without
        affinity."""
        if self._routing != "affinity" or index not in self.active:
            return None
        return [group for group in range(count) if self.active[group % len(self.active)] == index]

    def started(self, index: int) -> int:
        """Count a request; return how many are in flight at the endpoint with it."""
        self.in_flight[index] += 1
        if self._router is not None:
            self._router.started(index)
        return self.in_flight[index]

    def ended(self, index: int, error_kind: str | None) -> None:
        """Count the end of a request, with its failure if any."""
        self.in_flight[index] -= 1
        self._refused[index] = self._refused[index] + 1 if error_kind == "connect" else 0
        if self._refused[index] >= REFUSALS and index in self.active:
            self.active.remove(index)
        if self._router is not None:
            removed = index not in self.active
            self._router.ended(index, succeeded=error_kind is None, removed=removed)

    def is_removed(self, index: int) -> bool:
        """Return whether an endpoint was removed from the stage."""
        return index not in self.active


class RunRouter:
    """Chooses among endpoints as a run does: the least busy of the next few.

    A conversation stays where it was answered last, unless that endpoint is much busier. No
    endpoint gets more than its limit, which a run finds by itself (here by the answers alone; the
    queues of engines are not read).

    Args:
        endpoints: by their index in the list of targets.
        limit: requests in flight at each, in a closed loop.
        workers: workers that share the limits of an open loop.
    """

    def __init__(
        self, endpoints: Mapping[int, Endpoint], limit: int | None = None, workers: int = 1
    ) -> None:
        self._indexes = {endpoint.name: index for index, endpoint in endpoints.items()}
        self._states: dict[int, EndpointState] = {}
        for index, endpoint in endpoints.items():
            start = limit or max(1, OWN_START // workers)
            top = limit or max(1, OWN_CEILING // workers)
            in_flight_limit = InFlightLimit(start, top, growing=limit is None)
            self._states[index] = EndpointState(endpoint, in_flight_limit)
        self._endpoints = EndpointPool(list(self._states.values()))

    def next(self, previous: int | None = None) -> int | None:
        """Return the endpoint for the next request; None where none has room."""
        state = self._endpoints.select(0.0)
        if state is None:
            return None
        if previous is not None:
            current = self._states[previous]
            if current.room > 0 and current.load <= state.load + CONVERSATION_LOAD_MARGIN:
                return previous
        return self._indexes[state.name]

    def started(self, index: int) -> None:
        """Count a request."""
        state = self._states[index]
        state.in_flight += 1
        state.turns += 1 / state.weight

    def ended(self, index: int, *, succeeded: bool, removed: bool) -> None:
        """Count the end of a request; ``removed``: the endpoint gets no more."""
        state = self._states[index]
        if succeeded:
            state.limit.on_success(1, state.in_flight)
        state.in_flight -= 1
        if removed:
            state.leave()
        self._endpoints.update(state)
