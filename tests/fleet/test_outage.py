"""How long no endpoint at all has answered."""

from __future__ import annotations

from bagent.backends.endpoint import Endpoint
from bagent.errors import StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limiter import InFlightLimit
from bagent.fleet.outage import Outage
from bagent.types import Failure

FAILURE = Failure("connect", "cannot connect to here: refused", passing=True)


def down(count):
    states = [
        EndpointState(Endpoint(f"e{i}", "http://h/v1"), InFlightLimit(1, 1)) for i in range(count)
    ]
    for state in states:
        state.went_down(0.0)
    return states


def test_a_run_ends_when_all_endpoints_are_down_for_too_long():
    outage, states = Outage(120.0), down(2)
    assert outage.went_down(states, 100.0, FAILURE) is None
    assert outage.went_down(states, 219.9, FAILURE) is None
    reason = outage.went_down(states, 220.0, FAILURE)
    assert isinstance(reason, StoppedEarly)
    assert str(reason) == (
        "all 2 endpoints do not answer since 120 s: cannot connect to here: refused"
    )
    single = Outage(0.0).went_down(down(1), 1.0, FAILURE)
    assert str(single).startswith("the endpoint does not answer since 0 s: ")


def test_an_endpoint_that_is_up_or_an_answer_ends_the_outage():
    outage, states = Outage(10.0), down(2)
    assert outage.went_down(states, 0.0, FAILURE) is None
    states[0].answered(5.0)
    assert outage.went_down(states, 50.0, FAILURE) is None
    states[0].went_down(51.0)
    assert outage.went_down(states, 51.0, FAILURE) is None
    assert outage.went_down(states, 61.0, FAILURE) is not None
    outage.over()
    assert outage.went_down(states, 90.0, FAILURE) is None
