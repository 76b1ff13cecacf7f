"""Whether and when a failed call is sent again, and what it costs."""

from __future__ import annotations

import itertools
from random import Random

import msgspec
import pytest

from bagent.backends.base import Exchange
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import CallSettings, Request
from bagent.fleet import retry
from bagent.fleet.call import (
    LAST,
    Call,
    Delivery,
    Fail,
    InFlightRequest,
    ProbeEndpoint,
    Retry,
    Suspend,
)
from bagent.fleet.endpoint_state import CheckResult, EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.retry import (
    RetryPolicy,
    RetryRules,
    adapt_streaming,
    count_and_decide,
    record_pause,
)
from bagent.fleet.state import FleetConfig, FleetState
from bagent.types import Failure

PASSING = Failure("overloaded", "HTTP 500", True, 500)
BUSY = Failure("rate_limited", "HTTP 429", True, 429, busy=True)


def a_call(**fields):
    return Call(None, None, "key", 0, "map", 0, **fields)


def told(seconds, busy=True):
    return Failure("rate_limited", "HTTP 429", True, 429, seconds, busy=busy)


def decide_once(failure, call=None, now=100.0, seed=1):
    return count_and_decide(RetryPolicy(), call or a_call(), failure, now, Random(seed))


def test_waits_double_up_to_the_longest_with_a_spread_that_only_adds():
    policy = RetryPolicy(retries=100, base=0.5, longest=30.0)
    least = [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    for seed in range(50):
        call, random = a_call(), Random(seed)
        delays = [count_and_decide(policy, call, PASSING, 0.0, random).delay for _ in least]
        assert all(low <= delay <= 1.5 * low for low, delay in zip(least, delays, strict=True))


def test_a_backoff_is_longer_than_the_last_pause_also_after_a_wait_for_a_slot():
    policy = RetryPolicy(retries=100)
    for seed in range(50):
        random, call, now, pauses = Random(seed), a_call(), 0.0, []
        for _ in range(4):
            record_pause(call, PASSING, now, now + 1.0)
            now += 1.0
            delay = count_and_decide(policy, call, PASSING, now, random).delay
            pauses.append(delay + random.uniform(0.0, 2.0))
            now += pauses[-1]
        assert all(b > 1.1 * a for a, b in itertools.pairwise(pauses)), pauses


@pytest.mark.parametrize(("seconds", "busy"), [(0.02, True), (3.0, False), (60.0, True)])
def test_nobody_comes_back_earlier_than_told_and_not_all_at_once(seconds, busy):
    delays = [decide_once(told(seconds, busy), seed=seed).delay for seed in range(50)]
    assert min(delays) >= seconds
    assert max(delays) <= seconds + max(0.2, 0.1 * seconds)
    assert len(set(delays)) > 40
    assert max(delays) - min(delays) > 0.1


def test_a_full_server_is_waited_on_for_a_bounded_time_in_all():
    call = a_call()
    policy = RetryPolicy(throttled=1800.0)
    assert count_and_decide(policy, call, BUSY, 100.0, Random(1)).delay is not None
    assert count_and_decide(policy, call, BUSY, 1900.0, Random(1)).delay is not None
    decision = count_and_decide(policy, call, BUSY, 1900.1, Random(1))
    assert (decision.delay, decision.reason) == (None, "refused for 1800 s")


@pytest.mark.parametrize(("retries", "seconds"), [(0, 15), (1, 15), (3, 70), (5, 310), (30, 1800)])
def test_a_server_that_serves_nobody_is_given_up_sooner_the_fewer_tries_are_wanted(
    retries, seconds
):
    call = a_call()
    policy = RetryPolicy(retries=retries)
    for refusal in range(retries + 1):
        assert count_and_decide(policy, call, BUSY, refusal / 100, Random(1), 0.0).delay is not None
    assert count_and_decide(policy, call, BUSY, float(seconds), Random(1), 0.0).delay is not None
    decision = count_and_decide(policy, call, BUSY, seconds + 0.1, Random(1), 0.0)
    assert decision.delay is None
    assert "refused" in decision.reason


def test_a_row_whose_time_is_over_is_not_sent_again():
    for failure in (PASSING, BUSY, told(1.0)):
        decision = decide_once(failure, call=a_call(deadline=100.0), now=100.0)
        assert (decision.delay, decision.reason) == (None, "the row's time limit is over")


def streamed_call(**fields):
    request = Request(CallSettings("m", {}, {}), b"[]", stream=True)
    return Call(None, request, "key", 0, "map", 0, **fields)


def test_a_row_in_trouble_is_asked_whole_once_it_is_refused_for_load():
    cut = Failure("bad_response", "the stream broke off", True, 200)
    streams = []
    call = streamed_call()
    first = call.request
    for tries, failure in enumerate((cut, BUSY, cut, cut, BUSY, BUSY), start=1):
        call.attempts = tries
        assert not adapt_streaming(call, failure)
        streams.append(call.request.stream)
    assert streams == [True, True, True, True, False, False]
    assert first.stream  # who made the request has it unchanged


# --- the table of retries: what a failure leads to, whether it is counted, and when

NOW = 100.0
LOST = Failure("connect", "connection refused", True)
REFUSED = Failure("auth", "HTTP 401", status=401)
FORM = Failure("rejected", "HTTP 400", status=400)
TOO_LONG = Failure("context_overflow", "HTTP 400", status=400)
UNPAID = Failure("budget", "HTTP 402", status=402)
COUNTS = ("counted_attempts", "throttles", "deaths", "stale_connections", "new_keys", "refusals")


class Router:
    """Reroutes all calls that are too long."""

    def reroute(self, call: Call, state: EndpointState) -> bool:
        return True

    def take_stranded(self) -> list[Call]:
        return []


class Case:
    """One endpoint, one call that it failed, and the rules."""

    def __init__(self, retries: int = 5, **call: object) -> None:
        self.state = EndpointState(Endpoint("a", "http://a/v1"), InFlightLimit(8, 8))
        config = FleetConfig(concurrency=8, retry=RetryPolicy(retries=retries))
        self.fleet = FleetState([self.state], config, lambda: NOW)
        self.rules = RetryRules(self.fleet, Router(), Random(1))
        request = Request(CallSettings("m", {}, {}), b"x")
        self.call = Call(None, request, "key", 0, "map", 0, **call)

    def after(self, failure: Failure, cancelled: str = "", **exchange: object) -> list[object]:
        request = InFlightRequest(self.state, [self.call], NOW - 1, cancel_reason=cancelled)
        result = Exchange([failure], sent=NOW - 1, done=NOW, status=failure.status, **exchange)
        delivery = Delivery("a", "a/1", NOW - 1, NOW)
        return self.rules.after_failure(request, self.call, failure, result, delivery)


def the_retry(actions: list[object]) -> Retry:
    (action,) = [action for action in actions if isinstance(action, Retry)]
    return action


@pytest.mark.parametrize(
    ("failure", "exchange", "counts", "avoid", "at_once"),
    [
        pytest.param(PASSING, {}, {"counted_attempts": 1}, ("a",), False, id="failed"),
        pytest.param(BUSY, {}, {"throttles": 1}, ("a",), False, id="busy"),
        pytest.param(LOST, {"cancelled": "a died"}, {"deaths": 1}, (), True, id="died"),
        pytest.param(UNPAID, {}, {}, ("a",), True, id="out of quota"),
        pytest.param(
            LOST, {"stale_connection": True}, {"stale_connections": 1}, (), True, id="stale"
        ),
        pytest.param(REFUSED, {"new_key": True}, {"new_keys": 1}, (), True, id="new key"),
        pytest.param(FORM, {"learned": True}, {}, (), True, id="new form"),
        pytest.param(TOO_LONG, {}, {}, (), True, id="too long"),
    ],
)
def test_a_failure_is_sent_again_as_the_table_says(failure, exchange, counts, avoid, at_once):
    case = Case()
    action = the_retry(case.after(failure, **exchange))
    assert {name: getattr(case.call, name) for name in COUNTS if getattr(case.call, name)} == counts
    assert case.call.avoid == avoid
    assert (action.at == NOW) is at_once


def test_what_is_free_once_counts_as_any_failure_the_second_time() -> None:
    for exchange, failure in (({"stale_connection": True}, LOST), ({"new_key": True}, REFUSED)):
        case = Case()
        assert the_retry(case.after(failure, **exchange)).at == NOW
        assert any(isinstance(action, Suspend) for action in case.after(failure, **exchange))


def test_a_lost_connection_waits_for_a_probe_that_decides_whether_it_counts() -> None:
    for answered, counted in ((True, 1), (False, 0)):
        case = Case()
        suspend, probe = case.after(LOST, connected=False)
        assert isinstance(suspend, Suspend)
        assert suspend.suspended.until_probe
        assert isinstance(probe, ProbeEndpoint)
        assert probe.block
        actions = case.rules.after_probe(case.state, [suspend.suspended], answered=answered)
        assert (the_retry(actions).at == NOW) is not answered
        assert (case.call.counted_attempts, case.call.deaths) == (counted, 0)


def test_a_call_with_which_three_servers_died_ends() -> None:
    case = Case()
    first, second, third = (case.after(LOST, cancelled="a died")[0] for _ in range(3))
    assert first.at == NOW
    assert second.at == LAST
    assert isinstance(third, Fail)


@pytest.mark.parametrize("failure", [REFUSED, PASSING])
def test_a_final_failure_waits_for_a_check_and_is_free_if_that_fails(failure) -> None:
    case = Case(retries=1, counted_attempts=1)
    (suspend,) = case.after(failure)
    case.fleet.waiting.suspend("a", suspend.suspended)
    (action,) = case.rules.after_check(case.state, CheckResult.BROKEN)
    assert (action.call, action.at) == (case.call, NOW)
    assert case.call.counted_attempts == 1


def test_a_call_that_must_be_streamed_after_all_is_sent_at_once() -> None:
    case = Case()
    case.call.request = msgspec.structs.replace(case.call.request, stream=True)
    case.call.attempts = retry.STREAMED_ATTEMPTS
    case.after(BUSY)
    assert not case.call.request.stream
    action = the_retry(case.after(FORM))
    assert case.call.request.stream
    assert action.at == NOW
