"""The fleet: matches ready calls with endpoints that have room.

Endpoints pull: whenever one has room it gets the next batch. So equal endpoints get equal shares,
and a slow one gets less. Calls that wait for a retry hold no slot. Everything runs on one event
loop, and nothing polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from random import Random

from bagent.backends.base import Backend, Exchange
from bagent.backends.endpoint import Capabilities
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.engines.probe import CompletionProbe
from bagent.fleet.call import Call, CallResult, InFlightRequest, timeouts_for, urgent_calls
from bagent.fleet.context_length import UNKNOWN_CONTEXT, ContextRouter, fits
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Check, CheckResult, Health
from bagent.fleet.prefix_affinity import PrefixAffinity
from bagent.fleet.results import ResultHandler
from bagent.fleet.scheduler import BatchScheduler
from bagent.fleet.state import FleetConfig, FleetState, ResultContext
from bagent.fleet.tail_latency import Hedger
from bagent.types import Attempt, EndpointSample, Failure, FleetStats

__all__ = ["Fleet", "FleetConfig"]

STARTS_PER_TURN, ROWS_PER_START = 128, 8
"""Requests started in one turn of the event loop; this many rows count as one more."""

MAX_SKIPPED = 32
"""How many endpoints without a suitable call are asked before the next request has to end."""

SWEEP_SECONDS = 0.25


class FleetMembers:
    """Endpoints that join and leave.

    Args:
        core: the fleet.
        health: probes endpoints that join.
        removed: called once an endpoint that left has nothing in flight any more.
    """

    def __init__(
        self, core: FleetState, health: Health, removed: Callable[[EndpointState], None]
    ) -> None:
        self._core = core
        self._health = health
        self._removed = removed

    def join(self, states: Sequence[EndpointState]) -> None:
        """Add endpoints; each gets calls once a probe has reached it."""
        self._core.endpoints.add(*states)
        for state in states:
            self._core.sample(state, "joined")
            self._health.probe(state)

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; their requests in flight finish."""
        for name in names:
            state = self._core.endpoints.get(name)
            if state is not None and not state.leaving:
                state.leaving = True
                self._core.sample(state, "left the hostfile")
                self.on_request_end(state)

    def on_request_end(self, state: EndpointState) -> None:
        """Remove an endpoint that is leaving and has nothing in flight."""
        core = self._core
        if state.leaving and not state.requests and state in core.endpoints.states:
            core.endpoints.remove(state)
            self._removed(state)


class TimeoutSweep:
    """Ends waiting calls whose deadline has passed, and those that no endpoint can serve."""

    def __init__(self, core: FleetState, results: ResultHandler, router: ContextRouter) -> None:
        self._core = core
        self._results = results
        self._router = router
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sweep regularly while calls wait."""
        if self._timer is None:
            self._timer = self._core.loop.call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        core = self._core
        self._timer = None
        overdue = core.waiting.take_overdue(core.clock())
        if overdue:
            self._fail(overdue)
        if not core.closed and (core.in_flight or core.waiting.ready or core.waiting.asleep):
            self.start()
        core.pump()

    def _fail(self, overdue: Sequence[Call]) -> None:
        message = "the row's time limit (limits.row) was over before an endpoint could take it"
        for call in overdue:
            self._core.end(call, Failure("timeout", message, passing=True), None)

    def retry_stranded(self) -> None:
        """Retry the calls that only endpoints that are down may serve, while others are up."""
        core = self._core

        def is_down(name: str) -> bool:
            state = core.endpoints.get(name)
            return state is None or state.leaving or not state.up or state.circuit_open

        works = any(state.up and not state.circuit_open for state in core.endpoints.states)
        for call in core.waiting.take_pinned(is_down) if works else ():
            message = f"{call.pinned_to} serves nothing, and no other endpoint may have this row"
            self._results.retry(call, Failure("connect", message, passing=True), None)
        for call in self._router.take_stranded():
            unknown = call.min_context == UNKNOWN_CONTEXT
            length = "" if unknown else f" of {call.min_context} tokens"
            message = f"no endpoint answers whose context{length} this row needs"
            self._results.retry(call, Failure("connect", message, passing=True), None)


class Fleet:
    """Sends calls to endpoints.

    Args:
        states: the endpoints; at least one.
        backend: their protocol.
        config: limits and policies.
        on_attempt: receives one record for each call of each request.
        on_sample: receives an endpoint's state whenever it changes.
        notice: receives messages for people.
        random: source of jitter.
        check: sends a minimal request to an endpoint; None: a short completion.
        result_context: surrounds the results of each request.

    Attributes:
        has_room: whether another row may be submitted now.
    """

    def __init__(
        self,
        states: Sequence[EndpointState],
        backend: Backend,
        config: FleetConfig,
        *,
        on_attempt: Callable[[Attempt], None],
        notice: Callable[[str], None],
        random: Random,
        check: Check | None = None,
        on_sample: Callable[[EndpointSample], None] | None = None,
        result_context: ResultContext = nullcontext,
    ) -> None:
        self._core = core = FleetState(
            states,
            backend,
            config,
            on_attempt=on_attempt,
            on_sample=on_sample,
            notice=notice,
            random=random,
            result_context=result_context,
        )
        core.pump = self._pump
        self._config = config
        self._waiting, self._endpoints = core.waiting, core.endpoints
        self._health = Health(core, check or CompletionProbe(backend).check)
        self._members = FleetMembers(core, self._health, self._on_removed)
        self._router = ContextRouter(core, self._enqueue)
        self._results = ResultHandler(core, self._health, self._router)
        self._health.judge, self._health.resume = self._results.judge, self._results.resume
        self._health.on_capabilities = self._router.set_capabilities
        self._hedger, self._scheduler = Hedger(core), BatchScheduler(core)
        self._sweep = TimeoutSweep(core, self._results, self._router)
        self._affinity = PrefixAffinity(config.prefix)
        self._connections = config.connections or config.concurrency
        self._started = 0  # requests in this turn of the event loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._parked_wait: float | None = None
        self._room, self._idle = asyncio.Event(), asyncio.Event()
        self.has_room = False
        self._update_events()

    # --- calls and endpoints --------------------------------------------------------------------

    def request(self, call: Call, *, urgent: bool = False) -> asyncio.Future[CallResult]:
        """Queue a call, before other rows if ``urgent``, and return the future of its result.

        The future is cancelled if the fleet closes before the call has ended. What awaits it runs
        before the call's place is given to another one.
        """
        core = self._core
        future = core.request(call)
        if core.closed:
            core.abandon((call,))
            return future
        call.ready_at = core.clock()
        if not self._config.group.single and call.pinned_to is None:
            call.group_key = core.backend.group_key(call.request)
        if call.turn == 1 and not urgent and len(self._endpoints.states) > 1:
            call.prefix_group = self._affinity.group_of(call.request)
        if self._router.may_be_too_long(call):
            self._router.count_tokens(call, urgent=urgent)
            self._update_events()
        else:
            self._enqueue(call, urgent)
        return future

    def _enqueue(self, call: Call, urgent: bool) -> None:
        self._waiting.add(call, urgent=urgent)
        if call.deadline is not None:
            self._sweep.start()
        lingers = self._scheduler.full_size and not urgent
        if self._full or (lingers and self._scheduler.keeps_lingering(call)):
            self._update_events()  # the end of a request or the timer pumps
        else:
            pinned = call.pinned_to
            self._pump(None if pinned is None else self._endpoints.get(pinned))

    def expect(self, more: bool) -> None:
        """Set whether more rows will be submitted; while they are, batches wait to fill up."""
        self._core.expecting = more
        if not more:
            self._pump()

    async def wait_for_room(self) -> None:
        """Wait until another row may be submitted."""
        await self._room.wait()

    async def wait_idle(self) -> None:
        """Wait until no call is in flight, ready or waiting."""
        await self._idle.wait()

    @property
    def closed(self) -> bool:
        """Whether it accepts no more calls."""
        return self._core.closed

    @property
    def limit(self) -> int:
        """How many rows it may have in flight now."""
        return min(self._config.concurrency, self._endpoints.limit)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that holds no slot; its exception stops the fleet, and a drain ends it."""
        return self._core.spawn(work, self._core.tasks)

    @property
    def stopped(self) -> asyncio.Future[BaseException]:
        """Gets the reason when the fleet cannot continue: an outage or a bug."""
        return self._core.stopped

    @property
    def states(self) -> Sequence[EndpointState]:
        """All endpoints."""
        return self._endpoints.states

    def probe(self, names: Collection[str]) -> None:
        """Probe these endpoints before they are sent anything."""
        for state in self._endpoints.states:
            if state.name in names:
                self._health.probe(state)

    def set_capabilities(self, capabilities: Mapping[str, Capabilities]) -> None:
        """Set what endpoints reported about themselves, by name."""
        for state in self._endpoints.states:
            if state.name in capabilities:
                self._router.set_capabilities(state, capabilities[state.name])

    def join(self, states: Sequence[EndpointState]) -> None:
        """Add endpoints; each gets calls once a probe has reached it."""
        self._members.join(states)
        self._pump()

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; remove them once they have nothing in flight."""
        self._members.leave(names)
        self._update_events()

    def _on_removed(self, state: EndpointState) -> None:
        self._router.remove(state)
        for suspended in self._waiting.on_probe(state.name):
            self._core.retry_at(suspended.call, self._core.clock())
        self._results.resume(state, CheckResult.BROKEN)

    def on_load_sample(self, state: EndpointState, load: EngineLoad | None, reason: str) -> None:
        """Record the load of an engine, by which its limit may have changed."""
        self._core.sample(state, reason, load)
        self.on_limit_change(state)

    def on_limit_change(self, state: EndpointState) -> None:
        """Follow a limit that was changed from outside."""
        self._endpoints.update(state)
        self._pump(state)

    def abandon_waiting(self) -> int:
        """Close the fleet and drop all calls that are not in flight; return how many."""
        self._core.closed = True
        for probe in self._core.probes:
            probe.cancel()
        count = self._waiting.clear()
        self._core.abandon(list(self._core.calls))
        self._update_events()
        return count

    async def drain(self, seconds: float) -> int:
        """Wait up to ``seconds`` for the calls in flight; cancel the others and return how many."""
        self.abandon_waiting()
        tasks = self._core.tasks
        if not tasks:
            return 0
        _, pending = await asyncio.wait(set(tasks), timeout=seconds)
        late = self._core.in_flight
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return late

    def tick(self, remaining: int | None = None) -> None:
        """Look for unresponsive endpoints and late calls; call it several times a second.

        ``remaining`` is how many rows are not done, those in flight included, if known.
        """
        self._core.remaining = remaining
        self._health.tick()
        self._sweep.retry_stranded()
        for late in self._hedger.late():
            now = self._core.clock()
            state = self._endpoints.select(now)
            if state and state is not late.state and fits(state, late.calls[0].min_context):
                self._start(state, list(late.calls), now)

    def stats(self) -> FleetStats:
        """Return the fleet's counters."""
        return self._core.stats(self.limit)

    # --- scheduling -----------------------------------------------------------------------------

    def _pump(self, first: EndpointState | None = None) -> None:
        """Start requests while calls are ready and endpoints have room.

        ``first`` gets the calls pinned to it before all others.
        """
        core, waiting, scheduler = self._core, self._waiting, self._scheduler
        now = core.clock()
        waiting.wake(now)
        scheduler.reset()
        self._parked_wait = self._endpoints.unpark(now) if self._endpoints.parked else None
        while first is not None and waiting.is_pinned(first.name) and not self._full:
            batch = scheduler.next(first, now)[1] if first.room > 0 else []
            if not batch:
                break
            self._start(first, batch, now)
        skipped: list[EndpointState] = []
        while waiting.ready and not self._full:
            state = self._endpoints.select(now)
            if state is None:
                break
            target, batch = scheduler.next(state, now)
            if batch:
                self._start(target, batch, now)
                continue
            if scheduler.linger_due is not None and not waiting.has_urgent:
                break  # too few rows are ready, whatever the endpoint
            if len(skipped) >= MAX_SKIPPED and core.in_flight:
                break  # the others are asked when the next request ends
            self._endpoints.skip(state)
            if not scheduler.crowded:  # else it is queued again when one of its requests ends
                skipped.append(state)
        for state in skipped:
            self._endpoints.update(state)
        if not waiting.ready and waiting.asleep:
            self._start_last(now)
        if self._endpoints.parked:
            self._parked_wait = self._endpoints.unpark(now)
        self._set_timer(now)
        self._update_events()

    def _start(self, state: EndpointState, calls: list[Call], now: float) -> None:
        urgent = urgent_calls(calls, now)
        if urgent:
            self._start(state, urgent, now)
            calls = [call for call in calls if call not in urgent]
        core, size = self._core, len(calls)
        request = InFlightRequest(state, calls, now)
        request.start(state.account)
        if not self._started:
            core.loop.call_soon(self._next_turn)
        self._started += 1 + size // ROWS_PER_START
        state.cold = False
        state.in_flight += size
        state.turns += size / state.weight
        state.requests[request] = None
        core.in_flight += size
        core.requests_in_flight += 1
        core.requests += 1
        request.task = core.spawn(self._send(request), core.tasks)

    def _start_last(self, now: float) -> None:
        """Start a call with which endpoints died, alone, once no other call is left."""
        if self._core.in_flight or self._waiting.next_due is not None or self._core.expecting:
            return
        state = self._endpoints.select(now)
        call = self._waiting.take_last() if state is not None else None
        if state is not None and call is not None:
            state.exclusive = True
            self._start(state, [call], now)

    def _set_timer(self, now: float) -> None:
        """Set the only timer to the next moment at which a request may start."""
        times = [self._waiting.next_due]
        if self._waiting.ready:
            times.append(self._scheduler.linger_due)
            if self._parked_wait is not None:
                times.append(now + self._parked_wait)
        due = min((time for time in times if time is not None), default=None)
        if self._timer is not None:
            if due is not None and abs(self._timer_due - due) < 0.001:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            self._timer = self._core.loop.call_at(due, self._on_timer)

    def _next_turn(self) -> None:
        self._started = 0
        self._pump()

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    @property
    def _full(self) -> bool:
        """Whether the run's own limits, or that of one turn, allow no more requests."""
        core = self._core
        return (
            core.in_flight >= self._config.concurrency
            or core.requests_in_flight >= self._connections
            or self._started >= STARTS_PER_TURN
        )

    def _update_events(self) -> None:
        """Set whether there is room for rows, and whether the fleet is idle."""
        ready, asleep, in_flight = self._waiting.ready, self._waiting.asleep, self._core.in_flight
        lookahead = self._config.lookahead
        has_room = ready < lookahead
        if has_room:
            limit = self.limit
            below = in_flight + ready + asleep < limit + lookahead
            has_room = (ready < limit or not ready) and below
        if has_room != self.has_room:
            self.has_room = has_room
            (self._room.set if has_room else self._room.clear)()
        idle = not (ready or asleep or in_flight)
        if idle != self._idle.is_set():
            (self._idle.set if idle else self._idle.clear)()

    # --- one request ----------------------------------------------------------------------------

    async def _send(self, request: InFlightRequest) -> None:
        core, state, calls = self._core, request.state, request.calls
        timeouts = timeouts_for(calls, self._config.timeouts, request.started)
        sent = core.unix()
        try:
            exchange = await core.backend.send(
                state.endpoint, [call.request for call in calls], timeouts
            )
        except asyncio.CancelledError:
            if not request.cancel_reason or request.task is None:
                raise
            request.task.uncancel()
            failure = Failure("connect", request.cancel_reason, passing=True)
            exchange = Exchange([failure] * len(calls), sent=sent, done=core.unix())
        finally:
            size = len(calls)
            state.in_flight -= size
            del state.requests[request]
            core.in_flight -= size
            core.requests_in_flight -= 1
            state.exclusive = False
            if state.warming is not None:
                self._scheduler.warmer.end(state)
        with core.result_context() if len(calls) > 1 else nullcontext():
            self._results.handle(request, exchange)
            if exchange.status is not None:
                state.on_answer(core.clock(), request.started)
            if core.closed:
                core.abandon(calls)
            self._members.on_request_end(state)
            self._endpoints.update(state)
            if any(call.ended for call in calls):
                # The rows write their outcomes, or ask again, before their slots are given away.
                await asyncio.sleep(0)
        self._pump()
