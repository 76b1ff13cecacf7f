"""Time limits of rows, and the end of a run."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bagent.backends.base import Exchange, SentCall, Timeouts
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import (
    BROKEN,
    FULL,
    GOOD,
    LASTING,
    REFUSED,
    Answer,
    ScriptedBackend,
    always,
    run_rows,
    setup,
    throttled,
)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(throttled(), 0.01),
        Answer(throttled(3600.0), 0.01),
        Answer(FULL, 0.01),
        Answer(BROKEN, 0.01),
    ],
)
def test_the_limit_of_a_row_ends_it_whatever_it_waits_for(answer):
    s = run_rows(
        {"a": lambda row, number: answer},
        20,
        limit=20,
        row_seconds=10.0,
        retry=RetryPolicy(retries=10**6),
    )
    assert sorted(s.recorder.failures) == list(range(20))
    assert s.recorder.ended_at[0] <= 1010.3
    lived = [s.recorder.ended_at[row] - s.recorder.started_at[row] for row in range(20)]
    assert max(lived) <= 10.3
    assert any("time limit" in failure.message for failure, _ in s.recorder.failures.values())


@on_jumping_clock
async def test_the_limit_of_a_row_ends_it_while_no_endpoint_has_room():
    gate = asyncio.Event()
    s = setup({"a": lambda row, number: Answer(gate=gate)}, limit=1)
    s.request(s.call(0))
    s.request(s.call(1, deadline=1005.0))
    await asyncio.sleep(10)
    gate.set()
    await s.fleet.wait_idle()
    failure, delivery = s.recorder.failures[1]
    assert (failure.kind, delivery) == ("timeout", None)
    assert "limits.row" in failure.message
    assert 1005 <= s.recorder.ended_at[1] <= 1005.5
    assert list(s.recorder.replies) == [0]


@on_jumping_clock
async def test_a_drain_ends_rows_whose_requests_it_cancels_and_those_that_wait():
    ended = []

    async def row(call):
        try:
            await s.fleet.request(call)
        except asyncio.CancelledError:
            ended.append(call.row)
            raise

    s = setup({"a": lambda row, number: Answer(gate=asyncio.Event())}, limit=1)
    s.fleet.spawn(row(s.call(0)))
    s.fleet.spawn(row(s.call(1)))
    await asyncio.sleep(0.1)
    assert await s.fleet.drain(1.0) == 1
    await asyncio.sleep(0)
    assert sorted(ended) == [0, 1]
    assert not s.fleet.stopped.done()


@on_jumping_clock
async def test_a_request_gets_no_more_time_than_its_row_has_left():
    s = setup({"a": always()}, timeouts=Timeouts(total=60.0), limit=1)
    for deadline in (None, 1500.0, 1010.0, 1002.04):
        s.request(s.call(len(s.backend.sent), deadline=deadline))
        await s.fleet.wait_idle()
    assert [timeouts.total for timeouts in s.backend.timeouts] == [60.0, 60.0, 8.0, 0.1]
    assert msgspec.structs.replace(s.backend.timeouts[2], total=60.0) == Timeouts(total=60.0)


@on_jumping_clock
async def test_rows_with_little_time_left_go_apart_so_that_they_end_nobody_else_s_request():
    s = setup(
        {"a": always()},
        timeouts=Timeouts(total=60.0),
        limit=8,
        group=BatchSizeRule(8, single=False),
    )
    s.backend.limits = {"a": 8}
    s.fleet.expect(True)
    for row, deadline in enumerate([1050.0, 1003.0, 1049.0, 1050.0, 1002.0, 1050.0]):
        s.request(s.call(row, deadline=deadline))
    s.fleet.expect(False)
    await s.fleet.wait_idle()
    assert [rows for _, rows in s.backend.groups] == [[1, 4], [0, 2, 3, 5]]
    assert [timeouts.total for timeouts in s.backend.timeouts] == [2.0, 49.0]
    assert all(attempt.try_ == 1 for attempt in s.attempts) and len(s.attempts) == 6


# --- the end of a run -----------------------------------------------------------------------------


class DirectBackend(ScriptedBackend):
    """Sends every call without a task of the fleet."""

    def send_now(self, endpoint, request, timeouts, on_end):
        task = asyncio.ensure_future(self.send(endpoint, [request], timeouts))
        task.add_done_callback(lambda _: on_end())
        return SentCall(task.cancel, task.result)


@pytest.mark.parametrize("kind", [ScriptedBackend, DirectBackend])
@on_jumping_clock
async def test_draining_waits_for_what_is_in_flight_and_gives_up_what_is_late(kind):
    scripts = {"a": lambda row, number: Answer(seconds=1.0 if row < 2 else 100.0)}
    s = setup(scripts, backend=kind(scripts), limit=6)
    s.submit(*range(10))
    late = await s.fleet.drain(5.0)
    at, stats = asyncio.get_running_loop().time(), s.fleet.stats()
    assert (late, at) == (4, 1005.0)
    assert sorted(s.recorder.replies) == [0, 1]
    assert s.recorder.failures == {}
    assert (len(s.backend.sent), s.backend.cancelled) == (6, 4)
    assert stats.in_flight == 0


@on_jumping_clock
async def test_after_draining_began_nothing_is_sent_and_passing_failures_end_no_row():
    results = [BROKEN, LASTING, REFUSED, FULL, GOOD]
    s = setup({"a": lambda row, number: Answer(results[row])}, limit=5)
    s.submit(*range(5))
    s.recorder.on_reply = lambda call, reply: s.request(s.call(5), urgent=True)
    await s.fleet.drain(60.0)
    s.request(s.call(6))
    await asyncio.sleep(600)
    assert list(s.recorder.failures) == [1]
    assert sorted(s.recorder.ended_at) == [1, 4]
    assert len(s.backend.sent) == 5


@on_jumping_clock
async def test_a_group_that_is_withheld_goes_again_at_once_and_takes_no_share_of_the_rate():
    s = setup({"a": always()}, limits={"a": 2}, per_minute=60.0)
    send, withheld = s.backend.send, []

    async def withhold_first(endpoint, group, timeouts):
        if withheld:
            return await send(endpoint, group, timeouts)
        withheld.extend(group)
        failure = Failure("overloaded", "takes no such group any more", passing=True)
        return Exchange([failure] * len(group), sent=0.0, withheld=True, connected=False)

    s.backend.send = withhold_first
    began = asyncio.get_running_loop().time()
    s.submit(0, 1)
    await s.fleet.wait_idle()
    assert withheld and [at - began for at in s.backend.times(0)] == [pytest.approx(0.0, abs=0.01)]
    assert sorted(s.recorder.replies) == [0, 1]
