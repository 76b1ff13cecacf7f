"""Late calls, weights, and endpoints that come and go."""

from __future__ import annotations

import asyncio

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock, run_jumping
from support.scripted_fleet import GOOD, Answer, always, setup


def test_a_straggler_at_the_end_is_sent_a_second_time_elsewhere():
    async def main():
        sent = []

        def script(row, number):
            sent.append(row)
            late = row == 19 and sent.count(19) == 1
            return Answer(GOOD, 100.0 if late else 1.0)

        s = setup({"a": script, "b": script}, limit=8, hedge=0.0)
        await s.run(20, ticks=True)
        return s, asyncio.get_running_loop().time()

    s, end = run_jumping(main())
    assert len(s.recorder.replies) == 20
    assert end < 1015
    assert len(s.backend.times(19)) == 2
    names = {name for _, name, row in s.backend.sent if row == 19}
    assert names == {"a", "b"}
    assert s.backend.cancelled == 1
    assert s.tries()[19] == 2


def test_weights_are_honoured_whatever_is_out():
    async def main(concurrency):
        s = setup(
            {"light": always(), "heavy": always()},
            limit=64,
            concurrency=concurrency,
            weights={"heavy": 3.0},
        )
        await s.run(400)
        return s.backend.shares

    for concurrency in (1, 8, 40):
        shares = run_jumping(main(concurrency))
        assert 280 <= shares["heavy"] <= 320, (concurrency, shares)


@on_jumping_clock
async def test_an_endpoint_joins_and_another_leaves_when_what_it_has_is_done():
    s = setup({"old": always(seconds=2.0), "new": always()}, limit=4)
    new = next(state for state in s.states if state.name == "new")
    s.fleet.leave(["new"])
    work = asyncio.ensure_future(s.run(200))
    await asyncio.sleep(5.0)
    assert s.backend.shares["new"] == 0
    s.fleet.join(
        [EndpointState(Endpoint("new", "http://new/v1"), InFlightLimit(4, 4), new.account)]
    )
    await asyncio.sleep(4.5)
    s.fleet.leave(["old"])
    await asyncio.sleep(0.01)
    at = len(s.backend.sent)
    in_flight = s.backend.out["old"]
    stats = s.fleet.stats()
    assert (stats.endpoints_up, stats.endpoints) == (1, 1), "without the one that leaves"
    await work
    assert len(s.recorder.replies) == 200
    assert s.backend.shares["new"] > 50
    assert {name for _, name, _ in s.backend.sent[at:]} == {"new"}
    assert in_flight > 0
    assert [state.name for state in s.fleet.states] == ["new"]
    assert s.backend.cancelled == 0


@on_jumping_clock
async def test_endpoints_that_join_dead_get_no_row_and_hold_none_up():
    """A fleet's hostfile often names nodes whose engines are not up yet."""
    dead = Failure("connect", "refused", passing=True)
    names = [f"dead{number}" for number in range(300)]
    s = setup(
        {"old": always(seconds=1.0)} | dict.fromkeys(names, always(dead, 0.001)),
        limit=4,
        probes=dict.fromkeys(names, lambda number: dead),
    )
    late = [state for state in s.states if state.name != "old"]
    s.fleet.leave(names)
    work = asyncio.ensure_future(s.run(40))
    await asyncio.sleep(2.5)
    s.fleet.join([EndpointState(one.endpoint, InFlightLimit(4, 4)) for one in late])
    await work
    assert len(s.recorder.replies) == 40
    assert {name for _, name, _ in s.backend.sent} == {"old"}


@on_jumping_clock
async def test_all_room_of_an_endpoint_that_joins_is_used_at_once():
    s = setup({"old": always(seconds=100.0), "new": always(seconds=100.0)}, limit=4)
    s.fleet.leave(["new"])
    s.submit(*range(20))
    new = next(state for state in s.states if state.name == "new")
    s.fleet.join([EndpointState(new.endpoint, InFlightLimit(4, 4), new.account)])
    await asyncio.sleep(50.0)
    assert s.backend.shares == {"old": 4, "new": 4}
    s.fleet.abandon_waiting()
    await s.fleet.wait_idle()


@on_jumping_clock
async def test_an_endpoint_that_comes_back_still_has_what_it_works_on():
    """It began with its whole limit, beside the rows that it had before it left."""
    s = setup({"old": always(seconds=10.0), "other": always(seconds=10.0)}, limit=4)
    s.submit(*range(20))
    await asyncio.sleep(1.0)
    old = s.states[0]
    s.fleet.leave(["old"])
    await asyncio.sleep(2.0)
    again = EndpointState(old.endpoint, InFlightLimit(4, 4), old.account)
    s.fleet.join([again])
    assert again in s.fleet.states
    assert old not in s.fleet.states
    await s.fleet.wait_idle()
    assert s.backend.peak["old"] == 4
    assert sorted(s.recorder.replies) == list(range(20))
    assert max(s.recorder.ended_at.values()) < 1035.0
    assert (again.in_flight, s.fleet.limit) == (0, 8)
