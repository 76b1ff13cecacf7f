"""At the end of a run a slow endpoint gets nothing that would come after all the rest."""

from __future__ import annotations

import asyncio
import math

from bagent.backends.endpoint import Endpoint
from bagent.fleet.call import InFlightRequest
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.tail_latency import WINDOW, TailRule
from support.jumping_loop import on_jumping_clock, run_jumping
from support.scripted_fleet import Answer, always, setup


def seen(slow=60.0, fast=1.0):
    ending = TailRule()
    for number in range(WINDOW):
        name, seconds = ("slow", slow) if number % 32 == 0 else ("fast", fast)
        ending.add(name, number * 0.1, seconds)
    return ending, WINDOW * 0.1


def test_a_slow_endpoint_is_too_slow_once_little_is_left():
    ending, now = seen()
    assert not ending.is_too_slow("slow", now, remaining=1000)  # they take the others 100 s
    assert ending.is_too_slow("slow", now, remaining=100)
    assert not ending.is_too_slow("fast", now, remaining=0)


def test_a_copy_that_is_not_needed_before_it_is_sent_leaves_its_slot_free():
    async def main():
        gate = asyncio.Event()
        scripts = {name: lambda row, number: Answer(gate=gate) for name in "ab"}
        s = setup(scripts, hedge=1.0)
        s.request(s.call(0))
        await asyncio.sleep(5.0)
        gate.set()
        await asyncio.sleep(0)  # the answer is there; its row ends in the next turn
        s.fleet.tick()
        await asyncio.wait_for(s.fleet.wait_idle(), 10.0)
        return s

    s = run_jumping(main())
    assert s.recorder.replies
    assert [state.in_flight for state in s.states] == [0, 0]
    assert len(s.backend.sent) == 1


def most_rows(rates, remaining, in_flight=100):
    """Return how many rows each endpoint may have, after 10 s at these rows per second."""
    rule, states, answers = TailRule(), [], []
    for name, rate in rates.items():
        state = EndpointState(Endpoint(name, "http://h/v1", own=True), InFlightLimit(1000, 1000))
        state.in_flight = in_flight
        states.append(state)
        latency = in_flight / rate  # Little's law
        answers += [(1000.0 + max(latency, row / rate), name, latency) for row in range(rate * 10)]
    for at, name, latency in sorted(answers):
        rule.add(name, at, latency)
    return [rule.most_rows(state, 1010.0, states, remaining) for state in states]


def test_a_slow_endpoint_may_have_part_of_its_share_of_the_last_rows():
    fast, slow = most_rows({"fast": 30, "slow": 10}, remaining=400)
    assert fast == math.inf
    assert slow == 0.6 * 400 * 10 / 40
    assert most_rows({"fast": 30, "slow": 10}, remaining=4000)[1] == math.inf, "long before the end"


def test_an_endpoint_that_has_answered_nothing_yet_is_slow():
    rule, states = TailRule(), []
    for name in ("fast", "slow"):
        state = EndpointState(Endpoint(name, "http://h/v1", own=True), InFlightLimit(1000, 1000))
        states.append(state)
    slow = states[1]
    slow.in_flight = 40
    slow.requests[InFlightRequest(slow, [], 1000.0)] = None
    for row in range(100):
        rule.add("fast", 1000.0 + row / 10, 1.0)
    assert rule.most_rows(slow, 1010.0, states, remaining=120) < 40


def run_of(count):
    """Two endpoints, one at a fiftieth of the speed; seconds to the end, and who had the rows."""

    async def main():
        s = setup({"fast": always(seconds=1.0), "slow": always(seconds=50.0)}, limit=4)
        began = asyncio.get_running_loop().time()
        await s.run(count, announced=True)
        return asyncio.get_running_loop().time() - began, s.backend.shares

    return run_jumping(main())


def test_a_run_does_not_wait_for_rows_that_a_slow_endpoint_took_last():
    seconds, shares = run_of(1000)
    ideal = 1000 / (4 + 4 / 50)
    assert seconds < 1.06 * ideal
    assert shares["slow"] >= 15


@on_jumping_clock
async def test_where_the_end_is_known_it_is_heeded_before_the_input_has_ended():
    def fast(row, number):
        return Answer(seconds=1.0 + row % 7 / 100)

    s = setup({"fast": fast, "slow": always(seconds=50.0)}, limit=4)
    s.fleet.expect(True)
    await s.feed(1000)
    s.fleet.tick(remaining=20)
    before = s.backend.shares["slow"]
    for row in range(1000, 1400):
        await s.fleet.wait_for_room()
        s.request(s.call(row))
    await s.fleet.drain(0.0)
    after = s.backend.shares["slow"]
    assert before == after >= 16
