"""A fleet over a provider that fails a share of all requests, whatever is sent to it."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import GOOD, Answer, setup, throttled

OVERLOADED = Failure("overloaded", "HTTP 529: Overloaded", True, 529, busy=True)
CUT = Failure("bad_response", "the stream broke off", True, 200)


def faulty(seed, told):
    """Refuses 20 % by 429 (``told`` to wait so long) and 10 % by 529, and breaks 30 % of the other
    answers off."""
    random = Random(seed)

    def script(row, number):
        draw = random.random()
        if draw < 0.2:
            return Answer(throttled(told), 0.01)
        if draw < 0.3:
            return Answer(OVERLOADED, 0.01)
        return Answer(CUT, 0.02) if random.random() < 0.3 else Answer(GOOD, 0.05)

    return script


@pytest.mark.parametrize(
    ("growing", "told"), [(False, 1.0), (True, None)], ids=["given-limit", "found-limit"]
)
@on_jumping_clock
async def test_rows_come_through_in_good_time_whatever_share_fails(growing, told):
    s = setup({"a": faulty(3, told)}, limit=32, growing=growing, retry=RetryPolicy(retries=25))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await s.run(500)
    seconds = loop.time() - began
    assert len(s.recorder.replies) == 500
    # Half of all tries fail; most of the time is that of the unluckiest row, alone at the end.
    assert seconds < 80
    early = sorted(s.recorder.ended_at.values())[449] - 1000
    assert early < 15, "nine of ten rows are there long before"
    assert s.states[0].limit.value >= 8
