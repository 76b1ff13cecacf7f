"""The fleet when all goes well, and when servers are full or fail."""

from __future__ import annotations

import asyncio

import pytest

from bagent.errors import WriteError
from bagent.fleet.fleet import STARTS_PER_TURN
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock, run_jumping
from support.scripted_fleet import (
    BROKEN,
    GOOD,
    LASTING,
    Answer,
    always,
    run_rows,
    setup,
    throttled,
)

# --- who gets what ------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "concurrency"), [(2, 1000), (6, 10)])
def test_equal_endpoints_get_equal_shares(count, concurrency):
    shares = run_rows(
        {f"e{i}": always() for i in range(count)}, 100 * count, limit=8, concurrency=concurrency
    ).backend.shares
    assert len(shares) == count
    assert all(95 <= share <= 105 for share in shares.values())


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
async def test_urgent_calls_go_before_new_rows():
    s = setup({"a": always()}, limit=1)
    s.submit(*range(5))
    s.request(s.call(100), urgent=True)
    s.request(s.call(101), urgent=True)
    await s.fleet.wait_idle()
    assert [row for _, _, row in s.backend.sent] == [0, 100, 101, 1, 2, 3, 4]


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


def test_a_row_that_keeps_failing_ends_after_its_tries():
    scripts = {"a": lambda row, number: Answer(BROKEN if row < 5 else GOOD)}
    s = run_rows(scripts, 100, retry=RetryPolicy(retries=3))
    assert [s.tries()[row] for row in range(5)] == [4] * 5
    assert len(s.recorder.replies) == 95
    failure, delivery = s.recorder.failures[0]
    assert (failure.kind, failure.message) == ("overloaded", "HTTP 500 (4 tries)")
    assert delivery.endpoint == "a"


def test_a_lasting_failure_ends_its_row_at_once_and_no_other():
    s = run_rows({"a": lambda row, number: Answer(LASTING if row == 3 else GOOD)}, 5)
    assert sorted(s.recorder.replies) == [0, 1, 2, 4]
    assert s.recorder.failures[3][0] == LASTING
    assert s.tries()[3] == 1


@on_jumping_clock
async def test_a_reply_that_is_no_good_is_asked_for_again_within_the_tries():
    s = setup({"a": always()}, retry=RetryPolicy(retries=2))
    bad = Failure("empty", "no text", passing=True, status=200)
    s.recorder.on_reply = lambda call, reply: bad if call.attempts < 3 or call.row else None
    await s.run(2)
    assert sorted(s.recorder.replies) == [0]
    assert s.recorder.failures[1][0].message == "no text (3 tries)"
    assert [a.error_kind for a in s.attempts if a.row == 0] == ["empty", "empty", None]


def test_a_row_that_waits_for_its_next_try_holds_no_slot():
    scripts = {"a": lambda row, number: Answer(BROKEN if row == 0 else GOOD, 1.0)}
    policy = RetryPolicy(retries=2, base=100.0, longest=100.0)
    s = run_rows(scripts, 50, limit=1, retry=policy)
    others = [s.recorder.ended_at[row] for row in range(1, 50)]
    assert max(others) <= 1000.0 + 52
    assert s.recorder.ended_at[0] > 1200


def test_a_closed_connection_costs_no_try_but_not_for_ever():
    stale = Failure("connect", "closed", passing=True)

    async def main(times):
        def script(row, number):
            return Answer(stale, 0.01, stale_connection=True) if number < times else Answer()

        s = setup({"a": script}, retry=RetryPolicy(retries=0))
        s.states[0].on_answer(2000.0)  # nobody doubts the endpoint
        await s.run(1)
        return s

    assert run_jumping(main(1)).recorder.replies
    assert run_jumping(main(1)).attempts[-1].try_ == 2
    assert run_jumping(main(2)).recorder.failures


def test_an_error_of_a_handler_stops_the_run():
    async def main():
        s = setup({"a": always()})

        def full_disk(call, reply):
            raise WriteError("the disk is full")

        s.recorder.on_reply = full_disk
        await s.run(3)

    with pytest.raises(WriteError, match="the disk is full"):
        run_jumping(main())


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
