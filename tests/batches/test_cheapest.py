"""``batching: {mode: cheapest}``: batches first, single calls for what is late, nothing twice."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import JobError, NeedsPerson
from bagent.job.load import JobRequest, load_job
from bagent.money.prices import Price
from bagent.text.durations import time_by
from support.batch_runs import BEGIN, Options, Singles, assert_ok, row, run_through
from support.batch_services import Course, OpenAIServer
from support.jobs import write_job

SLOW = Course(("in_progress",))
HOUR = 3600.0
LATE = 60.0
"""Seconds after which batches are late: few, so that a test polls little."""


def texts(run: Any) -> Counter[str]:
    return Counter(line["text"] for line in run.outcomes.values())


def test_the_time_is_a_duration_from_the_start_or_the_next_time_of_the_clock() -> None:
    start = datetime(2026, 11, 29, 22, 0).timestamp()
    assert time_by("18h", start) == start + 18 * HOUR
    assert time_by("07:30", start) == datetime(2026, 11, 30, 7, 30).timestamp()
    assert time_by("23:00", start) == start + HOUR
    for wrong in ("0s", "soon", "25:00", "7:3"):
        with pytest.raises(ValueError, match="is no"):
            time_by(wrong, start)


def test_a_late_batch_keeps_its_answers_and_the_others_are_sent_singly(tmp_path: Path) -> None:
    server = OpenAIServer(SLOW)
    options = Options(late_at=BEGIN + LATE, retries=0, tier_until=BEGIN + 2 * LATE)
    Singles.tiers.clear()
    run = run_through(tmp_path, server, 20, options)
    assert_ok(run, 20)
    assert texts(run) == {"fine": 10, "single": 10}
    assert (server.cancels, len(server.made)) == (1, 1)
    assert LATE <= run.waited < LATE + 60
    assert Singles.tiers == ["flex"] * 10
    assert any("is late: it is cancelled" in line for line in run.notices)


def test_a_run_that_begins_late_makes_no_batch_and_usual_calls(tmp_path: Path) -> None:
    server = OpenAIServer()
    Singles.tiers.clear()
    run = run_through(tmp_path, server, 12, Options(late_at=BEGIN - 1, size=5))
    assert texts(run) == {"single": 12}
    assert server.made == []
    assert Singles.tiers == [None] * 12


def test_a_line_counts_with_its_own_limit_in_the_cost_of_single_calls(tmp_path: Path) -> None:
    price = Price("openai", "m-1", 0.0, 1_000_000.0)

    def line(limit: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m-1", "messages": messages, **limit}
        return row(0, custom_id="a", method="POST", url="/v1/chat/completions", body=body)

    for limit, fits in (({"max_tokens": 50}, True), ({"max_tokens": 9000}, False), ({}, False)):
        options = Options(late_at=BEGIN, budget=100.0, single_price=price, own_bodies=True)
        run = run_through(tmp_path / str(limit), OpenAIServer(), [line(limit)], options)
        assert isinstance(run.error, NeedsPerson) != fits, run.error


KILLS: list[dict[str, Any]] = [
    *({"kill_save": (number, ("before", "after")[number // 2 % 2])} for number in range(2, 14, 2)),
    {"kill_row": 1},
    {"kill_row": 15},
]


@pytest.mark.parametrize("kill", KILLS)
def test_killed_at_any_change_nothing_is_twice_and_nothing_lost(
    tmp_path: Path, kill: dict[str, Any]
) -> None:
    server, usual = OpenAIServer(SLOW), {"late_at": BEGIN + LATE, "size": 10}
    run_through(tmp_path, server, 20, Options(**usual, **kill))
    run = run_through(tmp_path, server, 20, Options(**usual))
    assert_ok(run, 20)
    assert server.complaints == []


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"mode": "cheapest"}, "need each other"),
        ({"mode": "provider", "by": "18h"}, "need each other"),
        ({"mode": "cheapest", "by": "soon"}, "expected a duration like 18h or a time like 07:30"),
    ],
)
def test_a_job_says_both_the_mode_and_a_time(
    job_dir: Path, batching: dict[str, str], message: str
) -> None:
    path = write_job(job_dir, "http://x", 1, batching=batching)
    with pytest.raises(JobError, match=message):
        load_job(JobRequest(path=path, cwd=job_dir, env={}))
