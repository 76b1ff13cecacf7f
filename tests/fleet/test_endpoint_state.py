"""What the fleet knows of one endpoint."""

from __future__ import annotations

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.types import Failure

GONE = Failure("connect", "refused", passing=True)


def a_state(limit=4, own=True):
    return EndpointState(Endpoint("here", "http://h/v1", own=own), InFlightLimit(limit, limit))


@pytest.mark.parametrize(
    ("own", "seconds"), [(False, [1, 2, 4, 8, 16, 30, 30]), (True, [1, 2, 4, 5, 5, 5, 5])]
)
def test_probes_of_a_dead_endpoint_become_rarer(own, seconds):
    state = a_state(own=own)
    waits = [state.on_down(float(step), GONE) for step in range(7)]
    assert waits == seconds
    assert state.down_since == 0.0
    state.on_answer(9.0)
    assert state.on_down(10.0, GONE) == 1.0


@pytest.mark.parametrize(
    ("own", "answered", "sent", "doubt"),
    [
        (False, None, 5, True),
        (False, 4, 5, True),
        (False, 6, 5, False),  # a provider: later ones were answered
        (True, 6, 5, True),
    ],
)
def test_a_lost_connection_is_doubt_unless_a_provider_has_answered_later_ones(
    own, answered, sent, doubt
):
    state = a_state(own=own)
    if answered is not None:
        state.on_answer(answered)
    assert state.on_disconnect(sent, 7.0) is doubt


@pytest.mark.parametrize(
    ("sent", "now", "ended"),
    [(6.0, 7.1, False), (6.0, 7.6, True), (7.05, 7.1, True)],
    ids=["may be what is left of it", "comes later", "was sent later"],
)
def test_an_answer_ends_the_doubt_unless_a_dead_server_may_have_left_it(sent, now, ended):
    state = a_state()
    state.on_disconnect(5.0, 7.0)
    state.await_probe()
    state.on_answer(now, sent)
    assert (state.room > 0) is ended
