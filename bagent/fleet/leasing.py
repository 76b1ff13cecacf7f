"""Endpoints lent one request at a time, for who sends requests of his own: the proxy."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from bagent.fleet.core import Core
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Health
from bagent.fleet.settle import SETUP_STATUS
from bagent.types import Failure


class Lease(msgspec.Struct, eq=False):
    """One endpoint's slot; ``since`` is on the fleet's clock."""

    state: EndpointState
    since: float


class Lessor:
    """Lends endpoints with the fleet's balance, limits and health; for one event loop.

    Args:
        core: the endpoints; nothing else may use it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._health = Health(core)
        self._waiters: deque[tuple[asyncio.Future[EndpointState], frozenset[str]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        core.pump = self._serve

    @property
    def waiting(self) -> int:
        """Requests that wait for an endpoint with room."""
        return len(self._waiters)

    async def take(self, avoid: frozenset[str]) -> Lease:
        """Wait for an endpoint with room; one that is not in ``avoid`` where there is another."""
        future: asyncio.Future[EndpointState] = self._core.loop.create_future()
        self._waiters.append((future, avoid))
        self._serve()
        try:
            state = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result())
            raise
        return Lease(state, self._core.clock())

    def served(self, lease: Lease, tokens: int | None = None) -> None:
        """The request of the lease was answered well."""
        core, state = self._core, lease.state
        now = core.clock()
        state.answered(now)
        state.served(now)
        state.account.served(now, lease.since, 0, tokens)
        state.limit.succeeded(1, state.in_flight)
        core.last_served = now
        core.latencies.append(now - lease.since)
        self._release(state)

    def failed(self, lease: Lease, failure: Failure | None) -> None:
        """The request of the lease failed; None where nobody waits for it any more."""
        core, state = self._core, lease.state
        now = core.clock()
        if failure is not None:
            self._judge(lease, failure, now)
        self._release(state)

    def _judge(self, lease: Lease, failure: Failure, now: float) -> None:
        core, state = self._core, lease.state
        if failure.status is not None:
            state.answered(now)
        if failure.kind == "rate_limited":
            state.account.refused(lease.since, now, failure.retry_after)
        elif failure.busy:
            state.limit.overloaded(lease.since, now, failure.message)
        elif failure.kind == "connect" and state.suspect(lease.since):
            self._health.doubt(state)
        refused = failure.status in SETUP_STATUS
        if refused or (failure.passing and failure.kind != "rate_limited"):
            rests = state.failed(refused=refused)
            if rests and not state.resting and core.endpoints.others(state):
                self._health.rest(state, failure)

    def _release(self, state: EndpointState) -> None:
        state.in_flight -= 1
        self._core.in_flight -= 1
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
            future, avoid = self._waiters[0]
            if future.done():
                self._waiters.popleft()
                continue
            state = core.endpoints.next(now)
            if state is None:
                break
            if state.name in avoid and core.endpoints.others(state):
                passed.append(state)
                core.endpoints.pass_over(state)
                continue
            self._waiters.popleft()
            state.in_flight += 1
            state.turns += 1 / state.weight
            core.in_flight += 1
            state.account.started(now)
            future.set_result(state)
        for state in passed:
            core.endpoints.changed(state)
        wait = core.endpoints.unpark(now) if core.endpoints.parked else None
        if self._waiters and wait is not None and self._timer is None:
            self._timer = core.loop.call_later(wait, self._again)

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
        for future, _ in self._waiters:
            future.cancel()
