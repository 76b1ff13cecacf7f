"""The fleet when all goes well, and when servers are full or fail."""

from __future__ import annotations

import asyncio

import pytest

from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import STARTS_PER_TURN
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import (
    BROKEN,
    GOOD,
    Answer,
    ScriptedBackend,
    always,
    run_rows,
    setup,
    throttled,
)

# --- who gets what ------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [16, 1000])
@on_jumping_clock
async def test_a_slow_endpoint_takes_less_and_holds_nobody(concurrency):
    scripts = {"fast": always(seconds=1.0), "slow": always(seconds=10.0)}
    s = setup(scripts, limit=16, concurrency=concurrency)
    started = asyncio.get_running_loop().time()
    await s.run(500)
    seconds = asyncio.get_running_loop().time() - started
    assert s.backend.shares["slow"] < 0.15 * 500
    width = min(concurrency, 32) / 2
    assert seconds < 1.2 * 500 / (1.1 * width) + 10


@pytest.mark.parametrize(("concurrency", "limit"), [(5, 100), (100, 5)])
def test_neither_the_whole_nor_an_endpoints_limit_is_ever_passed(concurrency, limit):
    scripts = {
        name: lambda row, number: Answer(BROKEN if row % 7 == 0 else GOOD, 0.1 + row % 3)
        for name in ("a", "b", "c")
    }
    peak = run_rows(scripts, 200, limit=limit, concurrency=concurrency).backend.peak
    assert peak["all"] == min(concurrency, 3 * limit)
    assert max(peak[name] for name in "abc") <= limit


@on_jumping_clock
async def test_a_reader_is_held_back_by_what_sleeps():
    s = setup({"a": always(throttled(3600.0), 0.01)}, limit=4, lookahead=10)
    feeding = asyncio.ensure_future(s.feed(1000))
    highest = 0
    for _ in range(500):
        await asyncio.sleep(1)
        stats = s.fleet.stats()
        highest = max(highest, stats.ready + stats.retrying + stats.in_flight)
    feeding.cancel()
    s.fleet.abandon_waiting()
    assert 4 <= highest <= 15


@on_jumping_clock
async def test_deliveries_and_attempts_tell_where_and_when():
    scripts = {"a": lambda row, number: Answer(BROKEN if number == 0 else GOOD, 2.0)}
    s = setup(scripts, limit=1)
    s.request(s.call(0))
    waiting = s.call(1)
    s.request(waiting)
    await s.fleet.wait_idle()
    delivery = s.recorder.replies[1]
    assert (delivery.endpoint, delivery.sent, delivery.done) == ("a", 1002.0, 1004.0)
    assert waiting.waited_ms == pytest.approx(2000.0)
    first, second, third = s.attempts
    assert (first.row, first.try_, first.status_code, first.error_kind) == (0, 1, 500, "overloaded")
    assert (second.row, second.try_, second.error_kind) == (1, 1, None)
    assert (third.row, third.try_, third.status_code) == (0, 2, 200)
    # Another start, or another part of the run, sends to the same endpoint.
    again = setup(scripts, limit=1)
    again.request(again.call(0))
    await again.fleet.wait_idle()
    assert len({attempt.group for attempt in (*s.attempts, *again.attempts)}) == 5


# --- what fails ---------------------------------------------------------------------------------


@on_jumping_clock
async def test_a_reply_that_is_no_good_is_asked_for_again_within_the_tries():
    s = setup({"a": always()}, retry=RetryPolicy(retries=2))
    bad = Failure("empty", "no text", passing=True, status=200)
    s.recorder.on_reply = lambda call, reply: bad if call.attempts < 3 or call.row else None
    await s.run(2)
    assert sorted(s.recorder.replies) == [0]
    assert s.recorder.failures[1][0].message == "no text (3 tries)"
    assert [a.error_kind for a in s.attempts if a.row == 0] == ["empty", "empty", None]


@on_jumping_clock
async def test_thousands_of_requests_do_not_start_in_one_turn_of_the_loop():
    s = setup({f"e{n}": always() for n in range(100)}, limit=8)
    s.submit(*range(600))
    first = sum(state.in_flight for state in s.states)
    began = asyncio.get_running_loop().time()
    while sum(state.in_flight for state in s.states) < 600:
        await asyncio.sleep(0)
    at_once = asyncio.get_running_loop().time() - began
    await s.fleet.wait_idle()
    assert first == STARTS_PER_TURN
    assert at_once == 0
    assert len(s.recorder.replies) == 600


def test_a_row_that_waits_for_its_next_try_holds_no_slot():
    scripts = {"a": lambda row, number: Answer(BROKEN if row == 0 else GOOD, 1.0)}
    policy = RetryPolicy(retries=2, base=100.0, longest=100.0)
    s = run_rows(scripts, 50, limit=1, concurrency=1, retry=policy)
    assert max(s.recorder.ended_at[row] for row in range(1, 50)) <= 1052
    assert s.recorder.ended_at[0] > 1200


@on_jumping_clock
async def test_a_bug_in_reading_one_answer_stops_the_fleet_and_loses_no_other():
    def fault(call, reply):
        if call.row == 0:
            raise RuntimeError("a bug")

    s = setup({"a": always()})
    s.recorder.on_reply = fault
    s.submit(0, 1, 2)
    assert isinstance(await asyncio.wait_for(s.fleet.stopped, 10.0), RuntimeError)
    assert await s.fleet.drain(0.0) == 0
    assert sorted(s.recorder.replies) == [1, 2]
    assert sorted(attempt.row for attempt in s.attempts) == [1, 2]


@on_jumping_clock
async def test_a_bug_in_the_sending_of_a_call_stops_the_fleet():
    class Faulty(ScriptedBackend):
        def send_now(self, endpoint, request, timeouts, on_end):
            raise RuntimeError("a bug")

    s = setup({"a": always()}, backend=Faulty({"a": always()}))
    s.submit(0)
    assert isinstance(await asyncio.wait_for(s.fleet.stopped, 10.0), RuntimeError)
    assert await s.fleet.drain(0.0) == 0


# --- late calls, weights, and endpoints that join -------------------------------------------------


@on_jumping_clock
async def test_a_straggler_at_the_end_is_sent_a_second_time_elsewhere():
    sent = []

    def script(row, number):
        sent.append(row)
        return Answer(GOOD, 100.0 if sent.count(19) == 1 and row == 19 else 1.0)

    s = setup({"a": script, "b": script}, limit=8, hedge=0.0)
    await s.run(20, ticks=True)
    assert asyncio.get_running_loop().time() < 1015
    assert len(s.recorder.replies) == 20
    assert sorted(name for _, name, row in s.backend.sent if row == 19) == ["a", "b"]
    assert s.backend.cancelled == 1
    assert s.tries()[19] == 2


@pytest.mark.parametrize("concurrency", [1, 8, 40])
def test_weights_are_honoured_whatever_is_out(concurrency):
    scripts = {"light": always(), "heavy": always()}
    s = run_rows(scripts, 400, limit=64, concurrency=concurrency, weights={"heavy": 3.0})
    assert 280 <= s.backend.shares["heavy"] <= 320


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
