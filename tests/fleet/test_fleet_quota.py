"""A fleet over an account whose provider tells its limits with every answer."""

from __future__ import annotations

import asyncio

from bagent.backends.http.rate_limit_headers import Allowance, RateLimits
from bagent.fleet.batch_size import BatchSizeRule
from support.scripted_fleet import GOOD, Answer, run_rows, throttled

PER_MINUTE = 120
NOW = 1_796_000_000.0


def bucket():
    """One account behind all endpoints: serves what is in its bucket, and tells what is left."""
    state = {"left": float(PER_MINUTE), "at": None}

    def script(row, number):
        now = asyncio.get_running_loop().time()
        state["at"] = now if state["at"] is None else state["at"]
        state["left"] = min(PER_MINUTE, state["left"] + (now - state["at"]) * PER_MINUTE / 60)
        state["at"] = now
        if state["left"] < 1:
            return Answer(throttled(), 0.01, limits=limits(0))
        state["left"] -= 1
        return Answer(GOOD, 0.5, limits=limits(state["left"]))

    def limits(left):
        reset = (PER_MINUTE - left) * 60 / PER_MINUTE
        # Heads come when the request does, 0.5 s before the end: on the test's own clock that is
        # not to be seen, so they are dated half a second back.
        return RateLimits(NOW - 0.5, Allowance(PER_MINUTE, int(left), reset))

    return script


def test_no_row_is_refused_by_a_provider_that_tells_what_it_allows(monkeypatch):
    monkeypatch.setattr("bagent.fleet.exchanges.unix", lambda: NOW)
    script = bucket()
    s = run_rows({"a": script, "b": script}, 300, limit=8, hosted=True)
    assert len(s.recorder.replies) == 300
    assert len(s.backend.sent) == 300, "none was sent twice"
    assert s.fleet.stats().throttle_answers == 0
    assert sum("allows 120 requests a minute" in notice for notice in s.notices) == 1
    times = [at for at, _, _ in s.backend.sent]
    assert times[-1] - times[0] < 1.1 * 300 / PER_MINUTE * 60
    assert min(s.backend.shares.values()) > 100


def test_a_request_of_several_rows_raises_the_rate_once_whether_tokens_count_or_not():
    def script(row, number):
        return Answer(throttled() if number == 1 else GOOD, 0.5)

    rates = []
    for hosted in (False, True):
        s = run_rows(
            {"a": script}, 16, hosted=hosted, limits={"a": 4}, group=BatchSizeRule(4, single=False)
        )
        assert len(s.recorder.replies) == 16
        rates.append(s.account.rate)
    assert rates[0] == rates[1] is not None
