"""Leases of endpoints for the requests of others: the proxy's side of the fleet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.backends.request import Request
from bagent.fleet.call import InFlightRequest
from bagent.fleet.endpoint_state import CheckResult, EndpointState
from bagent.fleet.health import Check, Health
from bagent.fleet.queue import CONVERSATION_LOAD_MARGIN
from bagent.fleet.retry import Blame, blame_of
from bagent.fleet.state import FleetReports, FleetState, FleetTasks
from bagent.types import EndpointSample, Failure


class Closed(Exception):
    """No endpoint is leased any more."""


class EndpointLease(InFlightRequest, eq=False):
    """A slot of an endpoint for one request.

    The holder may set ``task`` to the task that sends the request. The task is cancelled if
    another endpoint should serve it; ``cancel_reason`` says why.
    """

    def cancel(self, reason: str) -> None:
        """Cancel the holder's task; do nothing while the holder has set none."""
        if self.task is not None:
            super().cancel(reason)


class _Waiter(msgspec.Struct, eq=False):
    """A request that waits for an endpoint."""

    future: asyncio.Future[EndpointLease]
    avoid: frozenset[str]  # endpoints that failed it
    preferred: str | None  # the endpoint that has its conversation cached


class EndpointLeaser:
    """Leases endpoints with the fleet's balancing, limits and health; for one event loop.

    Args:
        fleet: the endpoints; nothing else may use it.
        backend: sends probes.
        check: sends a minimal request to an endpoint.
        on_sample: receives an endpoint's state whenever it changes.
        notice: receives messages for people.
    """

    def __init__(
        self,
        fleet: FleetState,
        backend: Backend,
        check: Check,
        *,
        on_sample: Callable[[EndpointSample], None],
        notice: Callable[[str], None],
    ) -> None:
        async def prove(endpoint: Endpoint) -> Failure | None:
            return await check(endpoint, None)

        self._loop = asyncio.get_running_loop()
        self._fleet = fleet
        self._tasks = FleetTasks(self._loop, self.on_change)
        self._reports = FleetReports(notice, on_sample, fleet.clock)
        self._notice = notice
        self._health = Health(fleet, backend, self._tasks, self._reports, self, check, prove)
        self._waiters: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stopped(self) -> asyncio.Future[BaseException]:
        """Gets the reason when it cannot continue: an outage or a bug."""
        return self._tasks.stopped

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task whose exception stops the leaser."""
        return self._tasks.spawn(work)

    async def wait_closed(self) -> None:
        """Wait until the probes have ended, after `close`."""
        await asyncio.gather(*self._tasks.probes, return_exceptions=True)

    def sample(self, reason: str) -> None:
        """Record the state of all endpoints."""
        for state in self.states:
            self._reports.sample(state, reason)

    def on_probe(
        self, state: EndpointState, capabilities: Capabilities | None, *, answered: bool
    ) -> None:
        """Do nothing: requests wait for no probe."""

    def on_check(self, state: EndpointState, result: CheckResult) -> None:
        """Do nothing: requests wait for no check."""

    def on_change(self) -> None:
        """Lease endpoints that may have more room."""
        self._pump()

    @property
    def waiting(self) -> int:
        """How many requests wait for an endpoint with room."""
        return len(self._waiters)

    @property
    def closed(self) -> bool:
        """Whether it leases no more."""
        return self._fleet.closed

    @property
    def states(self) -> Sequence[EndpointState]:
        """All endpoints, including those that are leaving."""
        return self._fleet.endpoints.states

    def join(self, states: Sequence[EndpointState]) -> None:
        """Add endpoints."""
        self._health.join(states)
        self._pump()

    def leave(self, names: Sequence[str]) -> None:
        """Lease these endpoints no more; remove them once they have nothing in flight."""
        self._health.leave(names)
        self._pump()

    def tick(self) -> None:
        """Look for unresponsive endpoints; call it about every second."""
        self._health.tick()

    async def acquire(self, avoid: frozenset[str], preferred: str | None = None) -> EndpointLease:
        """Wait for an endpoint with room, if possible one that is not in ``avoid``.

        It is the ``preferred`` one if that has room and is not much busier.

        Raises:
            Closed: no endpoint is leased any more.
        """
        if self._fleet.closed:
            raise Closed
        future: asyncio.Future[EndpointLease] = self._loop.create_future()
        self._waiters.append(_Waiter(future, avoid, None if preferred in avoid else preferred))
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result())
            raise

    def has_alternative(self, avoid: frozenset[str]) -> bool:
        """Return whether an endpoint that is not in ``avoid`` is usable."""
        states = self._fleet.endpoints.states
        return any(state.usable and state.name not in avoid for state in states)

    def update_limits(self, lease: EndpointLease, limits: RateLimits, *, accepted: bool) -> None:
        """Update the account from the rate-limit headers of the answer to a request.

        ``accepted``: the request was not refused.
        """
        account = lease.state.account
        news = account.update_limits(
            self._fleet.clock(), limits, lease.reservation, accepted=accepted
        )
        if news:
            self._notice(f"{lease.state.name} {news}")

    def on_chunk(self, lease: EndpointLease) -> None:
        """Record that a part of the answer came and is forwarded."""
        fleet, state = self._fleet, lease.state
        now = fleet.clock()
        if not lease.streaming:
            lease.streaming = True
            fleet.last_served = now
            fleet.latencies.append(now - lease.started)
        recovered = state.unresponsive or not state.up
        state.on_answer(now, lease.started)
        if recovered:
            fleet.endpoints.update(state)
            self._pump()

    def on_success(self, lease: EndpointLease, tokens: int | None = None) -> None:
        """Record that the request was answered well, and release the lease."""
        fleet, state = self._fleet, lease.state
        now = fleet.clock()
        state.on_answer(now, lease.started)
        state.on_success(now, lease.started)
        state.account.on_success(now, lease.started)
        state.account.on_answer(now, lease.started, used=tokens)
        state.limit.on_success(1, state.in_flight)
        fleet.last_served = now
        if not lease.streaming:  # else the time includes how long the client took to read
            fleet.latencies.append(now - lease.started)
        self._release(lease)

    def on_failure(
        self, lease: EndpointLease, failure: Failure | None, request: Request | None = None
    ) -> None:
        """Record the failure of a request, None if its client left, and release the lease."""
        if failure is not None:
            self.judge(lease, failure, request)
        self._release(lease)

    def judge(self, lease: EndpointLease, failure: Failure, request: Request | None) -> None:
        """Update limits and health after a failure of ``request``."""
        fleet, state = self._fleet, lease.state
        now = fleet.clock()
        if failure.status is not None:
            state.on_answer(now, lease.started)
        if failure.kind == "rate_limited":
            state.account.on_refusal(lease.started, now, failure.retry_after)
        elif failure.busy:
            state.limit.on_overload(lease.started, now, failure.message)
        elif failure.kind == "connect" and state.on_disconnect(lease.started, now):
            self._health.probe(state)
        server = blame_of(failure) in (Blame.SERVER, Blame.ACCOUNT)
        if server or (failure.busy and failure.kind != "rate_limited"):
            check_due = state.on_failure(refused=not failure.passing)
            if check_due and fleet.endpoints.has_alternative(state):
                self._health.check(state, request, suspect=True)

    def _release(self, lease: EndpointLease) -> None:
        state = lease.state
        state.in_flight -= 1
        del state.requests[lease]
        self._fleet.in_flight -= 1
        self._health.remove_if_done(state)
        self._fleet.endpoints.update(state)
        self._pump()

    def _pump(self) -> None:
        """Lease endpoints with room to the waiting requests."""
        fleet = self._fleet
        now = fleet.clock()
        if fleet.endpoints.parked:
            fleet.endpoints.unpark(now)
        skipped: list[EndpointState] = []
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.future.done():
                self._waiters.popleft()
                continue
            state = fleet.endpoints.select(now)
            if state is None:
                break
            state = self._preferred(waiter, state, now) or state
            if state.name in waiter.avoid and self.has_alternative(waiter.avoid):
                skipped.append(state)
                fleet.endpoints.skip(state)
                continue
            self._waiters.popleft()
            state.in_flight += 1
            state.turns += 1 / state.weight
            fleet.in_flight += 1
            lease = EndpointLease(state, [], now, reservation=state.account.start(now))
            state.requests[lease] = None
            waiter.future.set_result(lease)
        for state in skipped:
            fleet.endpoints.update(state)
        wait = fleet.endpoints.unpark(now) if fleet.endpoints.parked else None
        if self._waiters and wait is not None and self._timer is None:
            self._timer = self._loop.call_later(wait, self._on_timer)

    def _preferred(
        self, waiter: _Waiter, selected: EndpointState, now: float
    ) -> EndpointState | None:
        """Return the endpoint that has the conversation cached, if it can serve it now."""
        state = self._fleet.endpoints.get(waiter.preferred) if waiter.preferred else None
        if state is None or state.room <= 0 or state.account.wait(now, 0) > 0:
            return None
        return state if state.load <= selected.load + CONVERSATION_LOAD_MARGIN else None

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def close(self) -> None:
        """Stop all probes, and raise `Closed` in the waiting requests."""
        self._fleet.closed = True
        self._tasks.cancel_probes()
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(Closed())
        self._waiters.clear()
