"""Requests without a task keep the promises of those with one."""

from __future__ import annotations

import asyncio

from bagent.backends.base import Exchange, SentCall
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import REFUSED, Answer, ScriptedBackend, setup


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
