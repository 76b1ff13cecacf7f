"""The fleet while endpoints do not answer at all."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from bagent.backends.endpoint import Capabilities
from bagent.errors import StoppedEarly
from bagent.fleet.retry import RetryPolicy
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import GOOD, REFUSED, Answer, always, run_rows, setup

NO_RETRIES = RetryPolicy(retries=0)
DOWN = {"a": lambda number: REFUSED}


def until(end, before, after):
    """``before`` up to ``end`` on the loop's clock, then ``after``."""
    return lambda *_: before if asyncio.get_running_loop().time() < end else after


def test_four_endpoints_that_each_die_and_come_back_in_turn_cost_no_row_and_no_try():
    deaths = {name: 1003 + 10 * place for place, name in enumerate("abcd")}  # it begins at 1000
    cut = Failure("connect", "the connection was closed", passing=True)

    def is_down(name, later=0):
        return 0 <= asyncio.get_running_loop().time() + later - deaths[name] < 6

    def script(name):
        def answer(row, number):
            if is_down(name):
                return Answer(REFUSED, 0.01)
            return Answer(cut if is_down(name, later=1) else GOOD)

        return answer

    def probe(name):
        return lambda number: REFUSED if is_down(name) else Capabilities()

    probes = {name: probe(name) for name in deaths}
    s = run_rows({name: script(name) for name in deaths}, 1500, retry=NO_RETRIES, probes=probes)
    assert len(s.recorder.replies) == 1500
    for name, death in deaths.items():
        assert any(at > death + 6 for at, to, _ in s.backend.sent if to == name), name
    assert sum("does not answer" in one for one in s.notices) == 4
    assert sum("answers again" in one for one in s.notices) == 4


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


@on_jumping_clock
async def test_a_run_stops_when_all_endpoints_are_gone_for_long():
    probes = {name: lambda number: REFUSED for name in "ab"}
    scripts = {name: always(REFUSED, 0.01) for name in "ab"}
    s = setup(scripts, retry=NO_RETRIES, probes=probes)
    feeding = asyncio.ensure_future(s.feed(10))
    reason = await s.fleet.stopped
    feeding.cancel()
    seconds = asyncio.get_running_loop().time() - 1000
    assert isinstance(reason, StoppedEarly)
    assert str(reason).startswith("none of 2 endpoints has answered for 12")
    assert "connection refused" in str(reason)
    assert 120 <= seconds <= 160
    assert s.recorder.ended_at == {}
    stats = s.fleet.stats()
    assert stats.ready + stats.retrying == 10


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
