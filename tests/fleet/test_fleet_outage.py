"""The fleet while endpoints do not answer at all."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from bagent.backends.endpoint import Capabilities
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.scripted_fleet import GOOD, REFUSED, Answer, always, run_rows

NO_RETRIES = RetryPolicy(retries=0)
DOWN = {"a": lambda number: REFUSED}


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

    s = run_rows({"a": script}, 20, limit=2, retry=NO_RETRIES, probes=DOWN)
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
