"""The configuration of a fleet, and what its parts share: state, background tasks, reports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.request import answer_limit
from bagent.clocks import unix
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import (
    BYTES_PER_TOKEN,
    Call,
    CallResult,
    EndedCall,
    InFlightRequest,
    TakeEnded,
)
from bagent.fleet.endpoint_state import EndpointPool, EndpointState
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.queue import CallQueues
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.tail_latency import TailRule
from bagent.money.budget import CallBudget
from bagent.types import EndpointSample, FleetStats

MAX_NOTICES = 12
"""Notices about endpoints that are shown in full; further ones are counted."""

NOTICE_SUMMARY_SECONDS = 30.0
"""How often the count is shown."""

RECENT = 256
"""Latencies that are remembered."""


class FleetTasks:
    """Runs the tasks of a fleet; an exception in one stops the fleet.

    Args:
        loop: the event loop.
        on_cancelled: called when a task was cancelled.

    Attributes:
        requests: tasks that a drain waits for.
        probes: those that it cancels.
        stopped: gets the reason when the fleet cannot continue: an outage or a bug.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancelled: Callable[[], None]) -> None:
        self.loop = loop
        self._on_cancelled = on_cancelled
        self.requests: set[asyncio.Task[None]] = set()
        self.probes: set[asyncio.Task[None]] = set()
        self.stopped: asyncio.Future[BaseException] = loop.create_future()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work``, which a drain waits for."""
        return self._spawn(work, self.requests)

    def spawn_probe(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work``, which a drain cancels."""
        return self._spawn(work, self.probes)

    def _spawn(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.requests.discard(task)
        self.probes.discard(task)
        if task.cancelled():
            self._on_cancelled()
        elif (error := task.exception()) is not None:
            self.stop(error)

    def stop(self, reason: BaseException) -> None:
        """Report that the fleet cannot continue."""
        if not self.stopped.done():
            self.stopped.set_result(reason)

    def cancel_probes(self) -> None:
        """Cancel all probes."""
        for probe in self.probes:
            probe.cancel()


class FleetReports:
    """Passes on notices and samples.

    Args:
        notice: receives messages for people.
        on_sample: receives an endpoint's state whenever it changes.
        clock: the fleet's clock.
    """

    def __init__(
        self,
        notice: Callable[[str], None],
        on_sample: Callable[[EndpointSample], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._notice = notice
        self._on_sample = on_sample
        self._clock = clock
        self._notices = 0
        self._suppressed = 0
        self._noticed_at = clock()

    def notify(self, message: str) -> None:
        """Show a notice about an endpoint, or count it if there were many."""
        self._notices += 1
        if self._notices <= MAX_NOTICES:
            self._notice(message)
            self._noticed_at = self._clock()
        else:
            self._suppressed += 1

    def summarize(self, down: int) -> None:
        """Show how many notices were counted, now and then; ``down`` is how many endpoints are."""
        now = self._clock()
        if self._suppressed and now - self._noticed_at > NOTICE_SUMMARY_SECONDS:
            self._notice(f"{self._suppressed} more notices of endpoints; {down} are down now")
            self._suppressed, self._noticed_at = 0, now

    def sample(
        self, state: EndpointState, reason: str | None = None, load: EngineLoad | None = None
    ) -> None:
        """Record an endpoint's state now, and the load that its engine reported."""
        if self._on_sample is None:
            return
        self._on_sample(
            EndpointSample(
                endpoint=state.name,
                at=round(unix(), 3),
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


class OutagePatience(msgspec.Struct, frozen=True):
    """Seconds for which a run waits while no endpoint serves it."""

    passing: float = 120.0  # waiting may help, such as for a restart
    lasting: float = 30.0  # every endpoint now refuses the key or model that it accepted
    first: float = 10.0  # endpoints answer, but nothing has been served yet
    first_lasting: float = 3.0  # nor do they accept the key or model


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
    budget: CallBudget | None = None


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
        # Calls whose end is awaited, in order.
        self.awaited: dict[Call, asyncio.Future[CallResult]] = {}

    @property
    def limit(self) -> int:
        """How many rows may be in flight now."""
        return min(self.config.concurrency, self.endpoints.limit)

    def occupy(self, request: InFlightRequest) -> None:
        """Count a request that starts, and an attempt of each call; reserve what they may use."""
        state, calls, started = request.state, request.calls, request.started
        account, rows = state.account, len(calls)
        for call in calls:
            call.attempts += 1
            call.in_flight += 1
            if call.in_flight == 1:
                call.waited_ms += (started - call.ready_at) * 1000
        request.attempt = calls[0].attempts
        if account.counts_tokens:
            for call in calls:
                prompt = len(call.request.payload) // BYTES_PER_TOKEN
                tokens = account.estimate(prompt, answer_limit(call.request))
                request.tokens = tokens if rows == 1 else request.tokens + tokens
        request.reservation = account.start(started, request.tokens)
        if self.config.budget is not None:
            request.reserved_usd = self.config.budget.reserve([call.request for call in calls])
        state.cold = False
        state.in_flight += rows
        state.turns += rows / state.weight
        state.requests[request] = None
        self.in_flight += rows
        self.requests_in_flight += 1
        self.requests += 1

    def release(self, request: InFlightRequest) -> None:
        """Free the slots of a request that has ended, and what it reserved of the budget."""
        state, rows = request.state, len(request.calls)
        state.in_flight -= rows
        del state.requests[request]
        state.exclusive = False
        state.warming = None  # its prefix cache is filled, or the calls that wait have to try
        self.in_flight -= rows
        self.requests_in_flight -= 1
        if self.config.budget is not None:
            self.config.budget.ledger.settle(request.reserved_usd, request.cost_usd)

    def cancel_copies(self, call: Call) -> None:
        """Cancel the other requests that carry an answered call."""
        for state in self.endpoints.states:
            for request in state.requests:
                if call in request.calls:
                    request.cancel("another endpoint answered first")

    def hand_over(
        self, ended: Sequence[EndedCall], on_fault: Callable[[BaseException], None]
    ) -> bool:
        """Hand ended calls to what takes or awaits them; return whether a task awaits one."""
        awaited = False
        by_taker: dict[TakeEnded, list[EndedCall]] = {}
        for entry in ended:
            call = entry[0]
            if call.take_ended is not None:
                by_taker.setdefault(call.take_ended, []).append(entry)
            elif (future := self.awaited.pop(call, None)) is not None and not future.done():
                awaited = True
                future.set_result(entry[1])
        for take_ended, entries in by_taker.items():
            try:
                take_ended(entries)
            except Exception as error:  # noqa: BLE001 - it stops the fleet
                on_fault(error)
        return awaited

    def _count_copies(self) -> int:
        """Return how many calls in flight are copies, or have ended with another copy."""
        if self.config.hedge is None:
            return 0
        requests = (request for state in self.endpoints.states for request in state.requests)
        calls = [call for request in requests for call in request.calls]
        return len(calls) - len({call for call in calls if not call.ended})

    def stats(self) -> FleetStats:
        """Return the counters."""
        now = self.clock()
        accounts = {state.account for state in self.endpoints.states}
        staying = [state for state in self.endpoints.states if not state.leaving]
        return FleetStats(
            in_flight=self.in_flight - self._count_copies(),
            limit=self.limit,
            ready=self.waiting.ready,
            retrying=self.waiting.asleep,
            throttled_s=min((account.pause_remaining(now) for account in accounts), default=0.0),
            endpoints_up=sum(state.up for state in staying),
            endpoints=len(staying),
            throttle_answers=self.throttle_answers,
            requests=self.requests,
        )
