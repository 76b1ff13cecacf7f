"""Requests: how they are sent, and what their results say about endpoint, account and calls."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from bagent.backends.base import Backend, DirectBackend, Exchange, Timeouts
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.clocks import unix
from bagent.fleet.call import (
    Action,
    Call,
    CallResult,
    Complete,
    Delivery,
    EndedCall,
    InFlightRequest,
    Retry,
    attempt_record,
    timeouts_for,
)
from bagent.fleet.retry import RetryRules, refused_as_a_whole
from bagent.fleet.state import FleetReports, FleetState, FleetTasks
from bagent.types import Attempt, Failure, Reply

EXPECTED_WEIGHT = 0.05
"""Weight of a new answer in the running mean of completion tokens."""


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
        """Return the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

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


class ResultHandler:
    """Records the results of finished requests, and decides what is done about their calls.

    Args:
        fleet: its endpoints and counters.
        rules: decide on calls that failed.
        reports: shows what accounts report.
        on_attempts: receives the records of requests, one for each of their calls.
    """

    def __init__(
        self,
        fleet: FleetState,
        rules: RetryRules,
        reports: FleetReports,
        on_attempts: Callable[[Sequence[Attempt]], None],
    ) -> None:
        self._fleet = fleet
        self._rules = rules
        self._reports = reports
        self._on_attempts = on_attempts
        self._serial = itertools.count(1)
        # Other parts and starts of a run, and its other fleets, send to the same endpoints.
        self._prefix = secrets.token_hex(4)

    def handle(self, requests: Iterable[InFlightRequest]) -> Iterator[Action]:
        """Free the slots of requests that ended together, and record their results.

        Yields what is to be done, in order; do each before the next is taken. A bug in the reading
        of a result is raised after the other requests.
        """
        fleet = self._fleet
        attempts = list[Attempt]()
        fault: Exception | None = None
        try:
            for request in requests:
                try:
                    exchange = self._finish(request)
                    if exchange.withheld:
                        yield from self._take_back(request)
                    else:
                        yield from self._record(request, exchange, attempts)
                    if fleet.waiting.suspended:
                        yield from self._rules.after_success(request.state)
                    if exchange.status is not None:
                        request.state.on_answer(fleet.clock(), request.started)
                except Exception as error:  # noqa: BLE001 - the other results are recorded first
                    fault = error
        finally:
            if attempts:
                self._on_attempts(attempts)
        if fault is not None:
            raise fault

    def _finish(self, request: InFlightRequest) -> Exchange:
        """Return what came of a request that has ended, and free its slots."""
        budget, calls = self._fleet.config.budget, request.calls
        try:
            exchange = request.exchange if request.sent is None else request.sent.exchange()
            assert exchange is not None
            if request.cancel_reason:
                failure = Failure("connect", request.cancel_reason, passing=True)
                return Exchange([failure] * len(calls), exchange.sent, done=unix())
            if budget is not None:
                request.cost_usd = budget.cost([call.request for call in calls], exchange)
            return exchange
        finally:
            self._fleet.release(request)

    def _record(
        self, request: InFlightRequest, exchange: Exchange, attempts: list[Attempt]
    ) -> list[Action]:
        state, calls = request.state, request.calls
        group = f"{state.name}/{self._prefix}-{next(self._serial)}"
        if exchange.limits is not None:
            self._update_quota(request, exchange.limits, accepted=exchange.status == 200)
        delivery = Delivery(state.name, group, exchange.sent, exchange.done)
        completed: list[EndedCall] = []
        replies: list[Reply] = []
        failed: list[tuple[Call, Failure]] = []
        for call, result in zip(calls, exchange.results, strict=True):
            call.in_flight -= 1
            failure: Failure | None = None
            if not call.ended:
                if isinstance(result, Failure):
                    failure = result
                    self._count_failure(request, failure, exchange)
                else:
                    replies.append(result)
                    call.throttled_at = None
                    failure = call.evaluate(call, result, delivery)
                    if failure is None:
                        completed.append((call, CallResult(result, delivery)))
                if failure is not None:
                    failed.append((call, failure))
            attempts.append(attempt_record(call, result, failure, exchange, delivery))
        if len(calls) == 1:
            attempts[-1].try_ = request.attempt  # the call may have a copy, which is a later one
        if replies:
            self._count_replies(request, replies, exchange)
        actions: list[Action] = []
        if completed:
            state.on_success(self._fleet.last_served, request.started)
            state.sample = completed[-1][0].request
            actions.append(Complete(completed))
        if len(calls) > 1 and not exchange.learned and refused_as_a_whole(exchange):
            actions += self._rules.split(calls)
        else:
            for call, failure in failed:
                actions += self._rules.after_failure(request, call, failure, exchange, delivery)
        return actions

    def _take_back(self, request: InFlightRequest) -> list[Action]:
        """Undo the counts of a request that was not sent; return the retries of its calls."""
        fleet, now = self._fleet, self._fleet.clock()
        fleet.requests -= 1
        request.state.account.cancel(now, request.started, request.tokens)
        for call in request.calls:
            call.in_flight -= 1
            call.attempts -= 1
        return [Retry(call, now) for call in request.calls if not call.ended]

    def _count_replies(
        self, request: InFlightRequest, replies: Sequence[Reply], exchange: Exchange
    ) -> None:
        """Record replies for the account, the scheduler and the load feedback."""
        fleet, state = self._fleet, request.state
        fleet.last_served = now = fleet.clock()
        latency = now - request.started
        state.account.on_success(now, request.started)
        counts_tokens = state.account.counts_tokens
        reserved = request.tokens.total // len(request.calls) if counts_tokens else 0
        for reply in replies:
            usage = reply.usage
            if usage.completion is not None:
                fleet.expected += EXPECTED_WEIGHT * (usage.completion - fleet.expected)
            if counts_tokens:
                reported = usage.prompt is not None and usage.completion is not None
                tokens = (usage.prompt or 0) + (usage.completion or 0) if reported else None
                state.account.on_answer(now, request.started, reserved, tokens, usage.completion)
        fleet.latencies.extend([latency] * len(replies))
        if state.feedback is not None:
            first = exchange.first_token
            ttft = None if first is None else first - exchange.sent
            state.feedback.add_latency(request.started, latency, ttft, len(replies))
        if len(fleet.endpoints.states) > 1:
            fleet.tail.add(state.name, now, latency, len(replies))
        state.limit.on_success(len(replies), state.in_flight + len(request.calls))

    def _count_failure(
        self, request: InFlightRequest, failure: Failure, exchange: Exchange
    ) -> None:
        """Record a failure for the account and the endpoint's limit."""
        fleet, state = self._fleet, request.state
        if failure.kind == "rate_limited":
            self._throttle(request, failure)
        elif failure.busy:
            fleet.throttle_answers += 1
            state.limit.on_overload(request.started, fleet.clock(), failure.message)
            state.account.on_other_failure()
        elif failure.passing and exchange.status is not None:
            state.limit.on_other_failure()
            state.account.on_other_failure()

    def _update_quota(
        self, request: InFlightRequest, limits: RateLimits, *, accepted: bool
    ) -> None:
        """Update the account from rate-limit headers, which may be some seconds old."""
        state = request.state
        at = self._fleet.clock() - max(0.0, unix() - limits.at)
        news = state.account.update_limits(at, limits, request.reservation, accepted=accepted)
        if news:
            self._reports.notify(f"{state.name} {news}")

    def _throttle(self, request: InFlightRequest, failure: Failure) -> None:
        """Slow the account down after a 429."""
        fleet, state, now = self._fleet, request.state, self._fleet.clock()
        fleet.throttle_answers += 1
        before = state.account.pause_remaining(now)
        reserved = request.tokens.total // len(request.calls)
        wait = state.account.on_refusal(request.started, now, failure.retry_after, reserved)
        state.limit.on_rate_limit(request.started, now, failure.message)
        if before == 0 and wait > 0:
            retry_after = failure.retry_after
            same = sum(1 for other in fleet.endpoints.states if other.account is state.account)
            subject = "all wait" if same == len(fleet.endpoints.states) else "it waits"
            message = f"{state.name} says too many requests; {subject} {wait:.1f} s"
            if retry_after is not None and retry_after > wait + 0.5:
                message += f" (it asked for {retry_after:.0f} s; limits.retry_after_max caps it)"
            self._reports.notify(message)
