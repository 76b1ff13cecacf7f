"""The table of retries: what a failure leads to, whether it is counted, and when."""

from __future__ import annotations

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
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.retry import RetryPolicy, RetryRules
from bagent.fleet.state import FleetConfig, FleetState
from bagent.types import Failure

NOW = 100.0
FAILED = Failure("overloaded", "HTTP 500", True, 500)
BUSY = Failure("rate_limited", "HTTP 429", True, 429, busy=True)
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
        pytest.param(FAILED, {}, {"counted_attempts": 1}, ("a",), False, id="failed"),
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
        assert case.call.counted_attempts == counted


def test_a_call_with_which_three_servers_died_ends() -> None:
    case = Case()
    first, second, third = (case.after(LOST, cancelled="a died")[0] for _ in range(3))
    assert first.at == NOW
    assert second.at == LAST
    assert isinstance(third, Fail)


def test_a_call_that_must_be_streamed_after_all_is_sent_at_once() -> None:
    case = Case()
    case.call.request = msgspec.structs.replace(case.call.request, stream=True)
    case.call.attempts = retry.STREAMED_ATTEMPTS
    case.after(BUSY)
    assert not case.call.request.stream
    action = the_retry(case.after(FORM))
    assert case.call.request.stream
    assert action.at == NOW
