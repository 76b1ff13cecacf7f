"""The configuration of a fleet, and the state that its parts share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from bagent.backends.base import Timeouts
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call
from bagent.fleet.endpoint_pool import EndpointPool
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.outage import OutagePatience
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.queue import CallQueues
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.tail_latency import TailRule
from bagent.types import FleetStats

RECENT = 256
"""Latencies that are remembered."""

ResultContext = Callable[[], AbstractContextManager[None]]
"""Makes the context in which all rows of one request take their results, so that their outcomes can
be written together."""


class FleetConfig(msgspec.Struct, frozen=True):
    """Limits and policies of a fleet."""

    concurrency: int  # rows in flight over all endpoints
    timeouts: Timeouts = Timeouts()
    retry: RetryPolicy = RetryPolicy()
    lookahead: int = 256  # rows that may be ready or waiting besides those in flight
    outage: OutagePatience = OutagePatience()
    probe_seconds: float = 5.0
    group: BatchSizeRule = BatchSizeRule()
    hedge: float | None = None  # seconds until a late call is copied; 0: automatic, None: never
    connections: int | None = None  # requests in flight; None: as many as rows
    first_expected: float = 64.0  # completion tokens of a row before one was answered
    prefix: PrefixRule = PrefixRule()


class FleetState:
    """The endpoints, calls and counters of a fleet."""

    def __init__(
        self, states: Sequence[EndpointState], config: FleetConfig, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.clock = clock  # monotonic seconds
        self.endpoints = EndpointPool(states)
        self.waiting = CallQueues()
        self.in_flight = 0  # rows
        self.requests_in_flight = 0
        self.requests = 0
        self.throttle_answers = 0
        self.closed = False
        self.expecting = False  # more rows will be submitted
        self.remaining: int | None = None  # rows that are not done, if known
        self.expected = config.first_expected  # completion tokens of a row
        self.contexts: set[int] = set()  # context lengths that calls need and some endpoints lack
        self.last_served = float("-inf")
        self.latencies: deque[float] = deque(maxlen=RECENT)
        self.tail = TailRule()
        self.calls: dict[Call, None] = {}  # requested and not ended, in order

    @property
    def limit(self) -> int:
        """How many rows may be in flight now."""
        return min(self.config.concurrency, self.endpoints.limit)

    def stats(self) -> FleetStats:
        """Return the counters."""
        now = self.clock()
        accounts = {state.account for state in self.endpoints.states}
        return FleetStats(
            in_flight=self.in_flight,
            limit=self.limit,
            ready=self.waiting.ready,
            retrying=self.waiting.asleep,
            throttled_s=min((account.pause_remaining(now) for account in accounts), default=0.0),
            endpoints_up=self.endpoints.up,
            endpoints=len(self.endpoints.states),
            throttle_answers=self.throttle_answers,
            requests=self.requests,
        )
