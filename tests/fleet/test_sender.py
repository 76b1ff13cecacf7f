"""Requests without a task keep the promises of those with one."""

from __future__ import annotations

import asyncio

from bagent.backends.base import Exchange, SentCall
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import BROKEN, GOOD, REFUSED, Answer, ScriptedBackend, setup


class Direct(ScriptedBackend):
    """Sends every call without a task of the fleet."""

    def send_now(self, endpoint, request, timeouts, on_end):
        task = asyncio.ensure_future(self.send(endpoint, [request], timeouts))
        task.add_done_callback(lambda _: on_end())

        def exchange() -> Exchange:
            if task.cancelled():
                return Exchange([REFUSED], 0.0)
            return task.result()

        return SentCall(task.cancel, exchange)


def direct(script, **options):
    """A fleet over endpoints ``a`` and ``b`` that send without tasks."""
    scripts = {"a": script, "b": script}
    return setup(scripts, backend=Direct(scripts), **options)


@on_jumping_clock
async def test_every_request_is_recorded_and_failed_ones_are_sent_again():
    failed = set()

    def first_fails(row, number):
        if row in failed:
            return Answer(GOOD)
        failed.add(row)
        return Answer(BROKEN)

    s = direct(first_fails)
    await s.run(20)
    assert sorted(s.recorder.replies) == list(range(20))
    assert s.tries() == dict.fromkeys(range(20), 2)
    assert not s.fleet.open_rows


@on_jumping_clock
async def test_a_drain_waits_for_requests_then_ends_them_without_a_result():
    gate = asyncio.Event()
    s = direct(lambda row, number: Answer(gate=gate) if row else Answer(seconds=0.5))
    s.submit(0, 1)
    await asyncio.sleep(0.1)
    assert await s.fleet.drain(1.0) == 1
    assert (list(s.recorder.replies), s.recorder.failures) == ([0], {})
    assert [attempt.row for attempt in s.attempts] == [0]
    assert s.backend.cancelled == 1
    assert not s.fleet.open_rows


@on_jumping_clock
async def test_the_copy_of_a_late_call_that_is_not_needed_is_cancelled():
    seconds = iter((100.0, 2.0))
    s = direct(lambda row, number: Answer(seconds=next(seconds)), hedge=1.0)
    s.submit(0)
    await asyncio.sleep(5.0)
    s.fleet.tick()
    await s.fleet.wait_idle()
    assert (len(s.backend.sent), s.backend.cancelled) == (2, 1)
    assert asyncio.get_running_loop().time() < 1010.0
    assert list(s.recorder.replies) == [0]


@on_jumping_clock
async def test_a_bug_in_what_reads_an_answer_stops_the_fleet():
    def fault(call, reply):
        raise RuntimeError("a bug")

    s = direct(lambda row, number: Answer())
    s.recorder.on_reply = fault
    s.submit(0)
    assert isinstance(await asyncio.wait_for(s.fleet.stopped, 10.0), RuntimeError)


@on_jumping_clock
async def test_a_bug_in_what_reads_one_answer_loses_no_other_of_its_turn():
    def fault(call, reply):
        if call.row == 0:
            raise RuntimeError("a bug")

    s = direct(lambda row, number: Answer())
    s.recorder.on_reply = fault
    s.submit(0, 1, 2)
    assert isinstance(await asyncio.wait_for(s.fleet.stopped, 10.0), RuntimeError)
    assert await s.fleet.drain(0.0) == 0
    assert sorted(s.recorder.replies) == [1, 2]
    assert sorted(attempt.row for attempt in s.attempts) == [1, 2]


@on_jumping_clock
async def test_a_bug_in_the_sending_of_a_call_stops_the_fleet():
    class Faulty(Direct):
        def send_now(self, endpoint, request, timeouts, on_end):
            raise RuntimeError("a bug")

    scripts = {"a": lambda row, number: Answer()}
    s = setup(scripts, backend=Faulty(scripts))
    s.submit(0)
    assert isinstance(await asyncio.wait_for(s.fleet.stopped, 10.0), RuntimeError)
    assert await s.fleet.drain(0.0) == 0
