"""The fleet over servers that are full."""

from __future__ import annotations

import asyncio

import pytest

from bagent.errors import StoppedEarly
from bagent.fleet.retry import RetryPolicy
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import FULL, GOOD, Answer, always, run_rows, setup, throttled


def windows(allowed, told=None, seconds=0.05):
    """Serves ``allowed`` requests in each second; refuses the rest with the wait ``told``."""
    counts = {}

    def script(row, number):
        now = asyncio.get_running_loop().time()
        counts[int(now)] = counts.get(int(now), 0) + 1
        if counts[int(now)] <= allowed:
            return Answer(GOOD, seconds)
        return Answer(throttled(told), 0.005)

    return script


@pytest.mark.parametrize("told", [None, 1.0])
def test_a_small_rate_limit_fails_no_row_and_costs_no_try(told):
    policy = RetryPolicy(retries=3)
    s = run_rows({"a": windows(5, told)}, 100, limit=50, concurrency=50, retry=policy)
    assert len(s.recorder.replies) == 100
    assert len(s.backend.sent) < 300
    assert any("too many requests" in notice for notice in s.notices)
    assert s.fleet.stats().throttle_answers > 0


def test_a_refusal_pauses_all_endpoints_of_the_account():
    def once(row, number):
        return Answer(throttled(60.0), 0.5) if number == 0 else Answer()

    s = run_rows({"a": once, "b": always()}, 40, limit=2)
    refused = 1000.5
    later = [at for at, _, _ in s.backend.sent if at > refused]
    assert min(later) >= refused + 60
    assert s.backend.shares["b"] > 0
    assert s.notices == ["a says too many requests; all wait 60.0 s"]
    assert len(s.recorder.replies) == 40


def test_a_full_server_costs_no_try_and_its_limit_is_cut():
    s = run_rows({"a": lambda row, n: Answer(FULL if n < 30 else GOOD, 0.1)}, 16, limit=16)
    assert len(s.recorder.replies) == 16
    assert s.states[0].limit.value < 16


def test_a_row_that_is_always_refused_while_others_succeed_fails_in_the_end():
    scripts = {"a": lambda row, number: Answer(FULL if row == 0 else GOOD, 1.0)}
    policy = RetryPolicy(retries=2, throttled=600.0)
    s = run_rows(scripts, 1500, limit=2, retry=policy)
    assert list(s.recorder.failures) == [0]
    assert s.recorder.failures[0][0].message == "HTTP 503: busy (refused for 600 s)"
    assert 600 <= s.recorder.ended_at[0] - 1000 < 700


@pytest.mark.parametrize("refusal", [throttled(), FULL])
@on_jumping_clock
async def test_a_run_of_which_nothing_gets_through_stops_and_fails_no_row(refusal):
    s = setup({"a": always(refusal, 0.01)}, retry=RetryPolicy(retries=3))
    with pytest.raises(StoppedEarly, match="nothing else got through"):
        await s.run(3)
    assert s.recorder.ended_at == {}
    assert asyncio.get_running_loop().time() - 1000 < 200


def test_a_fixed_rate_holds_over_all_endpoints():
    scripts = {name: always(seconds=0.1) for name in "abc"}
    s = run_rows(scripts, 240, per_minute=120, lookahead=500)
    times = [at for at, _, _ in s.backend.sent]
    assert all(later - at >= 60 - 1e-6 for at, later in zip(times, times[120:], strict=False))
    assert times[-1] - times[0] == pytest.approx(119.5, rel=0.01)
