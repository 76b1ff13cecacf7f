"""Endpoints that answer, but badly; that take requests and answer none; that kill rows."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.endpoint import Capabilities
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import (
    BROKEN,
    FULL,
    GOOD,
    REFUSED,
    Answer,
    always,
    run_rows,
    setup,
    throttled,
)

NOT_FOUND = Failure("rejected", "HTTP 404: no such model", status=404)
NO_KEY = Failure("auth", "HTTP 401", status=401)
MOVED = Failure("rejected", "HTTP 302: a redirect", status=302)
NO_POST = Failure("rejected", "HTTP 405", status=405)
BEHIND_PROXY = Failure("auth", "HTTP 407", status=407)
NO_REASON = Failure("rejected", "HTTP 451", status=451)
CLOSED = Failure("connect", "closed the connection without an answer", passing=True)


SICK = [NOT_FOUND, NO_KEY, BROKEN, FULL, MOVED, NO_POST, BEHIND_PROXY, NO_REASON]


@pytest.mark.parametrize("sick", SICK, ids=lambda failure: failure.message)
def test_an_endpoint_that_fails_at_once_draws_few_calls_and_harms_no_row(sick):
    scripts = {"sick": always(sick, 0.01), "well": always(seconds=1.0)}
    s = run_rows(scripts, 400, limit=8)
    assert len(s.recorder.replies) == 400
    assert s.backend.shares["sick"] < 40
    assert any("sick answers only badly" in line for line in s.notices)


def test_where_every_endpoint_refuses_alike_the_rows_fail_with_its_words():
    s = run_rows({"a": always(NO_KEY, 0.01), "b": always(NO_KEY, 0.01)}, 20, limit=4)
    assert len(s.recorder.failures) == 20
    assert {failure.message for failure, _ in s.recorder.failures.values()} == {"HTTP 401"}


def test_one_row_that_no_endpoint_has_leaves_all_endpoints_at_work():
    def script(row, number):
        return Answer(NOT_FOUND if row == 5 else GOOD, 0.5)

    s = run_rows(dict.fromkeys("abcd", script), 200, limit=4)
    assert set(s.recorder.failures) == {5}
    assert len(s.recorder.replies) == 199
    assert s.notices == []


def test_an_endpoint_that_got_well_again_gets_its_share_again():
    def script(row, number):
        ill = asyncio.get_running_loop().time() < 1003.0
        return Answer(BROKEN, 0.01) if ill else Answer(GOOD, 1.0)

    s = run_rows({"a": script, "b": always()}, 600, limit=8)
    assert len(s.recorder.replies) == 600
    assert s.backend.shares["a"] > 150


@on_jumping_clock
async def test_a_rate_limit_of_one_account_holds_up_no_other():
    def script(row, number):
        return Answer(throttled(30.0), 0.1) if number < 4 else Answer(GOOD, 1.0)

    s = setup({"a": script, "b": always()}, limit=4, own_accounts=True)
    await s.run(60)
    end = max(s.recorder.ended_at.values())
    assert len(s.recorder.replies) == 60
    assert s.backend.shares["b"] >= 50
    assert end < 1050


def test_rows_of_a_row_that_kills_endpoints_cost_no_try_and_it_runs_last_and_alone():
    dead_until = {}

    def script_of(name):
        def script(row, number):
            now = asyncio.get_running_loop().time()
            if now < dead_until.get(name, 0.0):
                return Answer(REFUSED, 0.01)
            if row == 3:
                dead_until[name] = now + 4.0
                return Answer(CLOSED, 0.5)
            return Answer(GOOD, 0.5)

        return script

    def probe_of(name):
        return lambda number: (
            REFUSED
            if asyncio.get_running_loop().time() < dead_until.get(name, 0.0)
            else Capabilities()
        )

    s = run_rows(
        {name: script_of(name) for name in "ab"},
        60,
        limit=1,
        retry=RetryPolicy(retries=0),
        probes={name: probe_of(name) for name in "ab"},
    )
    assert len(s.recorder.replies) == 59
    failure, _ = s.recorder.failures[3]
    assert failure.message == "3 endpoints died while they worked on this row"
    times = s.backend.times(3)
    assert len(times) == 3
    assert times[2] >= max(at for row, at in s.recorder.ended_at.items() if row != 3)


def test_an_endpoint_that_hangs_gets_no_more_rows_and_once_dead_loses_its_own():
    gate = asyncio.Event()

    def silent(row, number):
        return Answer(GOOD, gate=gate)

    s = run_rows(
        {"hung": silent, "well": always(seconds=1.0)},
        800,
        ticks=True,
        limit=4,
        probes={"hung": lambda number: REFUSED},
    )
    assert len(s.recorder.replies) == 800
    assert s.backend.shares["hung"] == 4
    assert any("hung takes requests but has answered none" in line for line in s.notices)
    assert any(sample.endpoint == "hung" and not sample.healthy for sample in s.samples)


@pytest.mark.parametrize("limit", [1, 4])
def test_an_endpoint_that_was_frozen_for_longer_than_its_calls_may_take_works_again(limit):
    frozen_until = 1400.0

    def frozen(row, number):
        if asyncio.get_running_loop().time() < frozen_until:
            return Answer(Failure("timeout", "no whole answer", passing=True), 150.0)
        return Answer(GOOD, 1.0)

    s = run_rows(
        {"frozen": frozen, "well": always(seconds=1.0)}, 1500 * limit, ticks=True, limit=limit
    )
    assert len(s.recorder.replies) == 1500 * limit
    assert any("frozen takes requests but has answered none" in line for line in s.notices)
    early = [at for at, name, _ in s.backend.sent if name == "frozen" and at < frozen_until]
    assert len(early) <= limit + 3, "it is tried now and then, by one call"
    assert s.backend.shares["frozen"] > 100 * limit


def test_an_endpoint_that_answers_only_probes_is_tested_by_single_calls():
    broken = Failure("connect", "the server closed the connection", passing=True)

    s = run_rows({"bad": always(broken, 0.01), "good": always(seconds=1.0)}, 600, limit=32)
    assert len(s.recorder.replies) == 600
    assert s.backend.shares["bad"] < 64
