"""The fleet over servers that are full."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bagent.errors import StoppedEarly
from bagent.fleet.retry import RetryPolicy
from support.scripted_fleet import FULL, GOOD, Answer, always, run_rows, throttled


def windows(allowed, period=1.0, *, told=False, seconds=0.05):
    """Serves ``allowed`` requests in each window; refuses the rest, and tells when it is over."""
    counts = Counter()

    def script(row, number):
        now = asyncio.get_running_loop().time()
        counts[now // period] += 1
        if counts[now // period] <= allowed:
            return Answer(GOOD, seconds)
        return Answer(throttled(period - now % period if told else None), 0.005)

    return script


@pytest.mark.parametrize(
    ("allowed", "period", "rows", "concurrency", "how"),
    [
        (3, 60.0, 30, 50, {"told": True}),
        (500, 60.0, 2000, 200, {}),
        (5, 1.0, 100, 50, {}),
        (50, 1.0, 1000, 300, {"seconds": 5.0}),
        (1, 10.0, 50, 50, {}),
    ],
)
def test_any_rate_limit_is_used_well_and_fails_no_row(allowed, period, rows, concurrency, how):
    script = windows(allowed, period, **how)
    s = run_rows(
        {"a": script}, rows, limit=1000, concurrency=concurrency, retry=RetryPolicy(retries=3)
    )
    assert len(s.recorder.replies) == rows
    assert len(s.backend.sent) < 2.5 * rows + concurrency
    ideal = rows / allowed * period + how.get("seconds", 0.05)
    assert max(s.recorder.ended_at.values()) - 1000 < 1.6 * ideal + 10
    assert any("too many requests" in notice for notice in s.notices)
    assert s.fleet.stats().throttle_answers > 0


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
def test_a_run_of_which_nothing_gets_through_stops_and_fails_no_row(refusal):
    with pytest.raises(StoppedEarly, match="nothing else got through"):
        run_rows({"a": always(refusal, 0.01)}, 3, retry=RetryPolicy(retries=3))


@pytest.mark.parametrize("per_minute", [1, 120, 600])
def test_a_fixed_rate_holds_over_all_endpoints_in_any_minute(per_minute):
    scripts = {name: always(seconds=0.1) for name in "abc"}
    s = run_rows(scripts, 2 * per_minute + 3, per_minute=per_minute, lookahead=5000)
    times = [at for at, _, _ in s.backend.sent]
    minute_later = times[per_minute:]
    assert all(b - a >= 60 - 1e-6 for a, b in zip(times, minute_later, strict=False))
    assert times[-1] - times[0] == pytest.approx((len(times) - 1) * 60 / per_minute, rel=0.01)
