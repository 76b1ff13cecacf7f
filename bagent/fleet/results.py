"""What becomes of the calls of a request that is over."""

from __future__ import annotations

import itertools
import math

import msgspec

from bagent.backends.base import Exchange
from bagent.backends.http.rate_limit_headers import RateLimits
from bagent.errors import StoppedEarly
from bagent.fleet.call import Call, Delivery, InFlightRequest, attempt_record
from bagent.fleet.context_length import ContextRouter
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Health, HealthVerdict
from bagent.fleet.queue import SuspendedCall, UnprobedCall
from bagent.fleet.retry import (
    FREE_TRIES,
    ROW_STATUS,
    Blame,
    Decision,
    ask_whole,
    blame_of,
    decide,
    note_pause,
)
from bagent.fleet.state import FleetState
from bagent.types import Failure, Reply

LEAST_REFUSALS, MOST_REFUSALS = 2, 3
"""A call that endpoints refuse which serve others is asked so many times, where there are as many
endpoints; then the failure is its own. Twice at a single one: it may have failed for a moment."""

LATELY_SERVED = 30.0
"""Seconds for which one good answer shows that calls get through."""

LEARNING_RATE = 0.05


class ResultHandler:
    """Takes what requests came to: ends calls, sends them again, tells limits and health."""

    def __init__(self, core: FleetState, health: Health, fitter: ContextRouter) -> None:
        self._core = core
        self._health = health
        self._fitter = fitter
        self._serial = itertools.count(1)
        self._served = core.config.retry.while_served()

    def settle(self, carrier: InFlightRequest, exchange: Exchange) -> None:
        """Take the results of a request."""
        core, state, group = self._core, carrier.state, carrier.group
        group_id = f"{state.name}/{next(self._serial)}"
        if exchange.limits is not None:
            self._told(carrier, exchange.limits, good=exchange.status == 200)
        if len(group) > 1 and not exchange.learned and _refused_whole(exchange):
            self._halve(carrier, exchange, group_id)
            return
        if len(group) > 1:
            with core.together():
                self._take(carrier, exchange, group_id)
        else:
            self._take(carrier, exchange, group_id)

    def _take(self, carrier: InFlightRequest, exchange: Exchange, group_id: str) -> None:
        """Take the result of each call."""
        core, state, group = self._core, carrier.state, carrier.group
        sent, done = exchange.sent, exchange.done
        served = 0
        for call, result in zip(group, exchange.results, strict=True):
            call.out -= 1
            delivery = Delivery(state.name, group_id, sent, done, call.waited_ms)
            if call.ended:  # another endpoint answered first
                core.on_attempt(attempt_record(call, result, None, exchange, delivery))
                continue
            if isinstance(result, Reply):
                served += self._reply(carrier, call, result, exchange, delivery)
            else:
                core.on_attempt(attempt_record(call, result, result, exchange, delivery))
                self._failure(carrier, call, result, exchange, delivery)
        if served:
            now = core.clock()
            core.ending.served(state.name, now, now - carrier.started, served)
            state.limit.succeeded(served, state.in_flight + len(group))
        self.look(state)

    def _told(self, carrier: InFlightRequest, limits: RateLimits, *, good: bool) -> None:
        """The answer told the account's limits; its headers may have come some time ago."""
        core, state = self._core, carrier.state
        at = core.clock() - max(0.0, core.unix() - limits.at)
        news = state.account.told(at, limits, carrier.mark, good=good)
        if news:
            self._health.tell(f"{state.name} {news}")

    def _reply(
        self,
        carrier: InFlightRequest,
        call: Call,
        reply: Reply,
        exchange: Exchange,
        delivery: Delivery,
    ) -> int:
        core, state = self._core, carrier.state
        now = core.clock()
        used = reply.usage
        if used.completion is not None:
            core.expected += LEARNING_RATE * (used.completion - core.expected)
        if state.account.counts_tokens:
            known = used.prompt is not None and used.completion is not None
            tokens = (used.prompt or 0) + (used.completion or 0) if known else None
            reserved = carrier.tokens.total // len(carrier.group)
            state.account.served(now, carrier.started, reserved, tokens, used.completion)
        else:
            state.account.served(now, carrier.started)
        core.last_served = now
        core.latencies.append(now - carrier.started)
        if state.signal is not None:
            first = exchange.first_token
            ttft = None if first is None else first - exchange.sent
            state.signal.answered(carrier.started, now - carrier.started, ttft)
        call.throttled_at = None
        failure = call.handler.replied(call, reply, delivery)
        core.on_attempt(attempt_record(call, reply, failure, exchange, delivery))
        if failure is None:
            call.ended = True
            state.served(now, carrier.started)
            state.sample = call.request
            if call.out:
                self._end_copies(call)
        else:
            self._failure(carrier, call, failure, exchange, delivery)
        return 1

    def _end_copies(self, call: Call) -> None:
        """Give up the other requests that carry a call which was answered."""
        for state in self._core.endpoints.states:
            for carrier in state.carriers:
                if call in carrier.group:
                    carrier.give_up("another endpoint answered first")

    def _halve(self, carrier: InFlightRequest, exchange: Exchange, group_id: str) -> None:
        """A group was refused for what is in it: its halves go on until the bad row is alone."""
        core, group = self._core, carrier.group
        for call, result in zip(group, exchange.results, strict=True):
            call.out -= 1
            failure = result if isinstance(result, Failure) else None
            delivery = Delivery(
                carrier.state.name, group_id, exchange.sent, exchange.done, call.waited_ms
            )
            core.on_attempt(attempt_record(call, result, failure, exchange, delivery))
            call.ready_at = core.clock()
        if not core.closed:
            middle = len(group) // 2
            core.waiting.add_group(group[:middle])
            core.waiting.add_group(group[middle:])

    # --- failures -----------------------------------------------------------------------------

    def _failure(
        self,
        carrier: InFlightRequest,
        call: Call,
        failure: Failure,
        exchange: Exchange,
        delivery: Delivery,
    ) -> None:
        core, state, started = self._core, carrier.state, carrier.started
        now = core.clock()
        if failure.kind == "rate_limited":
            self._throttled(carrier, failure, now)
        elif failure.busy:
            core.throttle_answers += 1
            state.limit.overloaded(started, now, failure.message)
            state.account.passed()
        elif failure.passing and exchange.status is not None:
            state.limit.passed()
            state.account.passed()
        if call.out:  # its copy decides
            return
        if exchange.learned:
            core.sleep(call, now)
        elif exchange.again and call.free < FREE_TRIES:
            call.free += 1
            self._broke(carrier, now)
            core.sleep(call, now)
        elif failure.kind == "context_overflow" and self._fitter.elsewhere(call, state):
            core.sleep(call, now)
        elif carrier.given_up:  # the endpoint is known to be dead
            self._health.died_with(call, now)
        elif failure.passing and (failure.kind == "connect" or _cut(exchange, state)):
            if not state.up and exchange.connected:
                self._health.died_with(call, now)
            elif not state.up:
                core.sleep(call, now)  # it costs no try, and others may take the call
            else:
                held = UnprobedCall(call, failure, delivery, started, exchange.connected)
                core.waiting.hold(state.name, held)
                self._broke(carrier, now)
        else:
            self._bad_answer(carrier, call, failure, delivery, now)

    def _broke(self, carrier: InFlightRequest, now: float) -> None:
        """The connection of a request failed or broke: is anybody there?"""
        state = carrier.state
        if state.up:
            self._health.doubt(state, stop=state.broke(carrier.started, now))

    def _bad_answer(
        self, carrier: InFlightRequest, call: Call, failure: Failure, delivery: Delivery, now: float
    ) -> None:
        """A failure that an answering server caused, or the row itself."""
        core, state = self._core, carrier.state
        call.avoid = state.name
        blame = blame_of(failure)
        if blame is Blame.SERVER:
            self.judge(state, call, failure, delivery, carrier.started)
        elif blame is Blame.ACCOUNT:
            core.sleep(call, now)
            self._health.open(state, failure)
        else:
            full = blame is Blame.BUSY and failure.kind != "rate_limited"
            if full and state.failed(refused=False) and core.endpoints.others(state):
                self._health.suspect(state, call.request, sick=True)
            self.retry(call, failure, delivery)

    def judge(
        self, state: EndpointState, call: Call, failure: Failure, delivery: Delivery, sent: float
    ) -> None:
        """Take a failure that may be the server's of a call that was sent at ``sent``.

        It ends the call only where the server is seen to work for later ones. Else the server is
        asked for a proof; if it fails that too, the failure was the server's, and costs no try.
        """
        core = self._core
        sick = state.failed(refused=not failure.passing)
        if call.divisible and call.counted and failure.status is not None:
            decision: Decision | None = Decision(None)  # its parts are tried instead
        else:
            decision = self._decide(call, failure, delivery)
        if decision is not None and decision.late:
            self._end(call, failure, delivery, decision)
        elif decision is not None:
            ended = _with_reason(failure, decision)
            core.waiting.suspend(state.name, SuspendedCall(call, ended, delivery, sent))
            self._health.suspect_later(state)
        if sick:
            self._health.suspect(state, call.request, sick=state.keeps_failing)
        else:
            self.look(state)

    def look(self, state: EndpointState) -> None:
        """See whether what ``state`` served shows that failures before were the calls' own."""
        waiting = self._core.waiting
        if state.suspect or state.resting or waiting.suspended(state.name) is None:
            return
        self.resume(state, HealthVerdict.WELL)
        call = waiting.suspended(state.name)
        if call is not None and not (state.in_flight or waiting.ready):
            self._health.suspect(state, call.request)  # nothing is on the way that could show it

    def resume(self, state: EndpointState, verdict: HealthVerdict) -> None:
        """End the calls that were suspended for ``state``, or send them again."""
        core = self._core
        now = core.clock()
        most = max(LEAST_REFUSALS, min(MOST_REFUSALS, len(core.endpoints.states)))
        sent = math.inf if verdict is HealthVerdict.SICK else state.works_since
        for one in core.waiting.resume(state.name, sent):
            call = one.call
            if verdict is HealthVerdict.SICK:
                again = True
            else:
                call.refusals += 1
                passing = one.failure.passing
                limit = LEAST_REFUSALS if passing or call.only is not None else most
                again = call.refusals < limit and not (passing and verdict is HealthVerdict.WELL)
            if again:
                call.counted = max(0, call.counted - 1)
                core.sleep(call, now)
            elif not core.closed:
                core.fail(call, one.failure, one.delivery)

    def _throttled(self, carrier: InFlightRequest, failure: Failure, now: float) -> None:
        core, state = self._core, carrier.state
        core.throttle_answers += 1
        before = state.account.paused(now)
        wait = state.account.refused(
            carrier.started, now, failure.retry_after, carrier.tokens.total // len(carrier.group)
        )
        state.limit.throttled(carrier.started, now, failure.message)
        if before == 0 and wait > 0:
            told = failure.retry_after
            same = sum(1 for other in core.endpoints.states if other.account is state.account)
            who = "all wait" if same == len(core.endpoints.states) else "it waits"
            words = f"{state.name} says too many requests; {who} {wait:.1f} s"
            if told is not None and told > wait + 0.5:
                words += f" (it asked for {told:.0f} s; limits.retry_after_max caps it)"
            self._health.tell(words)

    def retry(self, call: Call, failure: Failure, delivery: Delivery | None) -> None:
        """Send a call again as the policy allows, else end it."""
        decision = self._decide(call, failure, delivery)
        if decision is None:
            return
        if decision.outage:
            words = f"no endpoint takes anything: {_with_reason(failure, decision).message}"
            self._core.sleep(call, self._core.clock())
            self._core.stop(StoppedEarly(words))
        else:
            self._end(call, failure, delivery, decision)

    def _decide(self, call: Call, failure: Failure, delivery: Delivery | None) -> Decision | None:
        """Send a call again where the policy allows it; returns why not, None if so."""
        core = self._core
        now = core.clock()
        if delivery is not None:
            note_pause(call, failure, delivery.sent, delivery.done)
        if ask_whole(call, failure):
            core.sleep(call, now)
            return None
        served = now if core.in_flight else core.last_served
        policy = self._served if now - core.last_served < LATELY_SERVED else core.config.retry
        decision = decide(policy, call, failure, now, core.random, served)
        if decision.delay is None:
            return decision
        core.sleep(call, now + decision.delay)
        return None

    def _end(
        self, call: Call, failure: Failure, delivery: Delivery | None, decision: Decision
    ) -> None:
        self._core.fail(call, _with_reason(failure, decision), delivery)


def _with_reason(failure: Failure, decision: Decision) -> Failure:
    """Return the failure with words that say why it is not tried again."""
    if not decision.reason:
        return failure
    return msgspec.structs.replace(failure, message=f"{failure.message} ({decision.reason})")


def _cut(exchange: Exchange, state: EndpointState) -> bool:
    """Whether an answer broke off as it does when a server dies; that of a hosted one says little:
    there is always somebody there."""
    return exchange.cut and state.endpoint.own


def _refused_whole(exchange: Exchange) -> bool:
    """Whether a group was refused for what is in it."""
    return all(
        isinstance(result, Failure) and not result.passing and result.status in ROW_STATUS
        for result in exchange.results
    )
