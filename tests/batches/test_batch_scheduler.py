"""The ledger of batches; the next step, decided from records and a clock alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.backends.profile import Form
from bagent.batches.record import BatchRecord, Ledger, State, all_records, ledger_path, status_lines
from bagent.batches.scheduler import (
    FIRST_WAIT,
    MAX_LONE_REFUSALS,
    EnqueuedTokenQuota,
    InputState,
    ProviderBatchScheduler,
    SendingTimes,
    is_quota_refusal,
)

FED = InputState(over=True, open=False)


def record(number: int, state: State, **more: Any) -> BatchRecord:
    fields: dict[str, Any] = {"tokens": 100, "sent_at": 0.0, "group": "/v1/x m", **more}
    return BatchRecord(
        number, f"b-{number}", "all", rows=10, bytes=1, form=Form(), state=state, **fields
    )


def test_looks_grow_with_the_age_of_a_batch_up_to_a_minute() -> None:
    scheduler, one = ProviderBatchScheduler(), record(1, "waiting")
    for now, wait in ((0.0, 2.0), (400.0, 20.0), (80_000.0, 60.0)):
        scheduler.succeeded(one, now)
        assert scheduler.next([one], FED, 0.0, now).until == now + wait
        assert scheduler.next([one], FED, 0.0, now + wait).kind == "poll"


def test_pauses_after_failures_double_and_are_forgotten_after_a_success() -> None:
    scheduler, one = ProviderBatchScheduler(), record(1, "waiting")
    assert [scheduler.failed(one, 0.0) for _ in range(9)] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert scheduler.failed(one, 0.0, retry_after=7.0) == 7.0
    scheduler.succeeded(one, 0.0)
    assert scheduler.failed(one, 0.0) == 2.0


def test_a_refused_batch_waits_until_something_of_ours_has_ended() -> None:
    scheduler, one, two = ProviderBatchScheduler(), record(1, "waiting"), record(2, "sealed")
    scheduler.succeeded(one, 0.0)
    scheduler.refused(two, "token_limit_exceeded", 100, 0.0)
    assert scheduler.next([one, two], FED, 0.0, 1.0).kind == "wait"
    one.state = "done"
    assert scheduler.next([two], FED, 0.0, 2.0).kind == "send"


def test_the_quota_of_one_model_holds_no_other_model() -> None:
    scheduler, one, two = (
        ProviderBatchScheduler(),
        record(1, "sealed"),
        record(2, "sealed", group="/v1/x other"),
    )
    scheduler.refused(one, "token_limit_exceeded", 0, 0.0)
    assert scheduler.next([one, two], FED, 0.0, 1.0).record is two
    assert scheduler.next([one], FED, 0.0, 1.0).until == FIRST_WAIT


def test_a_batch_refused_alone_again_and_again_is_halved() -> None:
    quota, now = EnqueuedTokenQuota(), 0.0
    for _ in range(MAX_LONE_REFUSALS):
        assert not quota.too_large(1000)
        quota.refused("too many enqueued tokens", 1000, 0, now)
        now = quota.again_at
    assert quota.cap == 500
    assert quota.too_large(1000)


def test_the_budget_counts_what_is_out_and_breaks_when_nothing_is() -> None:
    scheduler = ProviderBatchScheduler(budget=10.0)
    out, next_one = record(1, "waiting", most_usd=6.0), record(2, "sealed", most_usd=5.0)
    scheduler.succeeded(out, 0.0)
    assert scheduler.next([out, next_one], FED, 0.0, 0.0).kind == "wait"
    assert scheduler.next([next_one], FED, 4.0, 0.0).kind == "send"
    assert scheduler.next([next_one], FED, 6.0, 0.0).kind == "over_budget"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("token_limit_exceeded Enqueued token limit reached for gpt-x", True),
        ("ServiceQuotaExceededException: too many jobs", True),
        ("Your request exceeded the quota of batch inference jobs", True),
        ("You exceeded your current quota, please check your plan", False),
        ("invalid_model The model does not exist", False),
    ],
)
def test_want_of_quota_is_told_from_want_of_money(words: str, expected: bool) -> None:
    assert is_quota_refusal(words) is expected


def test_single_calls_have_the_last_part_of_the_time_and_five_minutes_at_least() -> None:
    assert SendingTimes.of(0.0, 36_000.0).late_at == 30_600.0
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


# --- the ledger -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory with a folder for its journal."""
    (tmp_path / "journal").mkdir()
    return tmp_path


def test_the_last_line_of_a_number_counts_and_a_torn_one_does_not(folder: Path) -> None:
    ledger = Ledger(folder, "all", print)
    one, two = record(1, "sealed"), record(2, "sealed")
    ledger.save(one)
    ledger.save(two)
    one.state, one.batch_id = "waiting", "batch_7"
    ledger.save(one)
    with ledger_path(folder, "all").open("ab") as handle:
        handle.write(b'{"number":2,"label":"b-2","st')
    assert [found.state for found in all_records(folder, print)] == ["waiting", "sealed"]
    told: list[str] = []
    again = Ledger(folder, "all", told.append)
    assert [found.batch_id for found in again.live] == ["batch_7", None]
    assert again.next_number() == 3
    assert "unfinished last line" in told[0]
    again.save(two)
    assert len(ledger_path(folder, "all").read_bytes().splitlines()) == 4


def test_how_batches_stand_is_told_in_a_line_each(folder: Path) -> None:
    assert status_lines(folder, print) == []
    ledger = Ledger(folder, "all", print)
    one, two, three = (record(n, "sealed", sent_at=None) for n in (1, 2, 3))
    one.state = "done"
    two.state, two.batch_id, two.word, two.ended, two.failed = "waiting", "b7", "in_progress", 3, 1
    for found in (one, two, three):
        ledger.save(found)
    lines = status_lines(folder, print)
    assert lines == [
        "1 to be sent, 1 with the provider, 1 done",
        "batch 2, b7 in_progress, 3 of 10 rows, 1 of them failed",
        "batch 3, to be sent, 10 rows",
    ]
