"""``batching: {mode: cheapest}``: batches first, single calls for what is late, nothing twice."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.profile import Form
from bagent.batches.record import BatchRecord, State
from bagent.batches.scheduler import InputState, ProviderBatchScheduler, SendingTimes
from bagent.errors import JobError, NeedsPerson
from bagent.job.load import JobRequest, load_job
from bagent.money.prices import Price
from bagent.text.durations import time_by
from support.batch_runs import BEGIN, Options, Singles, row, run_through, statuses
from support.batch_services import Course, OpenAIServer
from support.jobs import write_job

FED = InputState(over=True, open=False)
SLOW = Course(("in_progress",))
HOUR = 3600.0
LATE = 60.0
"""Seconds after which batches are late: few, so that a test polls little."""


def record(number: int, state: State, **more: Any) -> BatchRecord:
    fields: dict[str, Any] = {"tokens": 100, "sent_at": 0.0, "group": "/v1/x m", **more}
    return BatchRecord(
        number, f"b-{number}", "all", rows=10, bytes=1, form=Form(), state=state, **fields
    )


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


def test_single_calls_have_the_last_part_of_the_time_and_five_minutes_at_least() -> None:
    assert SendingTimes.of(0.0, 10 * HOUR).late_at == 8.5 * HOUR
    assert SendingTimes.of(0.0, 1000.0).late_at == 700.0
    assert SendingTimes.of(0.0, 60.0).late_at == 0.0


def test_late_batches_are_cancelled_before_rows_are_sent_singly() -> None:
    scheduler = ProviderBatchScheduler(late_at=100.0)
    waiting, sealed = record(1, "waiting"), record(2, "sealed")
    assert scheduler.next([sealed, waiting], FED, 0.0, 99.0).kind == "send"
    scheduler.failed(record(3, "sending"), 90.0, 600.0)
    assert scheduler.next([record(3, "sending")], FED, 0.0, 99.0).until == 100.0
    step = scheduler.next([sealed, waiting], FED, 0.0, 100.0)
    assert (step.kind, step.record) == ("cancel", waiting)
    waiting.cancelled_at = 100.0
    step = scheduler.next([sealed, waiting], FED, 0.0, 100.0)
    assert (step.kind, step.record) == ("singly", sealed)
    assert scheduler.next([waiting], FED, 0.0, 100.0).kind == "poll"


def test_what_ends_in_time_goes_through_batches_alone(tmp_path: Path) -> None:
    server = OpenAIServer()
    run = run_through(tmp_path, server, 20, Options(late_at=BEGIN + LATE))
    assert run.error is None
    assert texts(run) == {"fine": 20}
    assert server.cancels == 0


def test_a_late_batch_keeps_its_answers_and_the_others_are_sent_singly(tmp_path: Path) -> None:
    server = OpenAIServer(SLOW)
    options = Options(late_at=BEGIN + LATE, retries=0, tier_until=BEGIN + 2 * LATE)
    Singles.tiers.clear()
    run = run_through(tmp_path, server, 20, options)
    assert run.error is None
    assert set(statuses(run).values()) == {"ok"}
    assert texts(run) == {"fine": 10, "single": 10}
    assert len(run.lines) == 20
    assert (server.cancels, len(server.made)) == (1, 1)
    assert LATE <= run.waited < LATE + 60
    assert Singles.tiers == ["flex"] * 10
    assert any("is late: it is cancelled" in line for line in run.notices)


def test_after_the_time_of_the_cheaper_tier_calls_are_usual_ones(tmp_path: Path) -> None:
    Singles.tiers.clear()
    run = run_through(tmp_path, OpenAIServer(), 6, Options(late_at=BEGIN))
    assert texts(run) == {"single": 6}
    assert Singles.tiers == [None] * 6


def test_a_run_that_begins_late_makes_no_batch(tmp_path: Path) -> None:
    server = OpenAIServer()
    run = run_through(tmp_path, server, 12, Options(late_at=BEGIN - 1, size=5))
    assert texts(run) == {"single": 12}
    assert server.made == []


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


def test_single_calls_never_pass_the_budget(tmp_path: Path) -> None:
    price = Price("openai", "m-1", 1.0, 2.0)
    options = Options(late_at=BEGIN, budget=0.0001, price=price, single_price=price)
    run = run_through(tmp_path, OpenAIServer(), 20, options)
    assert isinstance(run.error, NeedsPerson)
    assert run.outcomes == {}


@pytest.mark.parametrize(
    ("number", "when"),
    [(number, ("before", "after")[number // 2 % 2]) for number in range(2, 14, 2)],
)
def test_killed_at_any_change_nothing_is_twice_and_nothing_lost(
    tmp_path: Path, number: int, when: str
) -> None:
    server = OpenAIServer(SLOW)
    options = Options(late_at=BEGIN + LATE, kill_save=(number, when), size=10)
    run_through(tmp_path, server, 20, options)
    run = run_through(tmp_path, server, 20, Options(late_at=BEGIN + LATE, size=10))
    assert run.error is None, run.error
    assert len(run.outcomes) == len(run.lines) == 20
    assert set(statuses(run).values()) == {"ok"}
    assert server.complaints == []


@pytest.mark.parametrize("row", [1, 15])
def test_killed_between_rows_no_answer_is_written_twice(tmp_path: Path, row: int) -> None:
    server = OpenAIServer(SLOW)
    run_through(tmp_path, server, 20, Options(late_at=BEGIN + LATE, kill_row=row))
    run = run_through(tmp_path, server, 20, Options(late_at=BEGIN + LATE))
    assert run.error is None, run.error
    assert len(run.outcomes) == len(run.lines) == 20


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
