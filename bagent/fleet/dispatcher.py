"""The fleet: ready calls, endpoints with room, and what happens between them.

Endpoints pull: whenever an endpoint has room it takes the next ready call, so equal endpoints get
equal shares and a slow one takes less. Calls that wait for their next try hold no
slot. Everything happens on one event loop; nothing polls.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from random import Random

import msgspec

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.fleet.call import Call, Delivery, attempt_record, timeouts_for
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.endpoints import Endpoints
from bagent.fleet.limiter import Pace
from bagent.fleet.outage import Outage
from bagent.fleet.retry import FREE_TRIES, RetryPolicy, decide
from bagent.fleet.waiting import Waiting
from bagent.types import Attempt, Failure, FleetStats, Reply

OVERDUE_SECONDS = 0.25


class FleetConfig(msgspec.Struct, frozen=True):
    """Limits of a whole fleet.

    ``concurrency`` bounds rows in flight over all endpoints. ``lookahead`` is how many rows may
    stand ready or wait for a retry beyond those in flight: it bounds memory. ``outage`` is how
    long, in seconds, a run waits when no endpoint answers before it stops.
    """

    concurrency: int
    timeouts: Timeouts = Timeouts()
    retry: RetryPolicy = RetryPolicy()
    lookahead: int = 256
    outage: float = 120.0
    probe_seconds: float = 5.0


class Fleet:
    """Sends calls to endpoints by pull.

    Args:
        states: the endpoints; at least one.
        pace: the shared rate limit of the account.
        on_attempt: gets one record per call and request.
        notice: gets lines for people.
        random: spreads retries.
    """

    def __init__(
        self,
        states: Sequence[EndpointState],
        backend: Backend,
        config: FleetConfig,
        *,
        pace: Pace,
        on_attempt: Callable[[Attempt], None],
        notice: Callable[[str], None],
        random: Random,
    ) -> None:
        self._endpoints = Endpoints(states)
        self._backend = backend
        self._config = config
        self._pace = pace
        self._on_attempt = on_attempt
        self._notice = notice
        self._random = random
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._waiting = Waiting()
        self._serial = itertools.count(1)
        self._in_flight = 0
        self._requests = 0
        self._throttle_answers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._outage = Outage(config.outage)
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._stopped: asyncio.Future[BaseException] = self._loop.create_future()
        self._closed = False
        self._note_state()

    # --- from above -------------------------------------------------------------------------

    def submit(self, call: Call, *, urgent: bool = False) -> None:
        """Take a call, before new rows if ``urgent``; after :meth:`abandon_waiting` forget it."""
        if self._closed:
            return
        call.ready_at = self._clock()
        self._waiting.add(call, urgent=urgent)
        if call.give_up_at is not None and self._overdue_timer is None:
            self._overdue_timer = self._loop.call_later(OVERDUE_SECONDS, self._end_overdue)
        self._pump()

    async def room(self) -> None:
        """Wait until another row may be submitted."""
        await self._room.wait()

    async def idle(self) -> None:
        """Wait until no call is in flight, ready or waiting."""
        await self._idle.wait()

    @property
    def stopped(self) -> asyncio.Future[BaseException]:
        """Gets the reason when the fleet cannot go on (all endpoints gone, a bug)."""
        return self._stopped

    def abandon_waiting(self) -> int:
        """Forget all calls that are not in flight; returns how many: they stay unfinished."""
        self._closed = True
        for probe in self._probes:
            probe.cancel()
        count = self._waiting.clear()
        self._note_state()
        return count

    async def drain(self, seconds: float) -> int:
        """Wait up to ``seconds`` for what is in flight, give the rest up; returns how many."""
        self.abandon_waiting()
        if not self._tasks:
            return 0
        _, pending = await asyncio.wait(self._tasks, timeout=seconds)
        late = self._in_flight
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return late

    def stats(self) -> FleetStats:
        """The fleet now, for displays."""
        now = self._clock()
        return FleetStats(
            in_flight=self._in_flight,
            limit=self._limit(),
            ready=self._waiting.ready,
            retrying=self._waiting.asleep,
            throttled_s=self._pace.paused(now),
            endpoints_up=self._endpoints.up,
            endpoints=len(self._endpoints.states),
            throttle_answers=self._throttle_answers,
            requests=self._requests,
        )

    # --- the pump ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give ready calls to endpoints with room until one of the two runs out."""
        now = self._clock()
        waiting = self._waiting
        waiting.wake(now)
        while waiting.ready and self._in_flight < self._config.concurrency:
            if self._pace.wait(now) > 0:
                break
            state = self._endpoints.next()
            if state is None:
                break
            self._start(state, [waiting.next()], now)
        self._arm(now)
        self._note_state()

    def _start(self, state: EndpointState, group: list[Call], now: float) -> None:
        state.in_flight += len(group)
        self._in_flight += len(group)
        self._requests += 1
        self._pace.started(now)
        for call in group:
            call.tries += 1
            call.waited_ms += (now - call.ready_at) * 1000
        self._spawn(self._exchange(state, group, now), self._tasks)

    def _spawn(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._probes.discard(task)
        if task.cancelled():
            self._note_state()
        elif (error := task.exception()) is not None:
            self._stop(error)

    def _arm(self, now: float) -> None:
        """Set the one timer to the next moment at which something may start."""
        due = self._waiting.next_due
        if self._waiting.ready:
            wait = self._pace.wait(now)
            if wait > 0:
                due = min(now + wait, due) if due is not None else now + wait
        if self._timer is not None:
            # The loop's own handles do not all tell when they are due.
            if due is not None and abs(self._timer_due - due) < 0.001:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    def _end_overdue(self) -> None:
        """End the waiting calls whose row's time limit is over."""
        self._overdue_timer = None
        late = self._waiting.overdue(self._clock())
        if late:
            self._spawn(self._fail_overdue(late), self._tasks)
        if not self._closed and (self._in_flight or self._waiting.ready or self._waiting.asleep):
            self._overdue_timer = self._loop.call_later(OVERDUE_SECONDS, self._end_overdue)
        self._pump()

    async def _fail_overdue(self, late: Sequence[Call]) -> None:
        words = "the row's time limit (limits.row) was over before an endpoint could take it"
        for call in late:
            call.handler.failed(call, Failure("timeout", words, passing=True), None)

    def _limit(self) -> int:
        return min(self._config.concurrency, self._endpoints.limit)

    def _note_state(self) -> None:
        """Tell whoever waits whether there is room for rows, and whether nothing is left."""
        ready, asleep = self._waiting.ready, self._waiting.asleep
        room = self._room
        if ready >= self._config.lookahead:
            room.clear()
        else:
            limit = self._limit()
            if ready < max(1, limit) and (
                self._in_flight + ready + asleep < limit + self._config.lookahead
            ):
                if not room.is_set():
                    room.set()
            else:
                room.clear()
        if ready or asleep or self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    # --- one request ------------------------------------------------------------------------

    async def _exchange(self, state: EndpointState, group: list[Call], started: float) -> None:
        timeouts = timeouts_for(group, self._config.timeouts, started)
        try:
            exchange = await self._backend.send(
                state.endpoint, [call.request for call in group], timeouts
            )
        finally:
            state.in_flight -= len(group)
            self._in_flight -= len(group)
        now = self._clock()
        group_id = f"{state.endpoint.name}/{next(self._serial)}"
        for call, result in zip(group, exchange.results, strict=True):
            delivery = Delivery(
                state.endpoint.name, group_id, exchange.sent, exchange.done, call.waited_ms
            )
            self._settle(state, call, result, exchange, delivery, started)
            if isinstance(result, Reply):
                state.limit.succeeded(1, state.in_flight + len(group))
        if exchange.status is not None:
            state.answered(now)
        self._endpoints.changed(state)
        self._pump()

    def _settle(
        self,
        state: EndpointState,
        call: Call,
        result: Reply | Failure,
        exchange: Exchange,
        delivery: Delivery,
        started: float,
    ) -> None:
        now = self._clock()
        failure = result if isinstance(result, Failure) else None
        if isinstance(result, Reply):
            self._pace.served(now, started)
            call.throttled_at = None
            failure = call.handler.replied(call, result, delivery)
        self._on_attempt(attempt_record(call, result, failure, exchange, delivery))
        if failure is None:
            return
        if failure.kind == "rate_limited":
            self._throttled(state, failure, started, now)
        elif failure.busy:
            self._throttle_answers += 1
            state.limit.overloaded(started, now, failure.message)
        if exchange.learned or (exchange.again and call.free < FREE_TRIES):
            call.free += exchange.again
            self._sleep(call, now)
        elif failure.kind == "connect" and state.suspect(started) and failure.passing:
            if not state.up:  # known to be dead: it costs no try, and others may take the call
                self._sleep(call, now)
                return
            self._waiting.hold(state.endpoint.name, (call, failure, delivery))
            self._probe_soon(state, 0.0)
        else:
            self._retry(call, failure, delivery)

    def _throttled(
        self, state: EndpointState, failure: Failure, started: float, now: float
    ) -> None:
        self._throttle_answers += 1
        before = self._pace.paused(now)
        wait = self._pace.refused(started, now, failure.retry_after)
        state.limit.throttled(started, now, failure.message)
        if before == 0 and wait > 0:
            told = failure.retry_after
            words = f"{state.endpoint.name} says too many requests; all wait {wait:.1f} s"
            if told is not None and told > wait + 0.5:
                words += f" (it asked for {told:.0f} s; limits.retry_after_max caps it)"
            self._notice(words)

    def _retry(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        now = self._clock()
        served = now if self._in_flight else self._pace.last_served
        decision = decide(self._config.retry, call, failure, now, self._random, served)
        if decision.delay is not None:
            self._sleep(call, now + decision.delay)
            return
        words = f"{failure.message} ({decision.reason})" if decision.reason else failure.message
        failure = msgspec.structs.replace(failure, message=words)
        call.handler.failed(call, failure, delivery)

    def _sleep(self, call: Call, due: float) -> None:
        if not self._closed:
            self._waiting.sleep(call, due)

    # --- endpoints that do not answer ---------------------------------------------------------

    def _probe_soon(self, state: EndpointState, delay: float) -> None:
        if state.probing or self._closed:
            return
        state.probing = True
        state.doubted = delay == 0
        self._spawn(self._probe(state, delay), self._probes)

    async def _probe(self, state: EndpointState, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        began, found = self._clock(), None
        if not (delay and state.up):  # else requests were answered meanwhile
            found = await self._backend.probe(state.endpoint, self._config.probe_seconds)
        state.probing = state.doubted = False
        now = self._clock()
        held = self._waiting.release(state.endpoint.name)
        if isinstance(found, Failure) and found.status is None and state.last_good < began:
            if state.up:
                self._notice(f"{state.endpoint.name} does not answer: {found.message}")
            wait = state.went_down(now)
            for call, _, _ in held:  # a dead endpoint costs its rows no try
                self._sleep(call, now)
            reason = self._outage.went_down(self._endpoints.states, now, found)
            if reason is not None:
                self._stop(reason)
            self._probe_soon(state, wait)
        else:
            if not state.up:
                self._notice(f"{state.endpoint.name} answers again")
            state.answered(now)
            self._outage.over()
            for call, failure, delivery in held:
                self._retry(call, failure, delivery)
            self._endpoints.changed(state)
        self._pump()

    def _stop(self, reason: BaseException) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)
