"""Which endpoint gets the next call."""

from __future__ import annotations

from collections import Counter

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_pool import EndpointPool
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.types import Failure


def some(*limits, growing=False):
    states = [
        EndpointState(Endpoint(f"e{i}", "http://h/v1"), InFlightLimit(limit, 1000, growing=growing))
        for i, limit in enumerate(limits)
    ]
    return EndpointPool(states), states


def take(endpoints):
    state = endpoints.select(0.0)
    if state is not None:
        state.in_flight += 1
    return state


def free(endpoints, state):
    state.in_flight -= 1
    endpoints.update(state)


def test_all_room_is_used_and_no_more():
    endpoints, states = some(3, 1, 2)
    taken = [take(endpoints) for _ in range(7)]
    assert Counter(taken[:6]) == dict(zip(states, (3, 1, 2), strict=True))
    assert taken[6] is None


def test_idle_endpoints_take_turns():
    endpoints, states = some(5, 5, 5)
    order = []
    for _ in range(9):
        state = take(endpoints)
        order.append(states.index(state))
        free(endpoints, state)
    assert order == [0, 1, 2] * 3


def test_the_least_busy_is_taken_by_its_share_not_its_count():
    endpoints, (small, large) = some(4, 40)
    small.in_flight, large.in_flight = 3, 20
    assert endpoints.select(0.0) is large
    large.in_flight = 39
    assert endpoints.select(0.0) is small


def test_a_full_endpoint_is_found_again_once_it_has_room():
    endpoints, states = some(*[1] * 1000)
    while take(endpoints) is not None:
        pass
    for state in (states[500], states[3], states[999]):
        assert endpoints.select(0.0) is None
        free(endpoints, state)
        assert take(endpoints) is state


def test_endpoints_that_are_down_are_passed_over_until_they_are_up():
    endpoints, (one, two) = some(1, 1)
    one.on_down(0.0, Failure("connect", "refused", passing=True))
    assert endpoints.up == 1
    assert take(endpoints) is two
    assert endpoints.select(0.0) is None
    one.on_answer(1.0)
    endpoints.update(one)
    assert endpoints.up == 2
    assert take(endpoints) is one


def test_the_limit_of_all_follows_the_limits_of_each():
    endpoints, (one, two) = some(10, 20, growing=True)
    assert endpoints.limit == 30
    one.limit.on_overload(0.0, 1.0, "full")
    endpoints.update(one)
    assert endpoints.limit == 25
    two.limit.on_success(20, 20)
    endpoints.update(two)
    endpoints.update(two)
    assert endpoints.limit == 45
