"""Several processes' states as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bagent.observe import Distribution, ErrorGroup, Rates, RunCounters, StartCounts, TokenCount
from bagent.runs.context import RunOptions
from bagent.runs.parallel.progress_merge import StateMerger
from bagent.runs.parallel.workers import Worker, merged_state
from bagent.store.journal.codec import OK_CODE, code_of
from bagent.types import FeedStats, FleetStats

TIMEOUT = code_of("failed", "timeout")


def whole(states):
    return StateMerger({}).merge(states)


@pytest.fixture
def state():
    tally = RunCounters(lambda: 10.0)
    fleet = FleetStats(4, 8, 1, 0, 0.0, 2, 3)
    plain = tally.snapshot(fleet, FeedStats(10, 2, 50, 100, False))
    return replace(
        plain,
        this_start=StartCounts(8, 6, 2, 7, 1, {"ok": 6, "failed": 2}),
        changes={OK_CODE: 6, TIMEOUT: 2},
        skipped=2,
        remaining=9,
        to_do=10,
        overall=Rates(10.0, 0.8, None, 40.0),
        latency=Distribution(8, 100.0, 90.0, 200.0, 250.0),
        requests=9,
        eta_s=12.0,
    )


def group(count, pattern="timed out", endpoint="a"):
    return ErrorGroup(count, "timeout", pattern, None, endpoint, 1, 3, "r3", "in", 3, "timed out")


def test_the_size_of_the_run_is_unknown_until_every_worker_reports(state):
    options = RunOptions(job=Path("job.yaml"))
    workers = [Worker(options, state), Worker(options)]
    found = merged_state(workers, StateMerger({}))
    assert (found.total, found.remaining, found.fraction, found.eta_s) == (None, None, None, None)
    assert found.ok == 6
    workers[1].code = 2
    assert merged_state(workers, StateMerger({})).remaining == 9


def test_counts_are_sums(state):
    resent = replace(state, changes={OK_CODE: 8, TIMEOUT: -1})
    found = StateMerger({OK_CODE: 30, TIMEOUT: 5}).merge([state, resent])
    assert (found.ok, found.failed, found.skipped) == (44, 6, 4)
    assert (found.by_status, found.by_kind) == ({"ok": 44, "failed": 6}, {"timeout": 6})
    assert found.this_start == StartCounts(16, 12, 4, 14, 2, {"ok": 12, "failed": 4})
    assert found.requests == 18
    assert (found.total, found.remaining, found.to_do) == (68, 18, 20)
    assert found.fraction == pytest.approx(48 / 68)


def test_speeds_are_counts_over_the_time_of_the_run_also_after_a_worker_ended(state):
    now = 0.0
    merger = StateMerger({}, lambda: now)
    tokens = replace(state.tokens, completion=TokenCount(600, 0), prompt=TokenCount(None, 8))
    ended = replace(state, elapsed_s=20.0, tokens=tokens)
    now = 20.0
    found = merger.merge([ended, ended])
    assert (found.elapsed_s, found.overall.rows_per_s) == (20.0, 16 / 20)
    # One of them makes four more rows in forty seconds; the other has nothing to do.
    now = 60.0
    slow = replace(ended, elapsed_s=60.0, this_start=replace(state.this_start, done=12))
    found = merger.merge([ended, slow])
    assert (found.elapsed_s, found.overall.rows_per_s) == (60.0, 20 / 60)
    assert found.overall.completion_tokens_per_s == 1200 / 60
    assert found.overall.prompt_tokens_per_s is None
    assert found.recent.rows_per_s == pytest.approx(4 / found.recent.span_s)


def test_endpoints_are_the_same_ones_and_what_is_in_flight_adds_up(state):
    found = whole([state, replace(state, fleet=FleetStats(1, 8, 0, 2, 3.0, 1, 3))])
    assert (found.fleet.in_flight, found.fleet.limit, found.fleet.retrying) == (5, 16, 2)
    assert (found.fleet.endpoints_up, found.fleet.endpoints) == (2, 3)
    assert found.fleet.throttled_s == 3.0


def test_an_end_is_guessed_only_where_every_worker_guesses(state):
    assert whole([state, replace(state, eta_s=20.0)]).eta_s == 20.0
    found = whole([state, replace(state, eta_s=None, remaining=None, to_do=None)])
    assert (found.eta_s, found.total, found.to_do, found.fraction) == (None, None, None, None)


def test_latencies_are_weighed_by_their_rows(state):
    other = replace(state, latency=Distribution(24, 20.0, 10.0, 40.0, 900.0))
    found = whole([state, other, replace(state, latency=Distribution(0))]).latency
    assert found == Distribution(32, 40.0, 30.0, 80.0, 900.0)
    assert whole([replace(state, latency=Distribution(0))]).latency == Distribution(0)


def test_errors_of_one_pattern_are_one_group(state):
    one = replace(state, errors=(group(2), group(1, "refused")), errors_other=1)
    found = whole([one, replace(one, errors=(group(5, endpoint="b"),))])
    assert [(g.pattern, g.count, g.endpoint) for g in found.errors] == [
        ("timed out", 7, "a"),
        ("refused", 1, "a"),
    ]
    assert found.errors_other == 2
