"""The fleet: matches ready calls with endpoints that have room.

Endpoints pull: whenever one has room it gets the next batch. So equal endpoints get equal shares,
and a slow one gets less. Calls that wait for a retry hold no slot. Everything runs on one event
loop. Requests start on events; only deadlines, silence and late calls are polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from random import Random

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.engines.probe import CompletionProbe
from bagent.fleet.call import (
    LAST,
    Action,
    Call,
    CallResult,
    CheckEndpoint,
    Complete,
    EndedCall,
    Fail,
    InFlightRequest,
    OpenCircuit,
    ProbeEndpoint,
    Retry,
    Split,
    StopFleet,
    Suspend,
    TakeEnded,
    urgent_calls,
)
from bagent.fleet.context_length import ContextRouter, fits
from bagent.fleet.endpoint_state import CheckResult, EndpointState
from bagent.fleet.exchanges import RequestSender, ResultHandler
from bagent.fleet.health import Check, Health
from bagent.fleet.prefix_affinity import PrefixAffinity
from bagent.fleet.retry import Hedger, RetryRules
from bagent.fleet.scheduler import Batch, BatchScheduler, Lingering
from bagent.fleet.state import FleetConfig, FleetReports, FleetState, FleetTasks
from bagent.types import Attempt, EndpointSample, Failure, FleetStats

__all__ = ["Fleet", "FleetConfig"]

STARTS_PER_TURN, ROWS_PER_START = 128, 8
"""Requests started in one turn of the event loop; this many rows count as one more."""

MAX_SKIPPED = 32
"""How many endpoints without a suitable call are asked before the next request has to end."""

SWEEP_SECONDS = 0.25
"""How often waiting calls are searched for those whose deadline has passed."""

CHECK_DELAY = 0.25
"""Seconds that a later success has to show that an endpoint works, before a check is sent."""


class Fleet:
    """Sends calls to endpoints.

    Args:
        states: the endpoints; at least one.
        backend: their protocol.
        config: limits and policies.
        on_attempts: receives the records of requests, one for each of their calls.
        on_sample: receives an endpoint's state whenever it changes.
        notice: receives messages for people.
        random: source of jitter.
        check: sends a minimal request to an endpoint; None: a short completion.

    Attributes:
        room: how many more rows may be submitted now.
    """

    def __init__(
        self,
        states: Sequence[EndpointState],
        backend: Backend,
        config: FleetConfig,
        *,
        on_attempts: Callable[[Sequence[Attempt]], None],
        notice: Callable[[str], None],
        random: Random,
        check: Check | None = None,
        on_sample: Callable[[EndpointSample], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config = config
        self._backend = backend
        self._loop = loop
        self._state = fleet = FleetState(states, config, loop.time)
        self._waiting, self._endpoints = fleet.waiting, fleet.endpoints
        self._tasks = tasks = FleetTasks(loop, self.on_change)
        self._reports = reports = FleetReports(notice, on_sample, loop.time)
        check = check or CompletionProbe(backend).check
        self._health = Health(fleet, backend, tasks, reports, self, check)
        self._router = ContextRouter(fleet, backend, tasks, self._on_counted)
        self._rules = RetryRules(fleet, self._router, random)
        self._results = ResultHandler(fleet, self._rules, reports, on_attempts)
        self._sender = RequestSender(fleet, backend, tasks, self._hand_over_soon)
        self._hedger = Hedger(fleet)
        self._scheduler = BatchScheduler(fleet, backend, tasks, self.on_change)
        self._affinity = PrefixAffinity(config.prefix)
        self._connections = config.connections or config.concurrency
        self._started = 0  # requests in this turn of the event loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._parked_wait: float | None = None
        self._lingering: Lingering | None = None
        self._ended: list[EndedCall] = []  # those that were not handed over yet
        self._handing_over = False  # what ended in this turn still holds its slots
        self._room, self._idle = asyncio.Event(), asyncio.Event()
        self.room = 0
        self._update_events()

    # --- calls and endpoints --------------------------------------------------------------------

    def submit(self, calls: Sequence[Call], take_ended: TakeEnded, *, urgent: bool = False) -> None:
        """Queue calls, before other rows if ``urgent``.

        ``take_ended`` gets them when they have ended, those of one turn of the event loop together.
        Nothing is started until it returns. It does not get calls that have not ended when the
        fleet closes.
        """
        for call in calls:
            call.take_ended = take_ended
        if calls and not self._state.closed:
            self._queue(calls, urgent)

    def request(self, call: Call, *, urgent: bool = False) -> asyncio.Future[CallResult]:
        """Queue a call, before other rows if ``urgent``, and return the future of its end.

        The future is cancelled if the fleet closes before the call has ended. What awaits it runs
        before the call's slot is given to another one.
        """
        future = self._state.awaited[call] = self._loop.create_future()
        if self._state.closed:
            self._abandon((call,))
        else:
            self._queue((call,), urgent)
        return future

    def _queue(self, calls: Sequence[Call], urgent: bool) -> None:
        """Queue calls that are new; those that may be too long for a context are counted first."""
        now, grouped = self._state.clock(), not self._config.group.single
        several = len(self._endpoints.states) > 1
        for call in calls:
            call.ready_at = now
            if grouped and call.pinned_to is None:
                call.group_key = self._backend.group_key(call.request)
            if several and call.turn == 1 and not urgent:
                call.prefix_group = self._affinity.group_of(call.request)
        long = dict.fromkeys(self._router.possibly_too_long(calls))
        for call in long:
            self._router.count_tokens(call, urgent=urgent)
        self._enqueue([call for call in calls if call not in long] if long else calls, urgent)

    def _enqueue(self, calls: Sequence[Call], urgent: bool) -> None:
        waiting, lingering = self._waiting, None if urgent else self._lingering
        waiting.add_all(calls, urgent=urgent)
        for call in calls:
            if call.deadline is not None:
                self._start_sweep()
        ready, blocked = waiting.ready, self._full or self._handing_over
        if blocked or (lingering and all(lingering.lacks_more_than(c, ready) for c in calls)):
            self._update_events()  # the end of a request or the timer pumps
            return
        for pinned in dict.fromkeys(call.pinned_to for call in calls) or (None,):
            self._pump(None if pinned is None else self._endpoints.get(pinned))

    def _end(self, ended: Sequence[EndedCall]) -> None:
        """End calls; what waits for them runs in the next turn of the event loop."""
        self._hand_over_soon()
        for entry in ended:
            call = entry[0]
            if call.in_flight:
                self._state.cancel_copies(call)
            if not call.ended:
                call.ended = True
                self._ended.append(entry)

    def _hand_over_soon(self) -> None:
        if not self._handing_over:
            self._handing_over = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """Handle what ended in this turn: requests, then calls. Then give their slots away."""
        requests = self._sender.take_ended()
        try:
            self._apply(self._results.handle(requests))
            for state in {request.state: None for request in requests}:
                if self._health.remove_if_done(state):
                    self._on_removed([state])
                self._endpoints.update(state)
        except Exception as error:  # noqa: BLE001 - it stops the fleet
            self._tasks.stop(error)
        ended, self._ended = self._ended, []
        awaited = self._state.hand_over(ended, self._tasks.stop)
        self._handing_over = False
        if self._state.closed:
            self._abandon(c for request in requests for c in request.calls if not c.in_flight)
        if awaited:
            self._loop.call_soon(self._pump)  # after the tasks that await them
        else:
            self._pump()

    def _abandon(self, calls: Iterable[Call]) -> None:
        """Cancel the futures of calls that have not ended: their rows stay unfinished."""
        for call in calls:
            if not call.ended and (future := self._state.awaited.pop(call, None)) is not None:
                future.cancel()

    def expect(self, more: bool) -> None:
        """Set whether more rows will be submitted; while they are, batches wait to fill up."""
        self._state.expecting = more
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
        return self._state.closed

    @property
    def limit(self) -> int:
        """How many rows it may have in flight now."""
        return self._state.limit

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that holds no slot; its exception stops the fleet, and a drain ends it."""
        return self._tasks.spawn(work)

    @property
    def stopped(self) -> asyncio.Future[BaseException]:
        """Gets the reason when the fleet cannot continue: an outage or a bug."""
        return self._tasks.stopped

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
        self._on_removed(self._health.join(states))
        self._pump()

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; remove them once they have nothing in flight."""
        self._on_removed(self._health.leave(names))
        self._update_events()

    def _on_removed(self, states: Sequence[EndpointState]) -> None:
        for state in states:
            self._router.remove(state)
            self._apply(self._rules.after_removal(state))

    def on_load_sample(self, state: EndpointState, load: EngineLoad | None, reason: str) -> None:
        """Record the load of an engine, by which its limit may have changed."""
        self._reports.sample(state, reason, load)
        self.on_limit_change(state)

    def on_limit_change(self, state: EndpointState) -> None:
        """Follow a limit that was changed from outside."""
        self._endpoints.update(state)
        self._pump(state)

    def abandon_waiting(self) -> None:
        """Close the fleet and drop all calls that are not in flight."""
        self._state.closed = True
        self._tasks.cancel_probes()
        self._waiting.clear()
        self._abandon([call for call in self._state.awaited if not call.in_flight])
        self._update_events()

    async def drain(self, seconds: float) -> int:
        """Wait up to ``seconds`` for the calls in flight; cancel the others and return how many."""
        self.abandon_waiting()
        late = 0

        def count() -> None:
            nonlocal late
            self._hand_over()
            late = self._state.in_flight

        await self._sender.drain(seconds, count)
        self._hand_over()
        await asyncio.sleep(0)  # for what awaits their futures
        self._abandon(list(self._state.awaited))
        return late

    def tick(self, remaining: int | None = None) -> None:
        """Look for unresponsive endpoints and late calls; call it several times a second.

        ``remaining`` is how many rows are not done, those in flight included, if known.
        """
        self._state.remaining = remaining
        self._health.tick()
        stranded = self._rules.stranded()
        if stranded:
            self._apply(stranded)
            self._pump()
        for late in self._hedger.late():
            now = self._state.clock()
            state = self._endpoints.select(now, other_than=late.state)
            if (
                state
                and fits(state, late.calls[0].min_context)
                and self._scheduler.affordable(late.calls)
            ):
                late.calls[0].hedged = True
                self._start(state, list(late.calls), now)

    @property
    def open_rows(self) -> int:
        """How many rows wait or are in flight."""
        return self._state.in_flight + self._waiting.ready + self._waiting.asleep

    def stats(self) -> FleetStats:
        """Return the fleet's counters."""
        return self._state.stats()

    # --- what endpoints and timers report -------------------------------------------------------

    def on_probe(
        self, state: EndpointState, capabilities: Capabilities | None, *, answered: bool
    ) -> None:
        """Resume the calls that awaited a probe of an endpoint."""
        if capabilities is not None:
            self._router.set_capabilities(state, capabilities)
        suspended = self._waiting.on_probe(state.name)
        self._apply(self._rules.after_probe(state, suspended, answered=answered))
        if suspended and answered:
            self._apply(self._rules.after_success(state))

    def on_check(self, state: EndpointState, result: CheckResult) -> None:
        """Resume the calls that awaited a check of an endpoint."""
        self._apply(self._rules.after_check(state, result))
        if result is not CheckResult.BROKEN:
            self._check_later(state)  # for calls that failed since the check was sent

    def on_change(self) -> None:
        """Start requests where endpoints may have more room."""
        self._pump()

    def _on_counted(self, call: Call, urgent: bool, failure: Failure | None) -> None:
        if failure is None:
            self._enqueue((call,), urgent)
        else:
            self._apply([Fail(call, failure, None)])
            self._pump()

    def _check_later(self, state: EndpointState) -> None:
        """Check an endpoint soon, unless it serves the suspended calls' successors meanwhile."""

        def check() -> None:
            call = self._waiting.awaiting_check(state.name)
            if call is not None:
                self._health.check(state, call.request)

        self._loop.call_later(CHECK_DELAY, check)

    def _start_sweep(self) -> None:
        """Look for overdue calls regularly while calls wait."""
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        fleet, waiting = self._state, self._waiting
        self._sweep_timer = None
        overdue = waiting.take_overdue(fleet.clock())
        message = "the row's time limit (limits.row) was over before an endpoint could take it"
        failure = Failure("timeout", message, passing=True)
        self._apply([Fail(call, failure, None) for call in overdue])
        if not fleet.closed and (fleet.in_flight or waiting.ready or waiting.asleep):
            self._start_sweep()
        self._pump()

    # --- actions --------------------------------------------------------------------------------

    def _apply(self, actions: Iterable[Action]) -> None:
        """Do what results, probes and checks ask for."""
        closed, waiting = self._state.closed, self._waiting
        for action in actions:
            match action:
                case Complete(ended):
                    self._end(ended)
                case Fail(call, failure, delivery):
                    self._end([(call, CallResult(failure, delivery))])
                case Retry(call, at) if not closed:
                    if at == LAST:
                        waiting.add_last(call)
                    else:
                        waiting.sleep(call, at)
                case Split(calls) if not closed:
                    waiting.add_halves(calls)
                case Suspend(state, suspended):
                    waiting.suspend(state.name, suspended)
                    if not suspended.until_probe:
                        self._check_later(state)
                case ProbeEndpoint() | CheckEndpoint() | OpenCircuit():
                    self._health.apply(action)
                case StopFleet(error):
                    self._tasks.stop(error)

    # --- scheduling -----------------------------------------------------------------------------

    def _pump(self, first: EndpointState | None = None) -> None:
        """Start requests while calls are ready and endpoints have room.

        ``first`` gets the calls pinned to it before all others. Nothing is started while calls
        that have ended hold their slots.
        """
        if self._handing_over:
            return
        waiting, scheduler = self._waiting, self._scheduler
        now = self._state.clock()
        waiting.wake(now)
        self._lingering = None
        self._parked_wait = self._endpoints.unpark(now) if self._endpoints.parked else None
        while first is not None and waiting.is_pinned(first.name) and not self._full:
            may_send = first.room > 0 and first.account.wait(now, 0) <= 0
            if not (may_send and self._start_batch(scheduler.next(first, now), now)):
                break
        self._start_ready(now)
        if not waiting.ready and waiting.asleep:
            self._start_last(now)
        if self._endpoints.parked:
            self._parked_wait = self._endpoints.unpark(now)
        self._set_timer(now)
        self._update_events()

    def _start_ready(self, now: float) -> None:
        """Start requests to one endpoint after the other."""
        waiting, skipped = self._waiting, list[EndpointState]()
        while waiting.ready and not self._full:
            state = self._endpoints.select(now)
            if state is None:
                break
            batch = self._scheduler.next(state, now)
            if self._start_batch(batch, now):
                continue
            if batch.too_costly or (self._lingering is not None and not waiting.has_urgent):
                break  # whatever the endpoint: the budget allows none, or too few are ready
            if len(skipped) >= MAX_SKIPPED and self._state.in_flight:
                break  # the others are asked when the next request ends
            self._endpoints.skip(state)
            if not batch.crowded:  # else it is queued again when one of its requests ends
                skipped.append(state)
        for state in skipped:
            self._endpoints.update(state)

    def _start_batch(self, batch: Batch, now: float) -> bool:
        """Start the request of a batch; return whether there was one."""
        if batch.lingering is not None:
            self._lingering = batch.lingering
        if batch.warms or batch.single or batch.undetected:
            self._scheduler.begin(batch)
        if batch.calls:
            self._start(batch.state, batch.calls, now)
        return bool(batch.calls)

    def _start(self, state: EndpointState, calls: Sequence[Call], now: float) -> None:
        """Start a request with ``calls``, and another one before it with the urgent of them."""
        urgent = urgent_calls(calls, now) if len(calls) > 1 else []
        if urgent:
            self._start(state, urgent, now)
            calls = [call for call in calls if call not in urgent]
        if not self._started:
            self._loop.call_soon(self._next_turn)
        self._started += 1 + len(calls) // ROWS_PER_START
        self._sender.start(InFlightRequest(state, calls, now))

    def _start_last(self, now: float) -> None:
        """Start a call with which endpoints died, alone, once no other call is left."""
        if self._state.in_flight or self._waiting.next_due is not None or self._state.expecting:
            return
        state = self._endpoints.select(now)
        call = self._waiting.take_last() if state is not None else None
        if state is None or call is None:
            return
        if self._scheduler.affordable([call]):
            state.exclusive = True
            self._start(state, [call], now)
        else:
            self._waiting.add_last(call)

    def _set_timer(self, now: float) -> None:
        """Set the only timer to the next moment at which a request may start."""
        waiting, lingering, parked = self._waiting, self._lingering, self._parked_wait
        due = waiting.next_due
        if waiting.ready and lingering is not None:
            due = lingering.due if due is None else min(due, lingering.due)
        wants_endpoint = waiting.ready or (waiting.has_last and not self._state.in_flight)
        if wants_endpoint and parked is not None:
            due = now + parked if due is None else min(due, now + parked)
        if self._timer is not None:
            if due is not None and abs(self._timer_due - due) < 0.001:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def _next_turn(self) -> None:
        self._started = 0
        self._pump()

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    @property
    def _full(self) -> bool:
        """Whether the run's own limits, or that of one turn, allow no more requests."""
        fleet = self._state
        return (
            fleet.in_flight >= self._config.concurrency
            or fleet.requests_in_flight >= self._connections
            or self._started >= STARTS_PER_TURN
        )

    def _update_events(self) -> None:
        """Set how many rows there is room for, and whether the fleet is idle."""
        ready, asleep, in_flight = self._waiting.ready, self._waiting.asleep, self._state.in_flight
        limit, lookahead = self._state.limit, self._config.lookahead
        # One call may always be ready, so that a fleet without an endpoint has some to probe with.
        room = min(max(limit, 1) - ready, lookahead - ready)
        self.room = room = min(room, limit + lookahead - in_flight - ready - asleep)
        if (room > 0) != self._room.is_set():
            (self._room.set if room > 0 else self._room.clear)()
        idle = not (ready or asleep or in_flight or self._handing_over)
        if idle != self._idle.is_set():
            (self._idle.set if idle else self._idle.clear)()
