"""What becomes of the calls of a request that is over."""

from __future__ import annotations

import itertools

import msgspec

from bagent.backends.base import Exchange
from bagent.backends.rate_headers import RateLimits
from bagent.fleet.call import Call, Carrier, Delivery, attempt_record
from bagent.fleet.core import Core
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fitting import Fitter
from bagent.fleet.health import Health
from bagent.fleet.retry import FREE_TRIES, ask_whole, decide, note_pause
from bagent.types import Failure, Reply

ROW_STATUS = frozenset({400, 413, 422})
"""HTTP answers to a request that speak of the request, not of the server."""

OWN_KINDS = frozenset({"auth", "rejected"})
"""Lasting failures that are the server's own, unless their status speaks of the request: it is set
up otherwise than the job thinks (401, 404, 405), or something else stands there (a redirect)."""

MOST_REFUSALS = 3
"""So many endpoints may refuse a call as set up otherwise before that is the call's own failure."""

LATELY_SERVED = 30.0
"""Seconds for which one good answer shows that calls get through."""

LEARNING_RATE = 0.05


class Settler:
    """Takes what requests came to: ends calls, sends them again, tells limits and health."""

    def __init__(self, core: Core, health: Health, fitter: Fitter) -> None:
        self._core = core
        self._health = health
        self._fitter = fitter
        self._serial = itertools.count(1)
        self._served = core.config.retry.while_served()

    def settle(self, carrier: Carrier, exchange: Exchange) -> None:
        """Take the results of a request."""
        core, state, group = self._core, carrier.state, carrier.group
        group_id = f"{state.name}/{next(self._serial)}"
        if exchange.limits is not None:
            self._told(carrier, exchange.limits)
        if len(group) > 1 and not exchange.learned and _refused_whole(exchange):
            self._halve(carrier, exchange, group_id)
            return
        if len(group) > 1:
            with core.together():
                self._take(carrier, exchange, group_id)
        else:
            self._take(carrier, exchange, group_id)

    def _take(self, carrier: Carrier, exchange: Exchange, group_id: str) -> None:
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

    def _told(self, carrier: Carrier, limits: RateLimits) -> None:
        """The answer told the account's limits; its headers may have come some time ago."""
        core, state = self._core, carrier.state
        at = core.clock() - max(0.0, core.unix() - limits.at)
        news = state.account.told(at, limits, carrier.mark)
        if news:
            self._health.tell(f"{state.name} allows {news}")

    def _reply(
        self, carrier: Carrier, call: Call, reply: Reply, exchange: Exchange, delivery: Delivery
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
        state.served(now)
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

    def _halve(self, carrier: Carrier, exchange: Exchange, group_id: str) -> None:
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
        carrier: Carrier,
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
                core.waiting.hold(state.name, (call, failure, delivery, exchange.connected))
                self._broke(carrier, now)
        else:
            self._bad_answer(carrier, call, failure, delivery, now)

    def _broke(self, carrier: Carrier, now: float) -> None:
        """The connection of a request failed or broke: is anybody there?"""
        state = carrier.state
        if state.up:
            self._health.doubt(state, stop=state.broke(carrier.started, now))

    def _bad_answer(
        self, carrier: Carrier, call: Call, failure: Failure, delivery: Delivery, now: float
    ) -> None:
        """A failure that an answering server caused, or the row itself."""
        core, state = self._core, carrier.state
        setup = is_set_up_otherwise(failure)
        if setup or (failure.passing and failure.kind != "rate_limited"):
            rests = state.failed(refused=setup)
            if rests and not state.resting and core.endpoints.others(state):
                self._health.rest(state, failure)
            if setup and call.refusals < MOST_REFUSALS and core.endpoints.others(state):
                call.refusals += 1
                call.avoid = state.name
                core.sleep(call, now)
                return
        call.avoid = state.name
        self.retry(call, failure, delivery)

    def _throttled(self, carrier: Carrier, failure: Failure, now: float) -> None:
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
        core = self._core
        now = core.clock()
        if delivery is not None:
            note_pause(call, failure, delivery.sent, delivery.done)
        if ask_whole(call, failure):
            core.sleep(call, now)
            return
        served = now if core.in_flight else core.last_served
        policy = self._served if now - core.last_served < LATELY_SERVED else core.config.retry
        decision = decide(policy, call, failure, now, core.random, served)
        if decision.delay is not None:
            core.sleep(call, now + decision.delay)
            return
        words = f"{failure.message} ({decision.reason})" if decision.reason else failure.message
        core.fail(call, msgspec.structs.replace(failure, message=words), delivery)


def _cut(exchange: Exchange, state: EndpointState) -> bool:
    """Whether an answer broke off as it does when a server dies; that of a hosted one says little:
    there is always somebody there."""
    return exchange.cut and state.endpoint.own


def is_set_up_otherwise(failure: Failure) -> bool:
    """Whether a failure says that its server is set up otherwise than the job thinks."""
    status = failure.status
    lasts = status is not None and not failure.passing
    return lasts and failure.kind in OWN_KINDS and status not in ROW_STATUS


def _refused_whole(exchange: Exchange) -> bool:
    """Whether a group was refused for what is in it."""
    return all(
        isinstance(result, Failure) and not result.passing and result.status in ROW_STATUS
        for result in exchange.results
    )
