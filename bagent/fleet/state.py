"""What the parts of a fleet share: its endpoints, its waiting calls, its tasks and its clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random

import msgspec

from bagent.backends.base import Backend, Timeouts
from bagent.backends.engines.metrics import EngineLoad
from bagent.clocks import unix
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call, Delivery
from bagent.fleet.endpoint_pool import Endpoints
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.outage import OutagePatience
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.queue import CallQueues
from bagent.fleet.retry import RetryPolicy
from bagent.types import Attempt, EndpointSample, Failure, FleetStats

WINDOW = 512
"""Requests by which the speed of all together is measured."""

ENOUGH = 4
"""Requests of an endpoint before its time is judged."""

SOME = 64
"""Requests of all before any is."""

WEIGHT = 0.1
"""Of a new request in the running mean of times."""

SLOWER = 1.5
"""Only an endpoint that takes so many times what others take is slow: means are not exact."""

MARGIN = 1.5
"""The last answers, here as there, take so many times what answers take on average: the longest
of some decides."""


class TailRule:
    """Judges who may still take rows near the end; times are on the fleet's clock."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._by_endpoint: dict[str, tuple[int, float]] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._rows = 0

    def served(self, endpoint: str, now: float, seconds: float, rows: int = 1) -> None:
        """An endpoint answered a request of ``rows``, ``seconds`` after it was sent."""
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        weight = max(WEIGHT, 1 / (count + 1))
        self._by_endpoint[endpoint] = count + 1, mean + weight * (seconds - mean)
        self._usual += max(WEIGHT / 4, 1 / (len(self._ends) + 1)) * (seconds - self._usual)
        self._ends.append((now, rows))
        self._rows += rows
        if len(self._ends) > WINDOW:
            self._rows -= self._ends.popleft()[1]

    def is_too_slow(self, endpoint: str, now: float, left: int) -> bool:
        """Whether what the endpoint took now would come after all have done ``left`` rows more.

        False as long as too little is known.
        """
        count, mean = self._by_endpoint.get(endpoint, (0, 0.0))
        if count < ENOUGH or len(self._ends) < SOME or mean < SLOWER * self._usual:
            return False
        others = left * (now - self._ends[0][0]) / self._rows
        return MARGIN * (mean - self._usual) > others


RECENT = 256

Together = Callable[[], AbstractContextManager[None]]
"""Makes what surrounds the ends of all calls of one request; they may be written as one."""


class FleetConfig(msgspec.Struct, frozen=True):
    """Limits of a whole fleet.

    ``concurrency`` bounds rows in flight over all endpoints, ``connections`` requests (None: as
    many). ``lookahead`` is how many rows may stand ready or wait for a retry beyond those in
    flight: it bounds memory. ``outage`` is how long a run waits when no endpoint serves it.
    ``hedge`` is after how many seconds a late call is sent a second time
    at the end of a run: None never, 0 by what others took. ``first_expected`` is how many
    completion tokens a row is thought to take before one was seen. ``prefix`` says what is done
    for the prefix caches.
    """

    concurrency: int
    timeouts: Timeouts = Timeouts()
    retry: RetryPolicy = RetryPolicy()
    lookahead: int = 256
    outage: OutagePatience = OutagePatience()
    probe_seconds: float = 5.0
    group: BatchSizeRule = BatchSizeRule()
    hedge: float | None = None
    connections: int | None = None
    first_expected: float = 64.0
    prefix: PrefixRule = PrefixRule()


class FleetState:
    """The shared state of a fleet; make it inside the event loop.

    ``expecting`` says that more rows come, ``left`` how many are still to end, None where that is
    not known. ``lengths`` are the contexts that calls need and not all endpoints have.
    ``last_served`` is when any endpoint last answered well, ``latencies`` the seconds that recent
    answers took.
    """

    def __init__(
        self,
        states: Sequence[EndpointState],
        backend: Backend,
        config: FleetConfig,
        *,
        on_attempt: Callable[[Attempt], None],
        on_sample: Callable[[EndpointSample], None] | None,
        notice: Callable[[str], None],
        random: Random,
        together: Together = nullcontext,
    ) -> None:
        self.endpoints = Endpoints(states)
        self.waiting = CallQueues()
        self.backend = backend
        self.config = config
        self.on_attempt = on_attempt
        self.on_sample = on_sample
        self.notice = notice
        self.random = random
        self.together = together
        self.loop = asyncio.get_running_loop()
        self.clock = self.loop.time
        self.unix = unix
        self.in_flight = 0
        self.requests_out = 0
        self.requests = 0
        self.throttle_answers = 0
        self.closed = False
        self.expecting = False
        self.expected = config.first_expected
        self.last_served = float("-inf")
        self.latencies: deque[float] = deque(maxlen=RECENT)
        self.ending = TailRule()
        self.left: int | None = None
        self.lengths: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.probes: set[asyncio.Task[None]] = set()
        self.stopped: asyncio.Future[BaseException] = self.loop.create_future()
        self.pump: Callable[[], None] = lambda: None

    def spawn(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        """Run ``work`` as a task of the fleet; its fault stops the fleet."""
        task = self.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.probes.discard(task)
        if task.cancelled():
            self.pump()
        elif (error := task.exception()) is not None:
            self.stop(error)

    def stop(self, reason: BaseException) -> None:
        """The fleet can not go on."""
        if not self.stopped.done():
            self.stopped.set_result(reason)

    def sleep(self, call: Call, due: float) -> None:
        """Send ``call`` again from ``due`` on."""
        if not self.closed:
            self.waiting.sleep(call, due)

    def fail(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """End ``call`` with a failure."""
        call.ended = True
        call.handler.failed(call, failure, delivery)

    def stats(self, limit: int) -> FleetStats:
        """The fleet now, for displays; ``limit`` is how many rows it may have in flight."""
        now = self.clock()
        accounts = {state.account for state in self.endpoints.states}
        return FleetStats(
            in_flight=self.in_flight,
            limit=limit,
            ready=self.waiting.ready,
            retrying=self.waiting.asleep,
            throttled_s=min((account.paused(now) for account in accounts), default=0.0),
            endpoints_up=self.endpoints.up,
            endpoints=len(self.endpoints.states),
            throttle_answers=self.throttle_answers,
            requests=self.requests,
        )

    def sample(
        self, state: EndpointState, reason: str | None = None, load: EngineLoad | None = None
    ) -> None:
        """Note how an endpoint stands now, and what its engine told."""
        if self.on_sample is None:
            return
        self.on_sample(
            EndpointSample(
                endpoint=state.name,
                at=round(self.unix(), 3),
                healthy=state.usable or state.learning,
                in_flight=state.in_flight,
                limit=state.limit.value,
                reason=reason or state.limit.reason,
                waiting=load.waiting if load else None,
                running=load.running if load else None,
                kv_usage=load.kv_usage if load else None,
                cache_hits=load.cache_hits if load else None,
                cache_queries=load.cache_queries if load else None,
            )
        )
