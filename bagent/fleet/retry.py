"""All rules by which a call is sent again. No other package retries a call.

========================================  ===========  ====================  ====================
What happened                             Attempt      Next endpoint         When
========================================  ===========  ====================  ====================
answered with a passing failure           counted      any, another first    backoff, Retry-After
timed out, while nothing else was served  counted      any, another first    after a check
429, or server busy                       free [a]     any, another first    backoff, Retry-After
connection failed, server is down         free         any that is up        after the probe
connection failed, server is up           counted      any, another first    probe, then backoff
server hangs, or dies with the call       free [b]     any that is up        at once
two servers died with the call            free, once   any that is up        last, alone
refused with 401, 403, 404 ...            free         another [c]           success or check
failed, then its server fails a check     free         another               after the check
account out of quota                      free         any                   circuit closes
keep-alive connection was closed          free, once   any                   at once
key refused, and it can be renewed        free, once   any                   at once
endpoint wants another form or route      free         any                   at once
stream switched off, but required         free         any                   at once
prompt too long for the endpoint          free         with longer context   at once
its only endpoint is down                 counted      the same              backoff
no endpoint up has the context it needs   free         with longer context   once one serves
group refused as a whole (400, 413)       free         any, in two halves    at once
late call at the end of a run             free         another, as a copy    `FleetConfig.hedge`
========================================  ===========  ====================  ====================

`RetryRules` decides on all but the last, which is `Hedger`; `count_and_decide` computes
counted attempts and delays.

Limits: [a] while any call is served, else an outage after `RetryPolicy.quiet`; at most
`RetryPolicy.throttled`. [b] The third death ends it. [c] `MAX_REFUSALS` endpoints that serve other
calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import TYPE_CHECKING

import msgspec

from bagent.backends.base import Exchange
from bagent.errors import StoppedEarly
from bagent.fleet.call import (
    LAST,
    UNKNOWN_CONTEXT,
    Action,
    Call,
    CheckEndpoint,
    Delivery,
    Fail,
    InFlightRequest,
    OpenCircuit,
    ProbeEndpoint,
    Retry,
    Split,
    StopFleet,
    Suspend,
    SuspendedCall,
)
from bagent.fleet.endpoint_state import CheckResult, EndpointState
from bagent.types import Failure

if TYPE_CHECKING:
    from bagent.fleet.context_length import ContextRouter
    from bagent.fleet.state import FleetState

MAX_STALE_CONNECTIONS = 1
"""How often a call is sent again for free because its keep-alive connection was closed."""

MAX_NEW_KEYS = 1
"""How often a call is sent again for free because its key was replaced."""

RECENTLY_SERVED = 30.0
"""Delays are shorter while a call was served within so many seconds."""

MAX_DEATHS = 2
"""A call with which this many endpoints died runs last, alone, once."""

MIN_REFUSALS, MAX_REFUSALS = 2, 3
"""How many endpoints that serve other calls must refuse a call before it fails. A single endpoint
is asked `MIN_REFUSALS` times."""

STRANDED_SECONDS = 1.0
"""How often a call looks for an endpoint with the context that it needs."""

STREAMED_ATTEMPTS = 4
"""Attempts at a busy server after which a call is no longer streamed."""

PAUSE_GROWTH = 2.0
"""A delay is at least this many times the pause before the attempt that failed. That pause may
also contain waits for a rate limit or a slot."""

MIN_QUIET_SECONDS = 15.0
"""Shortest time for which a busy server is waited for, however few retries are allowed."""


HEDGE_FACTOR = 3.0
"""A call is hedged once it takes this many times the 90th percentile of recent latencies."""

MIN_HEDGE_SECONDS = 1.0
HEDGE_POLL_SECONDS = 0.25
MAX_HEDGED_SHARE = 0.1
"""Share of the calls in flight that may be copies; at least one may."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """Limits on retries; all times in seconds."""

    retries: int = 5  # counted attempts after the first
    base: float = 0.5  # first delay; each one doubles
    longest: float = 30.0  # longest delay
    longest_served: float = 5.0  # longest delay while other calls are served
    retry_after_max: float = 120.0  # cap on a server's Retry-After
    throttled: float = 1800.0  # how long one call may wait for a busy server

    def while_served(self) -> RetryPolicy:
        """Return the policy for calls that fail while others are served."""
        longest = min(self.longest, self.longest_served)
        return msgspec.structs.replace(self, longest=longest)

    @property
    def quiet(self) -> float:
        """Seconds without any answer after which a busy server counts as an outage.

        This is twenty times the delays of all counted attempts.
        """
        delays = self.base * (2.0 ** min(self.retries, 16) - 1)
        return min(self.throttled, max(MIN_QUIET_SECONDS, 20 * delays))


class Decision(msgspec.Struct, frozen=True):
    """Whether and when a call is retried."""

    delay: float | None  # seconds; None: give up
    reason: str = ""  # why it is not retried, appended to the failure's message
    late: bool = False  # the row's own time limit ends it
    outage: bool = False  # no call is served


def count_and_decide(
    policy: RetryPolicy,
    call: Call,
    failure: Failure,
    now: float,
    random: Random,
    served_at: float | None = None,
) -> Decision:
    """Count the attempt of ``call`` that failed, and return whether it is retried.

    A busy server costs no attempt while calls are served; ``served_at`` is when one last was.
    Jitter is only added, so that no call returns before its Retry-After.
    """
    if not failure.passing:
        return Decision(None)
    if call.deadline is not None and now >= call.deadline:
        return Decision(None, "the row's time limit is over", late=True)
    retry_after = failure.retry_after
    if retry_after is not None:
        retry_after = min(retry_after, policy.retry_after_max)
    if failure.busy:
        decision = _give_up_busy(policy, call, now, served_at, retry_after)
        if decision is not None:
            return decision
        exponent = min(call.throttles - 1, 16)
    else:
        call.counted_attempts += 1
        attempts = call.counted_attempts
        if attempts > policy.retries:
            return Decision(None, f"{attempts} tries" if attempts > 1 else "")
        exponent = min(attempts - 1, 16)
    if retry_after is not None:
        delay = retry_after + random.uniform(0.0, max(0.2, 0.1 * retry_after))
    else:
        delay = min(policy.longest, policy.base * 2**exponent) * random.uniform(1.0, 1.5)
        if not failure.busy:
            delay = max(delay, PAUSE_GROWTH * min(policy.longest, call.pause))
    if call.deadline is not None and now + delay >= call.deadline:
        return Decision(None, "the row's time limit comes before the next try", late=True)
    return Decision(delay)


def _give_up_busy(
    policy: RetryPolicy,
    call: Call,
    now: float,
    served_at: float | None,
    retry_after: float | None,
) -> Decision | None:
    """Count the refusal; return the decision to stop waiting for a busy server, else None."""
    if call.throttled_at is None:
        call.throttled_at = now
    call.throttles += 1
    if now - call.throttled_at > policy.throttled:
        return Decision(None, f"refused for {policy.throttled:g} s")
    if served_at is not None and call.throttles > policy.retries:
        quiet = now - max(served_at, call.throttled_at)
        if quiet > max(policy.quiet, 4 * (retry_after or 0.0)):
            reason = f"refused {call.throttles} times, and nothing else got through"
            return Decision(None, reason, outage=True)
    return None


def record_pause(call: Call, failure: Failure, sent: float, done: float) -> None:
    """Record how long the call paused before this attempt, sent and failed at Unix seconds.

    Pauses that a server asked for do not count, nor those until its check passed.
    """
    if call.failed_at is not None:
        call.pause = max(0.0, sent - call.failed_at)
    call.failed_at = None if failure.busy or failure.retry_after is not None else done


def adapt_streaming(call: Call, failure: Failure) -> bool:
    """Stop streaming a call that a busy server keeps refusing, or undo it where it was rejected.

    An unstreamed answer cannot break off half way and costs a busy server less. Requests that
    were accepted and broke off stay as they are, so that a provider can recognise the repetition.
    Return True if the request must be sent again because of the undo.
    """
    streamed = call.request.stream
    if call.unstreamed is None and failure.busy and call.attempts >= STREAMED_ATTEMPTS and streamed:
        call.unstreamed, call.request = True, msgspec.structs.replace(call.request, stream=False)
    elif call.unstreamed and failure.kind == "rejected":
        call.unstreamed, call.request = False, msgspec.structs.replace(call.request, stream=True)
        return True
    return False


ROW_STATUS = frozenset({400, 413, 422})
"""HTTP statuses that blame the request, not the server."""

_SERVER_MESSAGE = re.compile(
    r"\bmodels?\b[^.\n]{0,160}?\b(not (be )?found|(does|do) not exist|not exist|unknown|no longer"
    r"|not (currently )?(available|served|loaded|supported|deployed)|isn't (available|served)"
    r"|is (invalid|unavailable)|has been (deprecated|removed|shut ?down|retired))\b"
    r"|\b(no such|unknown|invalid|unsupported|unrecognized|could not find( the)?) model\b"
    r"|\bmodel_?not_?found|\bapi[ _-]?key\b[^.\n]{0,40}\b(not valid|invalid|expired|missing)\b"
    r"|\b(invalid|incorrect|expired|missing|no) api[ _-]?key\b",
    re.IGNORECASE,
)
"""Messages of a 400 or 422 that blame the model or key after all. A message may quote the row, so
a check decides in the end."""


class Blame(Enum):
    """What a failure says is at fault."""

    ROW = "row"  # the request, wherever it is sent
    SERVER = "server"  # the endpoint: down, faulty, without the model, or refusing the key
    ACCOUNT = "account"  # money or quota is used up
    BUSY = "busy"  # no capacity now


def blame_of(failure: Failure) -> Blame:
    """Return what is at fault, by the kind, status and message of ``failure``."""
    if failure.kind == "budget":
        # Without a status it is the budget of the run itself.
        return Blame.ROW if failure.status is None else Blame.ACCOUNT
    if failure.busy or failure.kind == "rate_limited":
        return Blame.BUSY
    if failure.passing or failure.kind in ("auth", "connect"):
        return Blame.SERVER
    if failure.kind != "rejected":
        return Blame.ROW
    if failure.status in ROW_STATUS and not _SERVER_MESSAGE.search(failure.message):
        return Blame.ROW
    return Blame.SERVER


class RetryRules:
    """Decides what happens to calls that failed, as the table of this module says."""

    def __init__(self, fleet: FleetState, router: ContextRouter, random: Random) -> None:
        self._fleet = fleet
        self._router = router
        self._random = random
        self._served_policy = fleet.config.retry.while_served()

    def after_failure(
        self,
        request: InFlightRequest,
        call: Call,
        failure: Failure,
        exchange: Exchange,
        delivery: Delivery,
    ) -> list[Action]:
        """Return what to do about a call that failed, and about its endpoint."""
        state, now = request.state, self._fleet.clock()
        lost = not request.cancel_reason and _lost_connection(failure, exchange, state)
        if call.in_flight:  # its copy decides about the call
            return self._probe(request, now) if lost else []
        call.hedged = False
        if exchange.learned:
            return [Retry(call, now)]
        if exchange.new_key and call.new_keys < MAX_NEW_KEYS:
            call.new_keys += 1
            return [Retry(call, now)]
        if exchange.stale_connection and call.stale_connections < MAX_STALE_CONNECTIONS:
            call.stale_connections += 1
            probe = self._probe(request, now)
            return [*probe, Retry(call, now)]
        if failure.kind == "context_overflow" and self._router.reroute(call, state):
            return [Retry(call, now)]
        if request.cancel_reason:  # the endpoint is dead or hangs
            return [self._after_death(call, now)]
        if lost:
            if state.up:
                suspended = SuspendedCall(
                    call=call,
                    failure=failure,
                    delivery=delivery,
                    sent=request.started,
                    until_probe=True,
                    connected=exchange.connected,
                )
                return [Suspend(state, suspended), *self._probe(request, now)]
            return [self._after_lost_server(call, now, connected=exchange.connected)]
        call.avoid_endpoint(state.name)
        blame = blame_of(failure)
        if blame is Blame.SERVER:
            return self._after_server_fault(state, call, failure, delivery, request.started)
        if blame is Blame.ACCOUNT:
            return [Retry(call, now), OpenCircuit(state, failure)]
        actions: list[Action] = []
        busy = blame is Blame.BUSY and failure.kind != "rate_limited"
        check_due = busy and state.on_failure(refused=False)
        if check_due and self._fleet.endpoints.has_alternative(state):
            actions.append(CheckEndpoint(state, call.request, suspect=True))
        return actions + self._retry_or_fail(call, failure, delivery)

    def split(self, calls: Sequence[Call]) -> list[Action]:
        """Return the action after a group was refused as a whole: the bad row ends up alone."""
        now = self._fleet.clock()
        for call in calls:
            call.ready_at = now
        return [Split(list(calls))]

    def after_probe(
        self, state: EndpointState, calls: Sequence[SuspendedCall], *, answered: bool
    ) -> list[Action]:
        """Return what to do about the calls that awaited a probe of ``state``."""
        now = self._fleet.clock()
        actions: list[Action] = []
        for entry in calls:
            if answered:
                entry.call.avoid_endpoint(state.name)
                actions += self._after_server_fault(
                    state, entry.call, entry.failure, entry.delivery, entry.sent
                )
            else:
                actions.append(self._after_lost_server(entry.call, now, connected=entry.connected))
        return actions

    def after_check(self, state: EndpointState, result: CheckResult) -> list[Action]:
        """Return what to do about the calls that were suspended until a check of ``state``.

        Those that failed after the endpoint's latest success stay suspended, unless it is broken.
        """
        fleet, now = self._fleet, self._fleet.clock()
        broken = result is CheckResult.BROKEN
        max_refusals = max(MIN_REFUSALS, min(MAX_REFUSALS, len(fleet.endpoints.states)))
        sent = math.inf if broken else state.works_since
        actions: list[Action] = []
        for suspended in fleet.waiting.on_check(state.name, sent):
            call, passing = suspended.call, suspended.failure.passing
            retry = broken
            if not broken:
                call.refusals += 1
                few = passing or call.pinned_to is not None
                again = call.refusals < (MIN_REFUSALS if few else max_refusals)
                retry = again and not (passing and result is CheckResult.WORKS)
            if retry:
                if passing:  # a refusal was not counted
                    call.counted_attempts = max(0, call.counted_attempts - 1)
                call.failed_at = None
                actions.append(Retry(call, now))
            elif not fleet.closed:
                actions.append(Fail(call, suspended.failure, suspended.delivery))
        return actions

    def after_success(self, state: EndpointState) -> list[Action]:
        """Return what to do about suspended calls if ``state`` has served later ones.

        An idle endpoint is checked instead: no request in flight can show whether it works.
        """
        fleet = self._fleet
        if state.is_suspect or state.circuit_open:
            return []
        if fleet.waiting.awaiting_check(state.name) is None:
            return []
        actions = self.after_check(state, CheckResult.WORKS)
        call = fleet.waiting.awaiting_check(state.name)
        if call is not None and not (state.in_flight or fleet.waiting.ready):
            actions.append(CheckEndpoint(state, call.request))
        return actions

    def after_removal(self, state: EndpointState) -> list[Action]:
        """Return what to do about the calls suspended for an endpoint that left."""
        now = self._fleet.clock()
        calls = self._fleet.waiting.on_probe(state.name)
        actions: list[Action] = [Retry(entry.call, now) for entry in calls]
        return actions + self.after_check(state, CheckResult.BROKEN)

    def stranded(self) -> list[Action]:
        """Return what to do about calls that only endpoints that are down may serve."""
        fleet = self._fleet

        def is_down(name: str) -> bool:
            state = fleet.endpoints.get(name)
            return state is None or not state.may_serve

        actions: list[Action] = []
        works = any(state.may_serve for state in fleet.endpoints.states)
        for call in fleet.waiting.take_pinned(is_down) if works else ():
            message = f"{call.pinned_to} serves nothing, and no other endpoint may have this row"
            actions += self._retry_or_fail(call, Failure("connect", message, passing=True), None)
        for call in self._router.take_stranded():
            context = self._router.shortest_enough(call)
            if context is None:  # the last endpoint without a known context has reported it
                message = "the prompt is longer than the context of every endpoint"
                actions.append(Fail(call, Failure("context_overflow", message), None))
            elif context != call.min_context:
                self._router.require(call, context)
                actions.append(Retry(call, fleet.clock()))
            else:
                actions += self._wait_for_context(call)
        return actions

    def _wait_for_context(self, call: Call) -> list[Action]:
        """Return what to do about a call that is too long for the endpoints that serve.

        It waits while others are served, then as in an outage. It fails if only endpoints that
        reported no context might take it.
        """
        fleet, now = self._fleet, self._fleet.clock()
        if call.stranded_at is None:
            call.stranded_at = now
        quiet = now - max(call.stranded_at, fleet.last_served)
        if fleet.in_flight or quiet < fleet.config.outage.passing:
            return [Retry(call, now + STRANDED_SECONDS)]
        unknown = call.min_context == UNKNOWN_CONTEXT
        length = "" if unknown else f" of {call.min_context} tokens"
        message = f"no endpoint has served for {quiet:.0f} s whose context{length} this row needs"
        if unknown:
            return [Fail(call, Failure("connect", message, passing=True), None)]
        return [StopFleet(StoppedEarly(message))]

    def _probe(self, request: InFlightRequest, now: float) -> list[Action]:
        """Return the probe after a request's connection failed or broke."""
        state = request.state
        return [ProbeEndpoint(state, state.on_disconnect(request.started, now))] if state.up else []

    def _after_lost_server(self, call: Call, now: float, *, connected: bool) -> Action:
        if connected:
            return self._after_death(call, now)
        return Retry(call, now)

    def _after_death(self, call: Call, now: float) -> Action:
        """Return what to do about a call whose endpoint died with it."""
        call.deaths += 1
        if call.deaths < MAX_DEATHS:
            return Retry(call, now)
        if call.deaths == MAX_DEATHS:
            return Retry(call, LAST)
        message = f"{call.deaths} endpoints died while they worked on this row"
        return Fail(call, Failure("connect", message, passing=True), None)

    def _after_server_fault(
        self,
        state: EndpointState,
        call: Call,
        failure: Failure,
        delivery: Delivery,
        sent: float,
    ) -> list[Action]:
        """Return what to do about a call that failed, perhaps through the server's fault.

        A failure that would end the call suspends it first. It ends the call only if the server
        then serves later calls or passes a check.
        """
        counted_before = call.counted_attempts
        if call.divisible and call.counted_attempts and failure.status is not None:
            decision: Decision | Retry = Decision(None)  # its rows are sent apart instead
        else:
            decision = self._decide(call, failure, delivery)
        check_due = state.on_failure(refused=not failure.passing)
        actions: list[Action] = []
        if isinstance(decision, Retry):
            state.lost_attempts[call] += call.counted_attempts - counted_before
            actions.append(decision)
        elif decision.late:
            actions.append(Fail(call, _with_reason(failure, decision), delivery))
        else:
            suspended = SuspendedCall(
                call=call, failure=_with_reason(failure, decision), delivery=delivery, sent=sent
            )
            actions.append(Suspend(state, suspended))
        # Nobody knows whether row or server is at fault, and few slots make few failures in a row.
        timed_out = failure.kind == "timeout" and failure.status is None
        hangs = timed_out and state.last_served <= sent
        if check_due or hangs:
            suspect = state.keeps_failing or (hangs and isinstance(decision, Retry))
            actions.append(CheckEndpoint(state, call.request, suspect=suspect))
        return actions

    def _retry_or_fail(
        self, call: Call, failure: Failure, delivery: Delivery | None
    ) -> list[Action]:
        """Return the retry if the policy allows it, else the end of the call, or of the run."""
        decision = self._decide(call, failure, delivery)
        if isinstance(decision, Retry):
            return [decision]
        failure = _with_reason(failure, decision)
        if decision.outage:
            error = StoppedEarly(f"no endpoint takes anything: {failure.message}")
            return [StopFleet(error)]  # the row stays unfinished; nothing more is sent for it
        return [Fail(call, failure, delivery)]

    def _decide(self, call: Call, failure: Failure, delivery: Delivery | None) -> Decision | Retry:
        """Return the retry if the policy allows it, else why not."""
        fleet, now = self._fleet, self._fleet.clock()
        if delivery is not None:
            record_pause(call, failure, delivery.sent, delivery.done)
        if adapt_streaming(call, failure):
            return Retry(call, now)
        served_at = now if fleet.in_flight else fleet.last_served
        recently = now - fleet.last_served < RECENTLY_SERVED
        policy = self._served_policy if recently else fleet.config.retry
        decision = count_and_decide(policy, call, failure, now, self._random, served_at)
        if decision.delay is None:
            return decision
        return Retry(call, now + decision.delay)


def _with_reason(failure: Failure, decision: Decision) -> Failure:
    """Return the failure with the reason why it is not retried in its message."""
    if not decision.reason:
        return failure
    return msgspec.structs.replace(failure, message=f"{failure.message} ({decision.reason})")


def _lost_connection(failure: Failure, exchange: Exchange, state: EndpointState) -> bool:
    """Return whether a connection failed, or broke off as when an own engine dies.

    In front of a hosted service something always answers.
    """
    return failure.passing and (failure.kind == "connect" or (exchange.cut and state.endpoint.own))


def refused_as_a_whole(exchange: Exchange) -> bool:
    """Return whether all calls of a group failed with one refusal of its contents."""
    return all(
        isinstance(result, Failure) and not result.passing and result.status in ROW_STATUS
        for result in exchange.results
    )


class Hedger:
    """Finds late calls at the end of a run, while no row waits for a slot."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._polled_at = fleet.clock()

    def late(self) -> list[InFlightRequest]:
        """Return the requests of one call that should be copied to another endpoint."""
        fleet = self._fleet
        now = fleet.clock()
        threshold = fleet.config.hedge
        busy = fleet.closed or fleet.waiting.ready or fleet.expecting or not fleet.in_flight
        if threshold is None or busy or now - self._polled_at < HEDGE_POLL_SECONDS:
            return []
        self._polled_at = now
        if not threshold:
            if len(fleet.latencies) < 10:
                return []
            percentile = sorted(fleet.latencies)[len(fleet.latencies) * 9 // 10]
            threshold = max(MIN_HEDGE_SECONDS, HEDGE_FACTOR * percentile)
        late, copies = [], 0
        for state in fleet.endpoints.states:
            for request in state.requests:
                call = request.calls[0]
                over = request.ended or call.ended
                if len(request.calls) != 1 or over or call.pinned_to is not None:
                    continue
                if call.in_flight > 1:
                    copies += 1
                elif now - request.started >= threshold and not call.hedged:
                    late.append(request)
        free = max(1, int(fleet.in_flight * MAX_HEDGED_SHARE)) - copies // 2
        late.sort(key=lambda request: request.started)
        return late[: max(0, free)]
