"""Endpoints that do not answer, and what the end of a run means that nobody serves."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.health import Outage
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.retry import RetryPolicy
from bagent.fleet.state import OutagePatience
from bagent.types import Failure
from support.scripted_fleet import GOOD, REFUSED, Answer, always, run_rows

GONE = Failure("connect", "cannot connect to here: refused", passing=True)
BROKEN = Failure("overloaded", "HTTP 500: no", passing=True, status=500)
NO_MODEL = Failure("rejected", "HTTP 404: no such model", status=404)
NO_KEY = Failure("auth", "HTTP 401: who is it", status=401)
NO_MONEY = Failure("budget", "HTTP 402: pay first", status=402)


def out(*faults, served=True):
    states = [
        EndpointState(Endpoint(f"e{i}", "http://h/v1"), InFlightLimit(1, 1))
        for i in range(len(faults))
    ]
    for state, fault in zip(states, faults, strict=True):
        if served:
            state.on_success(0.0, 0.0)
        if fault is GONE:
            state.on_down(1.0, fault)
        else:
            state.open_circuit(fault)
    return states


@pytest.mark.parametrize(
    ("faults", "served", "seconds", "kind", "words"),
    [
        ([GONE, GONE], True, 120, StoppedEarly, "none of 2 endpoints has answered for 120 s: "),
        ([GONE], False, 120, StoppedEarly, "the endpoint has not answered for 120 s: cannot"),
        ([BROKEN], True, 120, StoppedEarly, "the endpoint has served nothing for 120 s: HTTP 500"),
        ([BROKEN], False, 10, StoppedEarly, "the endpoint has served nothing for 10 s: HTTP 500"),
        ([NO_MODEL], True, 30, NeedsPerson, "the endpoint has served nothing for 30 s: HTTP 404"),
        ([NO_KEY, NO_MODEL], False, 3, NeedsPerson, "all 2 endpoints have served nothing for 3 s"),
        ([NO_KEY, GONE], True, 120, StoppedEarly, "none of 2 endpoints has answered for 120 s"),
        (
            [NO_MONEY],
            True,
            0,
            NeedsPerson,
            "the account's quota or credit is spent: HTTP 402: pay first",
        ),
    ],
)
def test_a_run_that_nobody_serves_ends_as_the_failures_say(faults, served, seconds, kind, words):
    outage, states = Outage(OutagePatience()), out(*faults, served=served)
    if seconds:
        assert outage.check(states, 100.0) is None
        assert outage.check(states, 99.9 + seconds) is None
    reason = outage.check(states, 100.0 + seconds)
    assert type(reason) is kind
    assert str(reason).startswith(words)


def test_one_endpoint_that_works_is_no_outage():
    outage, states = Outage(OutagePatience(passing=10.0)), out(GONE, BROKEN)
    assert outage.check(states, 0.0) is None
    states[0].on_answer(5.0)
    assert outage.check(states, 50.0) is None
    states[0].on_down(51.0, GONE)
    assert outage.check(states, 51.0) is None
    assert outage.check(states, 61.0) is not None
    outage.end()
    assert outage.check(states, 90.0) is None


# --- a fleet while endpoints do not answer

NO_RETRIES = RetryPolicy(retries=0)


def until(end, before, after):
    """``before`` up to ``end`` on the loop's clock, then ``after``."""
    return lambda *_: before if asyncio.get_running_loop().time() < end else after


def test_one_lost_connection_of_a_busy_endpoint_stops_nothing_and_counts():
    def script(row, number):
        return Answer(REFUSED, 5.0) if row == 0 else Answer(GOOD, 0.1)

    s = run_rows({"a": script}, 200, limit=4, retry=NO_RETRIES)
    assert len(s.backend.probed) == 1
    assert list(s.recorder.failures) == [0]
    assert len(s.recorder.replies) == 199


def test_an_endpoint_that_comes_back_is_used_again():
    down = until(1060.0, Answer(REFUSED, 0.01), Answer(GOOD, 1.0))
    probes = {"a": until(1060.0, REFUSED, Capabilities())}
    s = run_rows({"a": down, "b": always()}, 400, limit=2, retry=NO_RETRIES, probes=probes)
    assert len(s.recorder.replies) == 400
    assert s.backend.shares["a"] > 50
    assert s.notices == ["a does not answer: connection refused", "a answers again"]
    probed = [at for at, _ in s.backend.probed]
    gaps = [round(later - at) for at, later in pairwise(probed)]
    assert gaps == [1, 2, 4, 8, 16, 30]


def test_an_answer_proves_an_endpoint_well_whatever_a_probe_said():
    def script(row, number):
        return Answer(REFUSED, 0.1) if number == 1 else Answer(GOOD, 3.0)

    s = run_rows({"a": script}, 20, limit=2, retry=NO_RETRIES, probes={"a": lambda number: REFUSED})
    assert len(s.recorder.replies) == 20
    assert len(s.backend.probed) <= 4


def test_a_server_that_died_after_it_had_answered_a_probe_costs_its_rows_no_try():
    cut = Failure("connect", "the connection was closed", passing=True)

    dying = {0: Answer(cut, 0.01), 2: Answer(cut, 0.05), 4: Answer(cut, 0.05)}
    answered = iter([Capabilities()])
    s = run_rows(
        {"a": lambda row, number: dying.get(row, Answer(GOOD, 1.0)), "b": always()},
        30,
        limit=3,
        retry=NO_RETRIES,
        probes={"a": lambda number: next(answered, REFUSED)},
    )
    assert len(s.recorder.replies) == 30
    assert s.backend.shares["a"] == 3
