"""Endpoints that answer, but badly; that take requests and answer none; that kill rows."""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest

from bagent.backends.endpoint import Capabilities
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import (
    BROKEN,
    GOOD,
    REFUSED,
    Answer,
    always,
    run_rows,
    setup,
)

NOT_FOUND = Failure("rejected", "HTTP 404: no such model", status=404)
NO_KEY = Failure("auth", "HTTP 401", status=401)
MOVED = Failure("rejected", "HTTP 302: a redirect", status=302)
BLOCKED = Failure("auth", "HTTP 403: you have been blocked", status=403)
CERTIFICATE = Failure("connect", "certificate not trusted")
NO_MODEL_400 = Failure("rejected", "HTTP 400: model m does not exist", status=400)
WEB_PAGE = Failure("bad_response", "a web page instead of an answer", passing=True, status=200)
SLOW = Failure("timeout", "no whole answer within 5 s", passing=True)


def test_an_endpoint_that_fails_its_check_costs_the_rows_that_it_failed_no_attempt():
    failed = set()

    def once(row, number):
        bad = row < 8 and row not in failed
        failed.add(row)
        return Answer(BROKEN if bad else GOOD, 0.5)

    s = run_rows({"sick": always(BROKEN, 0.01), "well": once}, 20, retry=RetryPolicy(retries=1))
    assert s.backend.shares["sick"] >= 8
    assert s.recorder.failures == {}


LAST = [NOT_FOUND, NO_KEY, BROKEN, MOVED, CERTIFICATE, NO_MODEL_400, WEB_PAGE, SLOW]


@pytest.mark.parametrize("fault", LAST, ids=lambda failure: failure.message)
@on_jumping_clock
async def test_where_no_endpoint_serves_any_more_the_run_stops_and_fails_no_row(fault):
    endpoints, served = ("a", 60) if LAST.index(fault) % 2 else ("ab", 0)

    def script(row, number):
        lost = len(s.recorder.replies) >= served
        return Answer(fault, 0.01) if lost else Answer(GOOD, 0.5)

    s = setup(dict.fromkeys(endpoints, script), limit=32, retry=RetryPolicy(retries=0))
    error = StoppedEarly if fault.passing else NeedsPerson
    with pytest.raises(error, match=re.escape(fault.message)):
        await s.run(200)
    assert len(s.recorder.replies) >= served
    assert s.recorder.failures == {}


@pytest.mark.parametrize(
    ("refusal", "endpoints"), [(NOT_FOUND, "a"), (BLOCKED, "abc"), (BROKEN, "abcd")]
)
@on_jumping_clock
async def test_rows_that_every_endpoint_refuses_alike_fail_and_hold_no_endpoint_up(
    refusal, endpoints
):
    rows = 150 * len(endpoints)

    def script(row, number):
        return Answer(refusal, 0.01) if row % 10 == 5 and row < rows else Answer(GOOD, 0.5)

    s = setup(dict.fromkeys(endpoints, script), limit=16, retry=RetryPolicy(retries=2))
    await s.run(rows)
    assert sorted(s.recorder.failures) == list(range(5, rows, 10))
    assert len(s.recorder.replies) == rows - rows // 10
    assert s.notices == []
    ideal = 150 / 16 * 0.5
    seconds = asyncio.get_running_loop().time() - 1000
    assert seconds < 2 * ideal + (10 if refusal is BROKEN else 0)
    assert max(s.tries().values()) <= 5


def test_a_row_that_kills_endpoints_costs_others_no_try_and_runs_last_and_alone():
    dead_until = dict.fromkeys("ab", 0.0)

    def is_dead(name):
        return asyncio.get_running_loop().time() < dead_until[name]

    def script(name, row, number):
        if is_dead(name):
            return Answer(REFUSED, 0.01)
        if row != 3:
            return Answer(GOOD, 0.5)
        dead_until[name] = asyncio.get_running_loop().time() + 4.0
        return Answer(Failure("connect", "closed without an answer", passing=True), 0.5)

    def probe(name, number):
        return REFUSED if is_dead(name) else Capabilities()

    s = run_rows(
        {name: partial(script, name) for name in "ab"},
        60,
        limit=1,
        retry=RetryPolicy(retries=0),
        probes={name: partial(probe, name) for name in "ab"},
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


def test_an_endpoint_that_was_frozen_for_longer_than_its_calls_may_take_works_again():
    frozen_until = 1300.0

    def frozen(row, number):
        if asyncio.get_running_loop().time() < frozen_until:
            return Answer(Failure("timeout", "no whole answer", passing=True), 150.0)
        return Answer(GOOD, 1.0)

    s = run_rows({"frozen": frozen, "well": always(seconds=1.0)}, 900, ticks=True, limit=1)
    assert len(s.recorder.replies) == 900
    assert any("frozen takes requests but has answered none" in line for line in s.notices)
    early = [at for at, name, _ in s.backend.sent if name == "frozen" and at < frozen_until]
    assert len(early) <= 4, "it is tried now and then, by one call"
    assert s.backend.shares["frozen"] > 60
