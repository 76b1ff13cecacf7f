"""How long no endpoint at all has served the run, and what its end means."""

from __future__ import annotations

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Outage
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.state import OutagePatience
from bagent.types import Failure

GONE = Failure("connect", "cannot connect to here: refused", passing=True)
BROKEN = Failure("overloaded", "HTTP 500: no", passing=True, status=500)
NO_MODEL = Failure("rejected", "HTTP 404: no such model", status=404)
NO_KEY = Failure("auth", "HTTP 401: who is it", status=401)
NO_MONEY = Failure("budget", "HTTP 402: pay first", status=402)


def out(*faults, served=True):
    states = [
        EndpointState(Endpoint(f"e{i}", "http://h/v1"), InFlightLimit(1, 1))
        for i in range(len(faults))
    ]
    for state, fault in zip(states, faults, strict=True):
        if served:
            state.on_success(0.0, 0.0)
        if fault is GONE:
            state.on_down(1.0, fault)
        else:
            state.open_circuit(fault)
    return states


@pytest.mark.parametrize(
    ("faults", "served", "seconds", "kind", "words"),
    [
        ([GONE, GONE], True, 120, StoppedEarly, "none of 2 endpoints has answered for 120 s: "),
        ([GONE], False, 120, StoppedEarly, "the endpoint has not answered for 120 s: cannot"),
        ([BROKEN], True, 120, StoppedEarly, "the endpoint has served nothing for 120 s: HTTP 500"),
        ([BROKEN], False, 10, StoppedEarly, "the endpoint has served nothing for 10 s: HTTP 500"),
        ([NO_MODEL], True, 30, NeedsPerson, "the endpoint has served nothing for 30 s: HTTP 404"),
        ([NO_KEY, NO_MODEL], False, 3, NeedsPerson, "all 2 endpoints have served nothing for 3 s"),
        ([NO_KEY, GONE], True, 120, StoppedEarly, "none of 2 endpoints has answered for 120 s"),
        (
            [NO_MONEY],
            True,
            0,
            NeedsPerson,
            "the account's quota or credit is spent: HTTP 402: pay first",
        ),
    ],
)
def test_a_run_that_nobody_serves_ends_as_the_failures_say(faults, served, seconds, kind, words):
    outage, states = Outage(OutagePatience()), out(*faults, served=served)
    if seconds:
        assert outage.check(states, 100.0) is None
        assert outage.check(states, 99.9 + seconds) is None
    reason = outage.check(states, 100.0 + seconds)
    assert type(reason) is kind
    assert str(reason).startswith(words)


def test_one_endpoint_that_works_is_no_outage():
    outage, states = Outage(OutagePatience(passing=10.0)), out(GONE, BROKEN)
    assert outage.check(states, 0.0) is None
    states[0].on_answer(5.0)
    assert outage.check(states, 50.0) is None
    states[0].on_down(51.0, GONE)
    assert outage.check(states, 51.0) is None
    assert outage.check(states, 61.0) is not None
    outage.end()
    assert outage.check(states, 90.0) is None
