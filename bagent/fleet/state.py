"""The configuration of a fleet, and what its parts share: state, background tasks, reports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.engines.metrics import EngineLoad
from bagent.clocks import unix
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call
from bagent.fleet.endpoint_pool import EndpointPool
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.outage import OutagePatience
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.fleet.queue import CallQueues
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.tail_latency import TailRule
from bagent.money.budget import CallBudget
from bagent.types import EndpointSample, FleetStats

FleetCoroutine = Coroutine[asyncio.Future[Any], None, None]
"""A coroutine that awaits nothing but futures of the fleet."""

MAX_NOTICES = 12
"""Notices about endpoints that are shown in full; further ones are counted."""

NOTICE_SUMMARY_SECONDS = 30.0
"""How often the count is shown."""

RECENT = 256
"""Latencies that are remembered."""

ResultContext = Callable[[], AbstractContextManager[None]]
"""Makes the context in which all rows of one request take their results, so that their outcomes can
be written together."""


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

    def run(self, work: FleetCoroutine) -> None:
        """Run ``work`` until it awaits a future, and resume it in the turn after that is done.

        It takes one callback of the event loop for each future. A task would take four.
        """
        try:
            future = work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return  # it ended, or the fleet was closed
        except Exception as error:  # noqa: BLE001 - it stops the fleet
            self.stop(error)
        else:
            future.add_done_callback(lambda _: self.run(work))

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

    async def drain(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Wait up to ``seconds`` for the requests, call ``on_timeout``, then cancel the others."""
        if not self.requests:
            return
        _, pending = await asyncio.wait(set(self.requests), timeout=seconds)
        on_timeout()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


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
        self.calls: dict[Call, None] = {}  # requested and not ended, in order

    @property
    def limit(self) -> int:
        """How many rows may be in flight now."""
        return min(self.config.concurrency, self.endpoints.limit)

    def stats(self) -> FleetStats:
        """Return the counters."""
        now = self.clock()
        accounts = {state.account for state in self.endpoints.states}
        staying = [state for state in self.endpoints.states if not state.leaving]
        return FleetStats(
            in_flight=self.in_flight,
            limit=self.limit,
            ready=self.waiting.ready,
            retrying=self.waiting.asleep,
            throttled_s=min((account.pause_remaining(now) for account in accounts), default=0.0),
            endpoints_up=sum(state.up for state in staying),
            endpoints=len(staying),
            throttle_answers=self.throttle_answers,
            requests=self.requests,
        )
