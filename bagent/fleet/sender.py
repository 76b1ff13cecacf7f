"""The sending of requests: over an open connection at once, or by a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from bagent.backends.base import Backend, DirectBackend, Exchange, Timeouts
from bagent.clocks import unix
from bagent.fleet.call import InFlightRequest, timeouts_for
from bagent.fleet.state import FleetState, FleetTasks
from bagent.types import Failure


class RequestSender:
    """Sends the requests of a fleet.

    Args:
        fleet: its configuration and counters.
        backend: sends the usual call without a task if it is a :class:`DirectBackend`.
        tasks: run the requests that need one.
        on_end: called when a request has ended, once until :meth:`take_ended` is called.
    """

    def __init__(
        self,
        fleet: FleetState,
        backend: Backend,
        tasks: FleetTasks,
        on_end: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._send_now = backend.send_now if isinstance(backend, DirectBackend) else None
        self._tasks = tasks
        self._on_end = on_end
        self._direct: dict[InFlightRequest, None] = {}  # in flight without a task
        self._none_direct: asyncio.Future[None] | None = None  # awaited by a drain
        self._drained = False
        self._ended: list[InFlightRequest] = []

    def start(self, request: InFlightRequest) -> None:
        """Send a request, without a task if it is the usual one."""
        self._fleet.occupy(request)
        calls = request.calls
        timeouts = timeouts_for(calls, self._fleet.config.timeouts, request.started)
        if self._send_now is not None and len(calls) == 1:
            on_end = partial(self._on_request_end, request)
            try:
                request.sent = self._send_now(
                    request.state.endpoint, calls[0].request, timeouts, on_end
                )
            except Exception as error:  # noqa: BLE001 - it stops the fleet
                self._fleet.release(request)
                self._tasks.stop(error)
                return
        if request.sent is None:
            self._tasks.spawn(self._send(request, timeouts))
        else:
            self._direct[request] = None
            request.cost_usd = request.reserved_usd  # it may be billed even if it is cancelled

    async def _send(self, request: InFlightRequest, timeouts: Timeouts) -> None:
        """Send a request in a task."""
        group = [call.request for call in request.calls]
        sent = unix()
        try:
            request.begin()
            request.exchange = await self._backend.send(request.state.endpoint, group, timeouts)
        except asyncio.CancelledError:
            if not request.cancel_reason or request.task is None:
                raise
            request.task.uncancel()
            request.exchange = Exchange([], sent)
        finally:
            if request.exchange is None:
                self._fleet.release(request)
        self._on_request_end(request)

    def _on_request_end(self, request: InFlightRequest) -> None:
        self._direct.pop(request, None)
        if self._drained:
            self._fleet.release(request)
        else:
            request.ended = True
            if not self._ended:
                self._on_end()
            self._ended.append(request)
        if self._none_direct is not None and not self._direct and not self._none_direct.done():
            self._none_direct.set_result(None)

    def take_ended(self) -> list[InFlightRequest]:
        """Return the requests that have ended since the last call; see :meth:`exchange`."""
        ended, self._ended = self._ended, []
        return ended

    def exchange(self, request: InFlightRequest) -> Exchange:
        """Return what came of a request that has ended; call it once for each."""
        budget, calls = self._fleet.config.budget, request.calls
        exchange = request.exchange if request.sent is None else request.sent.exchange()
        assert exchange is not None
        if request.cancel_reason:
            failure = Failure("connect", request.cancel_reason, passing=True)
            return Exchange([failure] * len(calls), exchange.sent, done=unix())
        if budget is not None:
            request.cost_usd = budget.cost([call.request for call in calls], exchange)
        return exchange

    async def drain(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Wait up to ``seconds`` for requests and tasks, call ``on_timeout``, cancel the others.

        Requests that are cancelled have no results.
        """
        self._none_direct = none_direct = asyncio.get_running_loop().create_future()
        if not self._direct:
            none_direct.set_result(None)
        tasks = self._tasks.requests
        _, pending = await asyncio.wait({none_direct, *tasks}, timeout=seconds)
        on_timeout()
        self._drained = True
        for task in tasks & pending:
            task.cancel()
        for request in list(self._direct):
            assert request.sent is not None
            request.sent.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
