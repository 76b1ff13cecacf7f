"""Calls that only one endpoint may have."""

from __future__ import annotations

import asyncio

from bagent.fleet.retry import RetryPolicy
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import REFUSED, Setup, always, setup, ticking


async def finish(s: Setup) -> None:
    """Tick as a session does until nothing is left."""

    ticker = asyncio.ensure_future(ticking(s))
    await s.fleet.wait_idle()
    ticker.cancel()


@on_jumping_clock
async def test_a_pinned_call_goes_to_its_endpoint_alone():
    s = setup({"a": always(), "b": always(), "c": always()}, limit=2)
    for row in range(30):
        s.request(s.call(row, pinned_to="abc"[row % 3]))
    await finish(s)
    sent = {row: name for _, name, row in s.backend.sent}
    assert sent == {row: "abc"[row % 3] for row in range(30)}


@on_jumping_clock
async def test_a_pinned_call_of_a_dead_endpoint_fails_after_its_retries_and_alone():
    scripts = {"dead": always(REFUSED, 0.01), "well": always()}
    probes = {"dead": lambda number: REFUSED}
    s = setup(scripts, retry=RetryPolicy(retries=2), probes=probes)
    s.submit(*range(4), pinned_to="dead")
    s.submit(*range(4, 8), pinned_to="well")
    s.submit(*range(8, 20))
    await finish(s)
    assert sorted(s.recorder.replies) == list(range(4, 20))
    assert sorted(s.recorder.failures) == [0, 1, 2, 3]
    failure = s.recorder.failures[0][0]
    assert failure.message == (
        "dead serves nothing, and no other endpoint may have this row (3 tries)"
    )
    assert all(name == "dead" for _, name, row in s.backend.sent if row < 4)
