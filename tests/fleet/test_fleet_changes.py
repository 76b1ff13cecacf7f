"""Late calls, weights, and endpoints that come and go."""

from __future__ import annotations

import asyncio

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
