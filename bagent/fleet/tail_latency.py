"""Protection of a run's end from slow endpoints: scheduling rule and hedged requests."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bagent.fleet.call import InFlightRequest

if TYPE_CHECKING:
    from bagent.fleet.state import FleetState

WINDOW = 512
"""Requests over which the throughput of the fleet is measured."""

MIN_ENDPOINT_REQUESTS = 4
MIN_REQUESTS = 64
"""Requests of one endpoint, and of all, before an endpoint can be called slow."""

WEIGHT = 0.1
"""Weight of a new request in the running mean of latencies."""

SLOW_FACTOR = 1.5
"""An endpoint is slow if it takes at least this many times as long as the others."""

LAST_ANSWER_FACTOR = 1.5
"""The slowest of the last answers takes about this many times the mean."""

HEDGE_FACTOR = 3.0
"""A call is hedged once it takes this many times the 90th percentile of recent latencies."""

MIN_HEDGE_SECONDS = 1.0
HEDGE_POLL_SECONDS = 0.25
MAX_HEDGED_SHARE = 0.1
"""Share of the calls in flight that may be copies; at least one may."""


class TailRule:
    """Decides whether an endpoint is too slow for the last rows; times on the fleet's clock."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def add(self, endpoint: str, now: float, seconds: float, rows: int = 1) -> None:
        """Record that an endpoint answered a request of ``rows`` after ``seconds``."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._mean += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._mean)
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._rows -= self._ends.popleft()[1]

    def is_too_slow(self, endpoint: str, now: float, remaining: int) -> bool:
        """Return whether all others would finish the ``remaining`` rows before this endpoint
        answered one more; False while too few requests are known."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < MIN_ENDPOINT_REQUESTS or len(self._ends) < MIN_REQUESTS:
            return False
        if mean < SLOW_FACTOR * self._mean:
            return False
        others = remaining * (now - self._ends[0][0]) / self._rows
        return LAST_ANSWER_FACTOR * (mean - self._mean) > others


class Hedger:
    """Finds late calls at the end of a run, while no row waits for a slot."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._polled_at = fleet.clock()

    def late(self) -> list[InFlightRequest]:
        """Return the requests of one call that should be copied to another endpoint."""
        fleet = self._fleet
        now = fleet.clock()
        threshold = fleet.config.hedge
        busy = fleet.closed or fleet.waiting.ready or fleet.expecting or not fleet.in_flight
        if threshold is None or busy or now - self._polled_at < HEDGE_POLL_SECONDS:
            return []
        self._polled_at = now
        if not threshold:
            if len(fleet.latencies) < 10:
                return []
            percentile = sorted(fleet.latencies)[len(fleet.latencies) * 9 // 10]
            threshold = max(MIN_HEDGE_SECONDS, HEDGE_FACTOR * percentile)
        late, copies = [], 0
        for state in fleet.endpoints.states:
            for request in state.requests:
                call = request.calls[0]
                if len(request.calls) != 1 or call.ended or call.pinned_to is not None:
                    continue
                if call.in_flight > 1:
                    copies += 1
                elif now - request.started >= threshold:
                    late.append(request)
        free = max(1, int(fleet.in_flight * MAX_HEDGED_SHARE)) - copies // 2
        late.sort(key=lambda request: request.started)
        return late[: max(0, free)]
