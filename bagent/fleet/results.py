"""Handling of the results of a request: replies, failures and retries."""

from __future__ import annotations

import itertools
import math

import msgspec

from bagent.backends.base import Exchange
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.errors import StoppedEarly
from bagent.fleet.call import Call, Delivery, InFlightRequest, attempt_record
from bagent.fleet.context_length import ContextRouter
from bagent.fleet.endpoint_state import EndpointState, EndpointStatus
from bagent.fleet.health import RECENTLY_SERVED, CheckResult, Health
from bagent.fleet.queue import SuspendedCall
from bagent.fleet.retry import (
    MAX_REFUSALS,
    MAX_STALE_CONNECTIONS,
    MIN_REFUSALS,
    ROW_STATUS,
    Blame,
    Decision,
    blame_of,
    decide,
    record_pause,
    stop_streaming,
)
from bagent.fleet.state import FleetState
from bagent.types import Failure, Reply

EXPECTED_WEIGHT = 0.05
"""Weight of a new answer in the running mean of completion tokens."""


class ResultHandler:
    """Ends or retries the calls of finished requests, and updates limits and health."""

    def __init__(self, core: FleetState, health: Health, router: ContextRouter) -> None:
        self._core = core
        self._health = health
        self._router = router
        self._serial = itertools.count(1)
        self._served_policy = core.config.retry.while_served()

    def handle(self, request: InFlightRequest, exchange: Exchange) -> None:
        """Handle the results of a request."""
        state, calls = request.state, request.calls
        group_id = f"{state.name}/{next(self._serial)}"
        if exchange.limits is not None:
            self._update_quota(request, exchange.limits, accepted=exchange.status == 200)
        if len(calls) > 1 and not exchange.learned and _refused_as_a_whole(exchange):
            self._halve(request, exchange, group_id)
        else:
            self._handle_each(request, exchange, group_id)

    def _handle_each(self, request: InFlightRequest, exchange: Exchange, group_id: str) -> None:
        core, state, calls = self._core, request.state, request.calls
        served = 0
        for call, result in zip(calls, exchange.results, strict=True):
            call.in_flight -= 1
            delivery = Delivery(state.name, group_id, exchange.sent, exchange.done, call.waited_ms)
            if call.ended:  # another endpoint answered first
                core.on_attempt(attempt_record(call, result, None, exchange, delivery))
            elif isinstance(result, Reply):
                served += 1
                self._handle_reply(request, call, result, exchange, delivery)
            else:
                core.on_attempt(attempt_record(call, result, result, exchange, delivery))
                self._handle_failure(request, call, result, exchange, delivery)
        if served:
            now = core.clock()
            core.tail.add(state.name, now, now - request.started, served)
            state.limit.on_success(served, state.in_flight + len(calls))
        self.check_suspended(state)

    def _update_quota(
        self, request: InFlightRequest, limits: RateLimits, *, accepted: bool
    ) -> None:
        """Update the account from rate-limit headers, which may be some seconds old."""
        core, state = self._core, request.state
        at = core.clock() - max(0.0, core.unix() - limits.at)
        news = state.account.update_limits(at, limits, request.reservation, accepted=accepted)
        if news:
            self._health.notify(f"{state.name} {news}")

    def _handle_reply(
        self,
        request: InFlightRequest,
        call: Call,
        reply: Reply,
        exchange: Exchange,
        delivery: Delivery,
    ) -> None:
        core, state = self._core, request.state
        now = core.clock()
        latency = now - request.started
        usage = reply.usage
        if usage.completion is not None:
            core.expected += EXPECTED_WEIGHT * (usage.completion - core.expected)
        if state.account.counts_tokens:
            reported = usage.prompt is not None and usage.completion is not None
            tokens = (usage.prompt or 0) + (usage.completion or 0) if reported else None
            reserved = request.tokens.total // len(request.calls)
            state.account.on_success(now, request.started, reserved, tokens, usage.completion)
        else:
            state.account.on_success(now, request.started)
        core.last_served = now
        core.latencies.append(latency)
        if state.feedback is not None:
            first = exchange.first_token
            ttft = None if first is None else first - exchange.sent
            state.feedback.add_latency(request.started, latency, ttft)
        call.throttled_at = None
        failure = call.evaluate(call, reply, delivery)
        core.on_attempt(attempt_record(call, reply, failure, exchange, delivery))
        if failure is not None:
            self._handle_failure(request, call, failure, exchange, delivery)
            return
        core.end(call, reply, delivery)
        state.on_success(now, request.started)
        state.sample = call.request
        if call.in_flight:
            self._cancel_copies(call)

    def _cancel_copies(self, call: Call) -> None:
        for state in self._core.endpoints.states:
            for request in state.requests:
                if call in request.calls:
                    request.cancel("another endpoint answered first")

    def _halve(self, request: InFlightRequest, exchange: Exchange, group_id: str) -> None:
        """Send a group that was refused as a whole in halves, until the bad row is alone."""
        core, calls = self._core, request.calls
        for call, result in zip(calls, exchange.results, strict=True):
            call.in_flight -= 1
            failure = result if isinstance(result, Failure) else None
            delivery = Delivery(
                request.state.name, group_id, exchange.sent, exchange.done, call.waited_ms
            )
            core.on_attempt(attempt_record(call, result, failure, exchange, delivery))
            call.ready_at = core.clock()
        if not core.closed:
            middle = len(calls) // 2
            core.waiting.add_group(calls[:middle])
            core.waiting.add_group(calls[middle:])

    # --- failures -----------------------------------------------------------------------------

    def _handle_failure(
        self,
        request: InFlightRequest,
        call: Call,
        failure: Failure,
        exchange: Exchange,
        delivery: Delivery,
    ) -> None:
        core, state, started = self._core, request.state, request.started
        now = core.clock()
        if failure.kind == "rate_limited":
            self._throttle(request, failure, now)
        elif failure.busy:
            core.throttle_answers += 1
            state.limit.on_overload(started, now, failure.message)
            state.account.on_other_failure()
        elif failure.passing and exchange.status is not None:
            state.limit.on_other_failure()
            state.account.on_other_failure()
        if call.in_flight:  # its copy decides
            return
        if exchange.learned:
            core.retry_at(call, now)
        elif exchange.again and call.stale_connections < MAX_STALE_CONNECTIONS:
            call.stale_connections += 1
            self._probe(request, now)
            core.retry_at(call, now)
        elif failure.kind == "context_overflow" and self._router.reroute(call, state):
            core.retry_at(call, now)
        elif request.cancel_reason:  # the endpoint is dead or hangs
            self._health.died_with(call, now)
        elif failure.passing and (failure.kind == "connect" or _cut_off(exchange, state)):
            if not state.up and exchange.connected:
                self._health.died_with(call, now)
            elif not state.up:
                core.retry_at(call, now)
            else:
                suspended = SuspendedCall(call, failure, delivery, started, exchange.connected)
                core.waiting.await_probe(state.name, suspended)
                self._probe(request, now)
        else:
            self._handle_bad_answer(request, call, failure, delivery, now)

    def _probe(self, request: InFlightRequest, now: float) -> None:
        """Probe an endpoint after a request's connection failed or broke."""
        state = request.state
        if state.up:
            self._health.probe(state, block=state.on_disconnect(request.started, now))

    def _handle_bad_answer(
        self, request: InFlightRequest, call: Call, failure: Failure, delivery: Delivery, now: float
    ) -> None:
        """Handle a failure that the row or an answering server caused."""
        core, state = self._core, request.state
        call.avoid = state.name
        blame = blame_of(failure)
        if blame is Blame.SERVER:
            self.judge(state, call, failure, delivery, request.started)
        elif blame is Blame.ACCOUNT:
            core.retry_at(call, now)
            self._health.open_circuit(state, failure)
        else:
            busy = blame is Blame.BUSY and failure.kind != "rate_limited"
            check_due = busy and state.on_failure(refused=False)
            if check_due and core.endpoints.has_alternative(state):
                self._health.check(state, call.request, suspect=True)
            self.retry(call, failure, delivery)

    def judge(
        self, state: EndpointState, call: Call, failure: Failure, delivery: Delivery, sent: float
    ) -> None:
        """Retry a call that was sent at ``sent`` and failed, perhaps through the server's fault.

        A failure that would end the call suspends it first. It ends the call only if the server
        then serves later calls or passes a check.
        """
        core = self._core
        check_due = state.on_failure(refused=not failure.passing)
        if call.divisible and call.counted_attempts and failure.status is not None:
            decision: Decision | None = Decision(None)  # its rows are sent apart instead
        else:
            decision = self._decide(call, failure, delivery)
        if decision is not None and decision.late:
            core.end(call, _with_reason(failure, decision), delivery)
        elif decision is not None:
            suspended = SuspendedCall(call, _with_reason(failure, decision), delivery, sent)
            core.waiting.await_check(state.name, suspended)
            self._health.check_later(state)
        if check_due:
            self._health.check(state, call.request, suspect=state.keeps_failing)
        else:
            self.check_suspended(state)

    def check_suspended(self, state: EndpointState) -> None:
        """Resume suspended calls if ``state`` has served later ones; check it if it is idle."""
        waiting = self._core.waiting
        broken = state.circuit in (EndpointStatus.SUSPECT, EndpointStatus.OPEN)
        if broken or waiting.awaiting_check(state.name) is None:
            return
        self.resume(state, CheckResult.WORKS)
        call = waiting.awaiting_check(state.name)
        if call is not None and not (state.in_flight or waiting.ready):
            self._health.check(state, call.request)  # no request in flight can show it

    def resume(self, state: EndpointState, result: CheckResult) -> None:
        """End or retry the calls that were suspended for ``state``."""
        core = self._core
        now = core.clock()
        broken = result is CheckResult.BROKEN
        max_refusals = max(MIN_REFUSALS, min(MAX_REFUSALS, len(core.endpoints.states)))
        sent = math.inf if broken else state.works_since
        for suspended in core.waiting.on_check(state.name, sent):
            call, passing = suspended.call, suspended.failure.passing
            retry = broken
            if not broken:
                call.refusals += 1
                few = passing or call.pinned_to is not None
                again = call.refusals < (MIN_REFUSALS if few else max_refusals)
                retry = again and not (passing and result is CheckResult.WORKS)
            if retry:
                call.counted_attempts = max(0, call.counted_attempts - 1)
                core.retry_at(call, now)
            elif not core.closed:
                core.end(call, suspended.failure, suspended.delivery)

    def _throttle(self, request: InFlightRequest, failure: Failure, now: float) -> None:
        core, state = self._core, request.state
        core.throttle_answers += 1
        before = state.account.pause_remaining(now)
        reserved = request.tokens.total // len(request.calls)
        wait = state.account.on_refusal(request.started, now, failure.retry_after, reserved)
        state.limit.on_rate_limit(request.started, now, failure.message)
        if before == 0 and wait > 0:
            retry_after = failure.retry_after
            same = sum(1 for other in core.endpoints.states if other.account is state.account)
            subject = "all wait" if same == len(core.endpoints.states) else "it waits"
            message = f"{state.name} says too many requests; {subject} {wait:.1f} s"
            if retry_after is not None and retry_after > wait + 0.5:
                message += f" (it asked for {retry_after:.0f} s; limits.retry_after_max caps it)"
            self._health.notify(message)

    def retry(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Retry a call if the policy allows it, else end it; stop the run in an outage."""
        decision = self._decide(call, failure, delivery)
        if decision is None:
            return
        failure = _with_reason(failure, decision)
        if decision.outage:
            self._core.retry_at(call, self._core.clock())
            self._core.stop(StoppedEarly(f"no endpoint takes anything: {failure.message}"))
        else:
            self._core.end(call, failure, delivery)

    def _decide(self, call: Call, failure: Failure, delivery: Delivery | None) -> Decision | None:
        """Retry a call if the policy allows it and return None, else return why not."""
        core = self._core
        now = core.clock()
        if delivery is not None:
            record_pause(call, failure, delivery.sent, delivery.done)
        if stop_streaming(call, failure):
            core.retry_at(call, now)
            return None
        served_at = now if core.in_flight else core.last_served
        recently = now - core.last_served < RECENTLY_SERVED
        policy = self._served_policy if recently else core.config.retry
        decision = decide(policy, call, failure, now, core.random, served_at)
        if decision.delay is None:
            return decision
        core.retry_at(call, now + decision.delay)
        return None


def _with_reason(failure: Failure, decision: Decision) -> Failure:
    """Return the failure with the reason why it is not retried in its message."""
    if not decision.reason:
        return failure
    return msgspec.structs.replace(failure, message=f"{failure.message} ({decision.reason})")


def _cut_off(exchange: Exchange, state: EndpointState) -> bool:
    """Return whether the answer broke off as when an own engine dies.

    In front of a hosted service something always answers.
    """
    return exchange.cut and state.endpoint.own


def _refused_as_a_whole(exchange: Exchange) -> bool:
    """Return whether all calls of a group failed with one refusal of its contents."""
    return all(
        isinstance(result, Failure) and not result.passing and result.status in ROW_STATUS
        for result in exchange.results
    )
