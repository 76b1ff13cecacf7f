"""Rows that travel together."""

from __future__ import annotations

from random import Random

import pytest

from bagent.fleet.batch_size import BatchSizeRule, Supply, batch_size
from bagent.types import Failure
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import GOOD, Answer, always, run_rows, setup

AUTO = BatchSizeRule(single=False)


@on_jumping_clock
async def test_a_refused_group_is_halved_until_the_bad_row_stands_alone():
    def script(row, number):
        return Answer(GOOD)

    def result(rows):
        return Failure("rejected", "HTTP", status=413) if 13 in rows else GOOD

    s = setup({"a": script}, limit=64, group=BatchSizeRule(64, single=False))
    s.backend.limits, s.backend.by_rows = {"a": 64}, result
    await s.run(64, announced=True)
    assert set(s.recorder.failures) == {13}
    assert len(s.recorder.replies) == 63
    refused = sorted((len(rows) for _, rows in s.backend.groups if 13 in rows), reverse=True)
    assert refused == [64, 32, 16, 8, 4, 2, 1]
    assert s.tries()[13] == 7


def test_two_thousand_rows_on_twenty_endpoints_are_twenty_requests():
    names = [f"e{number}" for number in range(20)]
    s = run_rows(
        dict.fromkeys(names, always()),
        2000,
        announced=True,
        limit=200,
        group=BatchSizeRule(size=100, single=False),
        concurrency=100_000,
        lookahead=10_000,
        limits=dict.fromkeys(names, 1024),
    )
    assert [len(rows) for _, rows in s.backend.groups] == [100] * 20
    assert {attempt.group_size for attempt in s.attempts} == {100}
    assert len(s.recorder.replies) == 2000


def test_an_endpoint_gets_no_rows_before_its_group_limit_is_known():
    s = run_rows(
        {"a": always(), "b": always()},
        300,
        announced=True,
        limit=32,
        group=AUTO,
        limits={"a": None, "b": 1},
        learns={"a": 16},
    )
    assert s.backend.learned == [("a", 1)] or s.backend.learned[0][0] == "a"
    assert len(s.backend.learned) == 1
    assert {len(rows) for name, rows in s.backend.groups if name == "b"} == {1}
    assert max(len(rows) for name, rows in s.backend.groups if name == "a") == 16
    assert len(s.recorder.replies) == 300


def test_the_end_of_a_run_is_shared_out_in_small_groups():
    supply = Supply(ready=8, endpoints=4, more=False)
    assert batch_size(AUTO, 1024, 256, 256, supply, 16.0) == 2
    more = Supply(ready=8, endpoints=4, more=True)
    assert batch_size(AUTO, 1024, 256, 256, more, 16.0) == 8


@pytest.mark.parametrize(("count", "concurrency"), [(3, 100)])
@on_jumping_clock
async def test_groups_of_a_small_run_are_shared_alike_by_rows(count, concurrency):
    draw = Random(count)

    scripts = {f"e{i}": lambda *_: Answer(GOOD, draw.uniform(0.1, 0.3)) for i in range(count)}
    rule = BatchSizeRule(single=False)
    limits = {"limit": concurrency, "concurrency": concurrency}
    s = setup(scripts, group=rule, **limits)
    s.backend.limits = dict.fromkeys(scripts, 1024)
    await s.run(2000)
    fair = 2000 / count
    assert all(0.9 * fair < share < 1.1 * fair for share in s.backend.shares.values())
    assert s.backend.peak["all"] <= concurrency
