"""The configuration of a fleet, and the state that its parts share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random

import msgspec

from bagent.backends.base import Backend, Timeouts
from bagent.backends.engines.metrics import EngineLoad
from bagent.clocks import unix
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.fleet.endpoint_pool import EndpointPool
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.outage import OutagePatience
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.queue import CallQueues
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.tail_latency import TailRule
from bagent.types import Attempt, EndpointSample, Failure, FleetStats, Reply

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
    """The shared state of a fleet; create it inside the event loop."""

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
        result_context: ResultContext = nullcontext,
    ) -> None:
        self.endpoints = EndpointPool(states)
        self.waiting = CallQueues()
        self.backend = backend
        self.config = config
        self.on_attempt = on_attempt
        self.on_sample = on_sample
        self.notice = notice
        self.random = random
        self.result_context = result_context
        self.loop = asyncio.get_running_loop()
        self.clock = self.loop.time
        self.unix = unix
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
        self.calls: set[Call] = set()  # requested and not ended
        self.tasks: set[asyncio.Task[None]] = set()
        self.probes: set[asyncio.Task[None]] = set()
        self.stopped: asyncio.Future[BaseException] = self.loop.create_future()
        self.pump: Callable[[], None] = lambda: None

    def spawn(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        """Run ``work`` as a task of the fleet; an exception in it stops the fleet."""
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
        """Report that the fleet cannot continue."""
        if not self.stopped.done():
            self.stopped.set_result(reason)

    def retry_at(self, call: Call, due: float) -> None:
        """Send ``call`` again from ``due`` on."""
        if not self.closed:
            self.waiting.sleep(call, due)

    def request(self, call: Call) -> asyncio.Future[CallResult]:
        """Return the future that gets the end of ``call``."""
        call.future = self.loop.create_future()
        self.calls.add(call)
        return call.future

    def end(self, call: Call, result: Reply | Failure, delivery: Delivery | None) -> None:
        """End ``call``; what waits for it runs in the next turn of the event loop."""
        call.ended = True
        self.calls.discard(call)
        if call.future is not None and not call.future.done():
            call.future.set_result(CallResult(result, delivery))

    def abandon(self, calls: Iterable[Call]) -> None:
        """Cancel the futures of calls that are not in flight: they stay unfinished."""
        for call in calls:
            if not (call.ended or call.in_flight):
                self.calls.discard(call)
                if call.future is not None:
                    call.future.cancel()

    def stats(self, limit: int) -> FleetStats:
        """Return the fleet's counters; ``limit`` is how many rows it may have in flight."""
        now = self.clock()
        accounts = {state.account for state in self.endpoints.states}
        return FleetStats(
            in_flight=self.in_flight,
            limit=limit,
            ready=self.waiting.ready,
            retrying=self.waiting.asleep,
            throttled_s=min((account.pause_remaining(now) for account in accounts), default=0.0),
            endpoints_up=self.endpoints.up,
            endpoints=len(self.endpoints.states),
            throttle_answers=self.throttle_answers,
            requests=self.requests,
        )

    def sample(
        self, state: EndpointState, reason: str | None = None, load: EngineLoad | None = None
    ) -> None:
        """Record an endpoint's state now, and the load that its engine reported."""
        if self.on_sample is None:
            return
        self.on_sample(
            EndpointSample(
                endpoint=state.name,
                at=round(self.unix(), 3),
                healthy=state.usable or state.detecting_batching,
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
