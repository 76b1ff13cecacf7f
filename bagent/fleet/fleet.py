"""The fleet: ready calls, endpoints with room, and what happens between them.

Endpoints pull: whenever an endpoint has room it takes the next ready group, so equal endpoints get
equal shares and a slow one takes less. Calls that wait for their next try hold no slot.
Everything happens on one event loop; nothing polls.
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
from bagent.fleet.call import Call, InFlightRequest, in_a_hurry, timeouts_for
from bagent.fleet.context_length import NOT_TOLD, ContextRouter, fits
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Check, Health, HealthVerdict
from bagent.fleet.prefix_affinity import PrefixAffinity
from bagent.fleet.results import ResultHandler
from bagent.fleet.scheduler import BatchScheduler
from bagent.fleet.state import FleetConfig, FleetState, Together
from bagent.fleet.tail_latency import Hedger
from bagent.types import Attempt, EndpointSample, Failure, FleetStats


class FleetMembers:
    """Who belongs to a fleet now.

    Args:
        forgotten: called with an endpoint that left, once nothing is in flight there any more.
    """

    def __init__(
        self, core: FleetState, health: Health, forgotten: Callable[[EndpointState], None]
    ) -> None:
        self._core = core
        self._health = health
        self._forgotten = forgotten

    def join(self, states: Sequence[EndpointState]) -> None:
        """Take in endpoints; each gets work once a probe has found it."""
        self._core.endpoints.add(*states)
        for state in states:
            self._core.sample(state, "joined")
            self._health.doubt(state)

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; what is in flight there ends as usual."""
        for name in names:
            state = self._core.endpoints.named(name)
            if state is not None and not state.leaving:
                state.leaving = True
                self._core.sample(state, "left the hostfile")
                self.ended(state)

    def ended(self, state: EndpointState) -> None:
        """A request at the endpoint is over: forget it if it left and this was the last one."""
        core = self._core
        if state.leaving and not state.carriers and state in core.endpoints.states:
            core.endpoints.remove(state)
            self._forgotten(state)


LOOK_SECONDS = 0.25


class TimeoutSweep:
    """Ends the waiting calls whose row's time limit is over, and those that nobody can take."""

    def __init__(self, core: FleetState, settler: ResultHandler, fitter: ContextRouter) -> None:
        self._core = core
        self._fitter = fitter
        self._settler = settler
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Calls wait that have a time limit."""
        if self._timer is None:
            self._timer = self._core.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        core = self._core
        self._timer = None
        late = core.waiting.overdue(core.clock())
        if late:
            core.spawn(self._fail(late), core.tasks)
        if not core.closed and (core.in_flight or core.waiting.ready or core.waiting.asleep):
            self.watch()
        core.pump()

    async def _fail(self, late: Sequence[Call]) -> None:
        words = "the row's time limit (limits.row) was over before an endpoint could take it"
        for call in late:
            self._core.fail(call, Failure("timeout", words, passing=True), None)

    def retry_pinned(self) -> None:
        """A call that only one endpoint may have, or only long ones, costs a try for each look that
        finds none of them at work, while others are."""
        core = self._core

        def is_down(name: str) -> bool:
            state = core.endpoints.named(name)
            return state is None or state.leaving or not state.up or state.resting

        works = any(state.up and not state.resting for state in core.endpoints.states)
        for call in core.waiting.pinned_where(is_down) if works else ():
            words = f"{call.only} serves nothing, and no other endpoint may have this row"
            self._settler.retry(call, Failure("connect", words, passing=True), None)
        for call in self._fitter.lost():
            length = "" if call.least == NOT_TOLD else f" of {call.least} tokens"
            words = f"no endpoint answers whose context{length} this row needs"
            self._settler.retry(call, Failure("connect", words, passing=True), None)


__all__ = ["Fleet", "FleetConfig"]

STARTED_AT_ONCE, ROWS_LIKE_ONE = 128, 8
"""Requests that start in one turn of the event loop, and rows that count as one more of them."""

PASSED_AT_ONCE = 32
"""So many endpoints are asked in vain before what is in flight is waited for: of thousands, most
may hold nothing of what is left."""


class Fleet:
    """Sends calls to endpoints by pull.

    Args:
        states: the endpoints; at least one.
        on_attempt: gets one record per call and request.
        on_sample: gets the state of an endpoint whenever it changes.
        notice: gets lines for people.
        random: spreads retries.
        check: asks an endpoint that failed calls for a proof that it works; None: by the backend.
        together: surrounds the ends of all calls of one request.

    ``roomy`` says whether another row may be submitted now.
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
        together: Together = nullcontext,
    ) -> None:
        self._core = core = FleetState(
            states,
            backend,
            config,
            on_attempt=on_attempt,
            on_sample=on_sample,
            notice=notice,
            random=random,
            together=together,
        )
        core.pump = self._pump
        self._config = config
        self._waiting, self._endpoints = core.waiting, core.endpoints
        self._health = Health(core, check or CompletionProbe(backend).check)
        self._members = FleetMembers(core, self._health, self._forgotten)
        self._fitter = ContextRouter(core, self._line_up)
        self._settler = ResultHandler(core, self._health, self._fitter)
        self._health.judge, self._health.told = self._settler.judge, self._fitter.told
        self._health.resume = self._settler.resume
        self._hedger, self._picker = Hedger(core), BatchScheduler(core)
        self._overdue = TimeoutSweep(core, self._settler, self._fitter)
        self._kinship = PrefixAffinity(config.prefix)
        self._connections = config.connections or config.concurrency
        self._started, self._timer_due = 0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._parked_wait: float | None = None
        self._room, self._idle = asyncio.Event(), asyncio.Event()
        self.roomy = False
        self._note_state()

    # --- from above -------------------------------------------------------------------------

    def submit(self, call: Call, *, urgent: bool = False) -> None:
        """Take a call, before new rows if ``urgent``; after :meth:`abandon_waiting` forget it."""
        core = self._core
        if core.closed:
            return
        call.ready_at = core.clock()
        if not self._config.group.single and call.only is None:
            call.group_key = core.backend.group_key(call.request)
        if call.turn == 1 and not urgent and len(self._endpoints.states) > 1:
            call.family = self._kinship.family_of(call.request)
        if self._fitter.may_be_too_long(call):
            self._fitter.count(call, urgent=urgent)
            self._note_state()
        else:
            self._line_up(call, urgent)

    def _line_up(self, call: Call, urgent: bool) -> None:
        self._waiting.add(call, urgent=urgent)
        if call.give_up_at is not None:
            self._overdue.watch()
        if self._full or (self._picker.wanted and not urgent and self._picker.waits_on(call)):
            self._note_state()  # the end of a request will pump, or the timer
        else:
            self._pump(None if call.only is None else self._endpoints.named(call.only))

    def expect(self, more: bool) -> None:
        """Say whether more rows come: groups wait a moment to be full while they do."""
        self._core.expecting = more
        if not more:
            self._pump()

    async def room(self) -> None:
        """Wait until another row may be submitted."""
        await self._room.wait()

    async def idle(self) -> None:
        """Wait until no call is in flight, ready or waiting."""
        await self._idle.wait()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._core.closed

    @property
    def limit(self) -> int:
        """How many rows it may have in flight now."""
        return min(self._config.concurrency, self._endpoints.limit)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that holds no slot; its fault stops the fleet, a drain ends it too."""
        return self._core.spawn(work, self._core.tasks)

    @property
    def stopped(self) -> asyncio.Future[BaseException]:
        """Gets the reason when the fleet cannot go on (all endpoints gone, a bug)."""
        return self._core.stopped

    def doubt(self, names: Collection[str]) -> None:
        """Probe these endpoints before anything is sent to them."""
        for state in self._endpoints.states:
            if state.name in names:
                self._health.doubt(state)

    def know(self, known: Mapping[str, Capabilities]) -> None:
        """Take what endpoints told of themselves, by name."""
        for state in self._endpoints.states:
            if state.name in known:
                self._fitter.told(state, known[state.name])

    def join(self, states: Sequence[EndpointState]) -> None:
        """Take in endpoints that joined; each gets rows once a probe has found it."""
        self._members.join(states)
        self._pump()

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints; they are forgotten once nothing is in flight."""
        self._members.leave(names)
        self._note_state()

    def _forgotten(self, state: EndpointState) -> None:
        self._fitter.left(state)
        for held in self._waiting.release(state.name):
            self._core.sleep(held.call, self._core.clock())
        self._settler.resume(state, HealthVerdict.SICK)

    @property
    def states(self) -> Sequence[EndpointState]:
        """All endpoints, for polls and displays."""
        return self._endpoints.states

    def looked_at(self, state: EndpointState, load: EngineLoad | None, reason: str) -> None:
        """Note what a look at an engine showed; its limit may have been changed by it."""
        self._core.sample(state, reason, load)
        self.changed(state)

    def changed(self, state: EndpointState) -> None:
        """Tell that an endpoint's limit was changed from outside."""
        self._endpoints.changed(state)
        self._pump(state)

    def abandon_waiting(self) -> int:
        """Forget all calls that are not in flight; returns how many: they stay unfinished."""
        self._core.closed = True
        for probe in self._core.probes:
            probe.cancel()
        count = self._waiting.clear()
        self._note_state()
        return count

    async def drain(self, seconds: float) -> int:
        """Wait up to ``seconds`` for what is in flight, give the rest up; returns how many."""
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

    def tick(self, left: int | None = None) -> None:
        """Look for stalled endpoints and late calls; call it several times a second.

        ``left`` is how many rows are still to end, those in flight included; None: not known.
        """
        self._core.left = left
        self._health.tick()
        self._overdue.retry_pinned()
        for late in self._hedger.late():
            now = self._core.clock()
            state = self._endpoints.next(now)
            if state and state is not late.state and fits(state, late.group[0].least):
                self._start(state, list(late.group), now)

    def stats(self) -> FleetStats:
        """The fleet now, for displays."""
        return self._core.stats(self.limit)

    # --- the pump ---------------------------------------------------------------------------

    def _pump(self, first: EndpointState | None = None) -> None:
        """Give ready calls to endpoints with room; ``first`` gets at once what only it may have."""
        core, waiting = self._core, self._waiting
        now = core.clock()
        waiting.wake(now)
        self._picker.begin()
        self._parked_wait = self._endpoints.unpark(now) if self._endpoints.parked else None
        while first is not None and waiting.is_pinned(first.name) and not self._full:
            group = self._picker.next(first, now)[1] if first.room > 0 else []
            if not group:
                break
            self._start(first, group, now)
        passed: list[EndpointState] = []
        while waiting.ready and not self._full:
            state = self._endpoints.next(now)
            if state is None:
                break
            taker, group = self._picker.next(state, now)
            if group:
                self._start(taker, group, now)
                continue
            if self._picker.linger_due is not None and not waiting.hurried:
                break  # too few rows are ready, for whichever endpoint
            if len(passed) >= PASSED_AT_ONCE and core.in_flight:
                break  # the others are asked when the next request ends
            self._endpoints.pass_over(state)
            if not self._picker.crowded:  # else it is listed again once it has finished more
                passed.append(state)
        for state in passed:
            self._endpoints.changed(state)
        if not waiting.ready and waiting.asleep:
            self._start_last(now)
        if self._endpoints.parked:
            self._parked_wait = self._endpoints.unpark(now)
        self._arm(now)
        self._note_state()

    def _start(self, state: EndpointState, group: list[Call], now: float) -> None:
        hurried = in_a_hurry(group, now)
        if hurried:
            self._start(state, hurried, now)
            group = [call for call in group if call not in hurried]
        core, size = self._core, len(group)
        carrier = InFlightRequest(state, group, now)
        carrier.begin(state.account)
        if not self._started:
            core.loop.call_soon(self._next_turn)
        self._started += 1 + size // ROWS_LIKE_ONE
        state.cold = False
        state.in_flight += size
        state.turns += size / state.weight
        state.carriers[carrier] = None
        core.in_flight += size
        core.requests_out += 1
        core.requests += 1
        carrier.task = core.spawn(self._carry(carrier), core.tasks)

    def _start_last(self, now: float) -> None:
        """Rows with which endpoints died: each alone on an endpoint, when no other row is left."""
        if self._core.in_flight or self._waiting.next_due is not None or self._core.expecting:
            return
        state = self._endpoints.next(now)
        call = self._waiting.take_last() if state is not None else None
        if state is not None and call is not None:
            state.exclusive = True
            self._start(state, [call], now)

    def _arm(self, now: float) -> None:
        """Set the one timer to the next moment at which something may start."""
        due = self._waiting.next_due
        if self._waiting.ready:
            if self._parked_wait is not None:
                at = now + self._parked_wait
                due = at if due is None else min(at, due)
            if (linger := self._picker.linger_due) is not None:
                due = linger if due is None else min(linger, due)
        if self._timer is not None:
            # The loop's own handles do not all tell when they are due.
            if due is not None and abs(self._timer_due - due) < 0.001:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            self._timer = self._core.loop.call_at(due, self._wake)

    def _next_turn(self) -> None:
        self._started = 0
        self._pump()

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    @property
    def _full(self) -> bool:
        """Whether the run's own limits allow no request more, or none in this turn."""
        core = self._core
        return (
            core.in_flight >= self._config.concurrency
            or core.requests_out >= self._connections
            or self._started >= STARTED_AT_ONCE
        )

    def _note_state(self) -> None:
        """Tell whoever waits whether there is room for rows, and whether nothing is left."""
        ready, asleep, in_flight = self._waiting.ready, self._waiting.asleep, self._core.in_flight
        ahead = self._config.lookahead
        roomy = ready < ahead
        if roomy:
            limit = self.limit
            roomy = (ready < limit or not ready) and in_flight + ready + asleep < limit + ahead
        if roomy != self.roomy:
            self.roomy = roomy
            (self._room.set if roomy else self._room.clear)()
        idle = not (ready or asleep or in_flight)
        if idle != self._idle.is_set():
            (self._idle.set if idle else self._idle.clear)()

    # --- one request ------------------------------------------------------------------------

    async def _carry(self, carrier: InFlightRequest) -> None:
        core, state, group = self._core, carrier.state, carrier.group
        timeouts = timeouts_for(group, self._config.timeouts, carrier.started)
        began = core.unix()
        try:
            exchange = await core.backend.send(
                state.endpoint, [call.request for call in group], timeouts
            )
        except asyncio.CancelledError:
            if not carrier.given_up or carrier.task is None:
                raise
            carrier.task.uncancel()
            failure = Failure("connect", carrier.given_up, passing=True)
            exchange = Exchange([failure] * len(group), sent=began, done=core.unix())
        finally:
            size = len(group)
            state.in_flight -= size
            del state.carriers[carrier]
            core.in_flight -= size
            core.requests_out -= 1
            state.exclusive = False
            if state.warming is not None:
                self._picker.warmer.over(state)
        self._settler.settle(carrier, exchange)
        if exchange.status is not None:
            state.answered(core.clock(), carrier.started)
        self._members.ended(state)
        self._endpoints.changed(state)
        self._pump()
