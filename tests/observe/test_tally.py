from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.observe.estimates import estimate_to_do
from bagent.observe.snapshot import Snapshot, StageCount, TokenCount
from bagent.observe.tally import Tally


def test_a_fresh_tally_knows_nothing_and_says_so(tally: Tally, make: Any) -> None:
    s = make.snapshot(tally)
    assert (s.total, s.ok, s.failed, s.this_start.copied, s.elapsed_s) == (0, 0, 0, 0, 0.0)
    assert s.tokens.prompt == TokenCount(total=None, unknown=0)
    assert s.cost_usd is None
    assert s.first_try_share is None
    assert (s.latency.count, s.latency.p50) == (0, None)
    assert s.recent.completion_tokens_per_s is None


def test_rows_are_counted_by_status_and_kind(tally: Tally, make: Any) -> None:
    tally.outcome(make.outcome(0))
    tally.outcome(make.outcome(1, "failed", error_kind="timeout"))
    tally.outcome(make.outcome(2, "failed", error_kind="auth"))
    tally.outcome(make.outcome(3, "invalid", error_kind="schema"))
    tally.outcome(make.outcome(4, "truncated", error_kind="truncated"))
    tally.outcome(make.outcome(5, "truncated"))
    s = make.snapshot(tally)
    assert (s.this_start.done, s.ok, s.accepted, s.failed) == (6, 1, 1, 4)
    assert s.by_status == {"ok": 1, "failed": 2, "invalid": 1, "truncated": 2}
    assert s.by_kind == {"timeout": 1, "auth": 1, "schema": 1, "truncated": 1}
    assert sum(group.count for group in s.errors) == 4


def test_rows_are_counted_by_stage(tally: Tally, make: Any) -> None:
    for row in range(300):
        tally.outcome(make.outcome(row, stage="plan"))
    tally.outcome(make.outcome(0, stage="work"))
    tally.outcome(make.outcome(1, "failed", stage="work", error_kind="timeout"))
    s = make.snapshot(tally)
    assert s.by_stage == {"plan": StageCount(300, 0), "work": StageCount(1, 1)}


def test_unknown_token_counts_are_told_not_taken_as_zero(tally: Tally, make: Any) -> None:
    tally.outcome(make.outcome(0, prompt_tokens=5, completion_tokens=7, cached_tokens=0))
    tally.outcome(make.outcome(1))
    tally.outcome(make.outcome(2, prompt_tokens=5, completion_tokens=None))
    tally.outcome(make.outcome(3))
    tokens = make.snapshot(tally).tokens
    assert tokens.prompt == TokenCount(total=10, unknown=2)
    assert tokens.completion == TokenCount(total=7, unknown=3)
    assert tokens.cached == TokenCount(total=0, unknown=3)
    assert tokens.reasoning == TokenCount(total=None, unknown=4)
    assert tokens.without_counts == 3


def test_a_row_without_an_answer_is_no_answer_without_counts(tally: Tally, make: Any) -> None:
    tally.outcome(make.outcome(0, "failed", error_kind="connect"))
    tally.outcome(make.outcome(1, "bad_input", error_kind="bad_input", attempts=0))
    assert make.snapshot(tally).tokens.without_counts == 0


def test_tokens_of_a_failed_row_that_were_paid_are_counted(tally: Tally, make: Any) -> None:
    row = make.outcome(
        0, "failed", error_kind="max_turns", prompt_tokens=9, completion_tokens=3, cost_usd=0.5
    )
    tally.outcome(row)
    s = make.snapshot(tally)
    assert (s.tokens.prompt.total, s.tokens.completion.total, s.cost_usd) == (9, 3, 0.5)


def test_a_copied_answer_costs_nothing_again(tally: Tally, make: Any) -> None:
    paid = {"prompt_tokens": 10, "completion_tokens": 2, "cost_usd": 0.25, "latency_ms": 5.0}
    tally.outcome(make.outcome(0, **paid))
    tally.outcome(make.outcome(1, copied_from="0" * 16, **paid))
    s = make.snapshot(tally)
    assert (s.this_start.done, s.ok, s.this_start.sent, s.this_start.copied) == (2, 2, 1, 1)
    assert (s.tokens.prompt.total, s.cost_usd, s.latency.count) == (10, 0.25, 1)


def test_cost_is_unknown_until_a_price_is_known(tally: Tally, make: Any) -> None:
    tally.outcome(make.outcome(0))
    s = make.snapshot(tally)
    assert (s.cost_usd, s.cost_unknown) == (None, 1)
    tally.outcome(make.outcome(1, cost_usd=0.0))
    s = make.snapshot(tally)
    assert (s.cost_usd, s.cost_unknown) == (0.0, 1)


def test_rows_without_a_schema_do_not_count_as_first_try(tally: Tally, make: Any) -> None:
    for row, valid in enumerate([True, True, False, None]):
        tally.outcome(make.outcome(row, first_try_valid=valid))
    s = make.snapshot(tally)
    assert (s.first_try_valid, s.first_try_total) == (2, 3)
    assert s.first_try_share == pytest.approx(2 / 3)


def test_latency_and_first_token_time_are_summed_up(tally: Tally, make: Any) -> None:
    for ms in range(1, 101):
        tally.outcome(make.outcome(ms, latency_ms=float(ms), ttft_ms=2.0 if ms % 2 else None))
    s = make.snapshot(tally)
    assert s.latency.count == 100
    assert s.latency.p50 == pytest.approx(50, rel=0.01)
    assert s.latency.p99 == pytest.approx(99, rel=0.01)
    assert (s.ttft.count, s.ttft.max) == (50, 2.0)


def test_the_recent_speed_forgets_what_is_older_than_30_s(
    tally: Tally, make: Any, clock: Any
) -> None:
    for row in range(60):
        tally.outcome(make.outcome(row, prompt_tokens=10, completion_tokens=5))
    clock.now += 20
    s = make.snapshot(tally)
    assert s.recent.rows_per_s == pytest.approx(3)
    assert s.recent.completion_tokens_per_s == pytest.approx(15)
    clock.now += 40
    s = make.snapshot(tally)
    assert s.recent.rows_per_s == 0
    assert s.overall.rows_per_s == pytest.approx(1)
    assert s.overall.prompt_tokens_per_s == pytest.approx(10)


def test_a_steady_speed_is_shown_as_it_is(tally: Tally, make: Any, clock: Any) -> None:
    for row in range(1000):
        clock.now += 0.1
        tally.outcome(make.outcome(row))
    s = make.snapshot(tally)
    assert s.recent.rows_per_s == pytest.approx(10, rel=0.02)
    assert 29 <= s.recent.span_s <= 30
    assert s.overall.rows_per_s == pytest.approx(10)


def test_speed_at_the_first_instant_is_no_error(tally: Tally, make: Any) -> None:
    tally.outcome(make.outcome(0))
    assert make.snapshot(tally).overall.rows_per_s == 0


def test_how_long_nothing_has_finished_is_known(tally: Tally, make: Any, clock: Any) -> None:
    clock.now += 5
    tally.outcome(make.outcome(0))
    clock.now += 90
    assert make.snapshot(tally).quiet_s == 90


def test_requests_tries_retries_and_throttling_are_counted(tally: Tally, make: Any) -> None:
    for _ in range(3):
        tally.attempt(make.attempt("g1", group_size=3, status_code=200))
    for _ in range(2):
        tally.attempt(make.attempt("g2", group_size=2, status_code=429, error_kind="rate_limited"))
    tally.attempt(make.attempt("g3", try_=2, error_kind="timeout"))
    s = make.snapshot(tally)
    assert (s.requests, s.tries, s.retries, s.throttled) == (3, 6, 1, 1)
    assert s.failed_tries == {"rate_limited": 2, "timeout": 1}


def test_requests_that_belong_to_no_row_are_taken_from_the_fleet(tally: Tally, make: Any) -> None:
    tally.attempt(make.attempt("g1"))
    s = make.snapshot(tally, make.fleet(requests=4, throttle_answers=2))
    assert (s.requests, s.throttled) == (4, 2)


def test_the_end_is_reckoned_from_size_and_speed(tally: Tally, make: Any, clock: Any) -> None:
    for row in range(100):
        clock.now += 0.1
        tally.outcome(make.outcome(row))
    feed = make.feed(read=120, position=1200, size=4000, ended=False)
    s = make.snapshot(tally, make.fleet(in_flight=10, ready=8, retrying=2), feed)
    assert s.to_do == 20 + 280
    assert s.total == 400
    assert s.fraction == pytest.approx(0.25)
    assert s.eta_s == pytest.approx(30)
    assert not s.total_is_exact


def test_rows_finished_earlier_count_as_progress_but_not_as_speed(
    tally: Tally, make: Any, clock: Any
) -> None:
    for row in range(100):
        clock.now += 0.1
        tally.outcome(make.outcome(row))
    feed = make.feed(read=600, skipped=500, position=600, size=1000, ended=False)
    s = make.snapshot(tally, feed=feed, earlier={"ok": 480, "schema": 20})
    assert (s.skipped, s.remaining, s.total) == (500, 400, 1000)
    assert s.fraction == pytest.approx(0.6)
    assert s.eta_s == pytest.approx(40)


def test_a_filter_of_the_input_scales_what_is_left(make: Any) -> None:
    feed = make.feed(read=1000, position=50, size=100, ended=False)
    assert estimate_to_do(90, make.fleet(in_flight=10), feed) == 10 + 100


def test_rows_that_were_read_and_not_begun_are_left_to_do(make: Any) -> None:
    """A small file is read as a whole before its first row is answered."""
    begun = make.fleet(in_flight=16, ready=16)
    feed = make.feed(read=800, wanted=800, position=100, size=100, ended=False)
    assert estimate_to_do(50, begun, feed) == 750
    half = make.feed(read=800, wanted=1600, position=50, size=100, ended=False)
    assert estimate_to_do(50, begun, half) == 1550 + 1600
    last = make.feed(read=800, skipped=100, wanted=700, position=100, size=100, ended=True)
    assert estimate_to_do(690, make.fleet(in_flight=4), last) == 10


@pytest.mark.parametrize(
    ("feed", "remaining"),
    [
        ({"size": None, "ended": False, "read": 5, "position": 5}, None),
        ({"size": None, "ended": True, "read": 5, "position": 5}, 3),
        ({"size": 100, "ended": False, "position": 0}, None),
        ({"size": 100, "ended": False, "position": 100, "read": 10}, 3),
        ({"size": 100, "ended": False, "position": 120, "read": 10}, 3),
        ({"size": 20, "ended": False, "position": 10, "read": 10, "skipped": 10}, 13),
    ],
)
def test_what_is_left_is_unknown_only_where_the_size_is(
    make: Any, feed: dict[str, Any], remaining: int | None
) -> None:
    assert estimate_to_do(0, make.fleet(in_flight=1, ready=1, retrying=1), make.feed(**feed)) == (
        remaining
    )


def test_no_time_of_arrival_without_size_or_speed(tally: Tally, make: Any, clock: Any) -> None:
    pipe = make.feed(size=None, ended=False, read=3)
    assert make.snapshot(tally, feed=pipe).eta_s is None
    assert make.snapshot(tally, feed=pipe).fraction is None
    clock.now += 10
    assert make.snapshot(tally, make.fleet(in_flight=3)).eta_s is None
    assert make.snapshot(tally).eta_s == 0


def test_a_pause_of_the_account_is_part_of_the_time_left(
    tally: Tally, make: Any, clock: Any
) -> None:
    clock.now += 1
    tally.outcome(make.outcome(0))
    assert make.snapshot(tally, make.fleet(in_flight=1, throttled_s=45.0)).eta_s == 45


def test_a_stalled_run_is_reckoned_with_its_overall_speed(
    tally: Tally, make: Any, clock: Any
) -> None:
    for row in range(60):
        tally.outcome(make.outcome(row))
    clock.now += 60
    assert make.snapshot(tally, make.fleet(in_flight=5)).eta_s == pytest.approx(5)


def test_a_snapshot_goes_through_json_unchanged(tally: Tally, make: Any, clock: Any) -> None:
    clock.now += 1
    tally.outcome(make.outcome(0, prompt_tokens=3, completion_tokens=1, latency_ms=8.0))
    tally.outcome(make.outcome(1, "failed", id="\udc00", error_kind="auth", error="\ud800 \x1b"))
    s = make.snapshot(tally)
    assert msgspec.json.decode(msgspec.json.encode(s), type=Snapshot) == s


def test_finished_rows_are_not_held_in_memory(tally: Tally, make: Any) -> None:
    for row in range(10_000):
        tally.outcome(make.outcome(row))
    assert len(tally._pending) < 256
    assert make.snapshot(tally).this_start.done == 10_000
    assert tally._pending == []
