"""Endpoints lent one request at a time, for who sends requests of his own: the proxy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.backends.request import Request
from bagent.fleet.call import InFlightRequest
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import FleetMembers
from bagent.fleet.health import Check, Health
from bagent.fleet.retry import Blame, blame_of
from bagent.fleet.state import FleetState
from bagent.types import Failure

MUCH_BUSIER = 0.5
"""A request goes where the cache holds what comes before it, unless the share of its limit that is
in use there is higher by this."""


class Closed(Exception):
    """No endpoint is lent any more."""


class EndpointLease(InFlightRequest, eq=False):
    """One endpoint's slot for one request. Whoever has it may name the ``task`` that sends the
    request: where others should take it, the task is cancelled, and ``given_up`` says why."""


class _Waiter(msgspec.Struct, eq=False):
    """A request that waits for an endpoint: which it failed at, which holds what precedes it."""

    future: asyncio.Future[EndpointLease]
    avoid: frozenset[str]
    prefer: str | None


class EndpointLeaser:
    """Lends endpoints with the fleet's balance, limits and health; for one event loop.

    Args:
        core: the endpoints; nothing else may use it.
        check: asks an endpoint that takes requests and answers none, or badly, for a real answer.
    """

    def __init__(self, core: FleetState, check: Check) -> None:
        self._core = core
        self._health = Health(core, check)
        self._health.prove = lambda endpoint: check(endpoint, None)
        self._members = FleetMembers(core, self._health, lambda _: None)
        self._waiters: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        core.pump = self._serve

    @property
    def waiting(self) -> int:
        """Requests that wait for an endpoint with room."""
        return len(self._waiters)

    @property
    def closed(self) -> bool:
        """Whether it lends no more."""
        return self._core.closed

    @property
    def states(self) -> Sequence[EndpointState]:
        """All endpoints as they are now, those that leave among them."""
        return self._core.endpoints.states

    def join(self, states: Sequence[EndpointState]) -> None:
        """Take in endpoints that joined."""
        self._members.join(states)
        self._serve()

    def leave(self, names: Sequence[str]) -> None:
        """Lend these endpoints no more; they are forgotten once nothing is in flight."""
        self._members.leave(names)
        self._serve()

    def tick(self) -> None:
        """Look for endpoints that take requests and answer none; call it about every second."""
        self._health.tick()

    async def take(self, avoid: frozenset[str], prefer: str | None = None) -> EndpointLease:
        """Wait for an endpoint with room; one that is not in ``avoid`` where there is another.

        It is the one called ``prefer`` where that has room too and is not much busier.

        Raises:
            Closed: it was closed before, or while this waited.
        """
        if self._core.closed:
            raise Closed
        future: asyncio.Future[EndpointLease] = self._core.loop.create_future()
        self._waiters.append(_Waiter(future, avoid, None if prefer in avoid else prefer))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result())
            raise

    def another(self, avoid: frozenset[str]) -> bool:
        """Whether an endpoint that is not in ``avoid`` may be sent something, or may soon."""
        return any(one.usable and one.name not in avoid for one in self._core.endpoints.states)

    def told(self, lease: EndpointLease, limits: RateLimits, *, good: bool) -> None:
        """The head of the answer to the lease's request told the account's limits; ``good``: it
        was let in."""
        account = lease.state.account
        news = account.told(self._core.clock(), limits, lease.mark, good=good)
        if news:
            self._core.notice(f"{lease.state.name} {news}")

    def went_on(self, lease: EndpointLease) -> None:
        """A piece of the answer came, and goes on to who asked."""
        core, state = self._core, lease.state
        now = core.clock()
        if not lease.begun:
            lease.begun = True
            core.last_served = now
            core.latencies.append(now - lease.started)
        back = state.stalled or not state.up
        state.answered(now, lease.started)
        if back:
            core.endpoints.changed(state)
            self._serve()

    def served(self, lease: EndpointLease, tokens: int | None = None) -> None:
        """The request of the lease was answered well."""
        core, state = self._core, lease.state
        now = core.clock()
        state.answered(now, lease.started)
        state.served(now, lease.started)
        state.account.served(now, lease.started, 0, tokens)
        state.limit.succeeded(1, state.in_flight)
        core.last_served = now
        if not lease.begun:  # else it took what who asked took to read it
            core.latencies.append(now - lease.started)
        self._release(lease)

    def failed(
        self, lease: EndpointLease, failure: Failure | None, request: Request | None = None
    ) -> None:
        """The request of the lease failed; None where nobody waits for it any more."""
        if failure is not None:
            self.judge(lease, failure, request)
        self._release(lease)

    def judge(self, lease: EndpointLease, failure: Failure, request: Request | None) -> None:
        """Take what a failure of ``request`` says of the endpoint that had the lease."""
        core, state = self._core, lease.state
        now = core.clock()
        if failure.status is not None:
            state.answered(now, lease.started)
        if failure.kind == "rate_limited":
            state.account.refused(lease.started, now, failure.retry_after)
        elif failure.busy:
            state.limit.overloaded(lease.started, now, failure.message)
        elif failure.kind == "connect" and state.broke(lease.started, now):
            self._health.doubt(state)
        server = blame_of(failure) in (Blame.SERVER, Blame.ACCOUNT)
        if server or (failure.busy and failure.kind != "rate_limited"):
            sick = state.failed(refused=not failure.passing)
            if sick and core.endpoints.others(state):
                self._health.suspect(state, request, sick=True)

    def _release(self, lease: EndpointLease) -> None:
        state = lease.state
        state.in_flight -= 1
        del state.carriers[lease]
        self._core.in_flight -= 1
        self._members.ended(state)
        self._core.endpoints.changed(state)
        self._serve()

    def _serve(self) -> None:
        """Give endpoints with room to those who wait."""
        core = self._core
        now = core.clock()
        if core.endpoints.parked:
            core.endpoints.unpark(now)
        passed: list[EndpointState] = []
        while self._waiters:
            waiter = self._waiters[0]
            future = waiter.future
            if future.done():
                self._waiters.popleft()
                continue
            state = core.endpoints.next(now)
            if state is None:
                break
            state = self._home(waiter, state, now) or state
            if state.name in waiter.avoid and self.another(waiter.avoid):
                passed.append(state)
                core.endpoints.pass_over(state)
                continue
            self._waiters.popleft()
            state.in_flight += 1
            state.turns += 1 / state.weight
            core.in_flight += 1
            lease = EndpointLease(state, [], now, mark=state.account.started(now))
            state.carriers[lease] = None
            future.set_result(lease)
        for state in passed:
            core.endpoints.changed(state)
        wait = core.endpoints.unpark(now) if core.endpoints.parked else None
        if self._waiters and wait is not None and self._timer is None:
            self._timer = core.loop.call_later(wait, self._again)

    def _home(self, waiter: _Waiter, instead: EndpointState, now: float) -> EndpointState | None:
        """The endpoint that holds the context of who waits, where it may well take the request."""
        home = self._core.endpoints.named(waiter.prefer) if waiter.prefer else None
        if home is None or home.room <= 0 or home.account.wait(now, 0) > 0:
            return None
        return home if home.load <= instead.load + MUCH_BUSIER else None

    def _again(self) -> None:
        self._timer = None
        self._serve()

    def close(self) -> None:
        """Stop looking at endpoints; who waits is told that there are none."""
        self._core.closed = True
        for probe in self._core.probes:
            probe.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(Closed())
        self._waiters.clear()
