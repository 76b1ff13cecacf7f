"""Several processes' states as one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bagent.observe import Distribution, ErrorGroup, Rates, Tally
from bagent.runs.merging import merged
from bagent.types import FeedStats, FleetStats


@pytest.fixture
def state():
    tally = Tally(lambda: 10.0)
    fleet = FleetStats(4, 8, 1, 0, 0.0, 2, 3)
    plain = tally.snapshot(fleet, FeedStats(10, 2, 50, 100, False))
    return replace(
        plain,
        done=8,
        ok=6,
        failed=2,
        skipped=2,
        remaining=10,
        by_status={"ok": 6, "failed": 2},
        by_kind={"timeout": 2},
        overall=Rates(10.0, 0.8, None, 40.0),
        latency=Distribution(8, 100.0, 90.0, 200.0, 250.0),
        requests=9,
        eta_s=12.0,
    )


def group(count, pattern="timed out", endpoint="a"):
    return ErrorGroup(count, "timeout", pattern, None, endpoint, 1, 3, "r3", "in", 3, "timed out")


def test_counts_and_speeds_are_sums(state):
    found = merged([state, replace(state, ok=5, failed=3, by_status={"ok": 5, "truncated": 3})])
    assert (found.done, found.ok, found.failed, found.skipped) == (16, 11, 5, 4)
    assert found.by_status == {"ok": 11, "failed": 2, "truncated": 3}
    assert found.by_kind == {"timeout": 4}
    assert found.requests == 18
    assert found.overall.rows_per_s == 1.6
    assert found.overall.completion_tokens_per_s == 80.0
    assert found.overall.prompt_tokens_per_s is None
    assert found.remaining == 20
    assert found.fraction == pytest.approx(20 / 40)


def test_endpoints_are_the_same_ones_and_what_is_in_flight_adds_up(state):
    found = merged([state, replace(state, fleet=FleetStats(1, 8, 0, 2, 3.0, 1, 3))])
    assert (found.fleet.in_flight, found.fleet.limit, found.fleet.retrying) == (5, 16, 2)
    assert (found.fleet.endpoints_up, found.fleet.endpoints) == (2, 3)
    assert found.fleet.throttled_s == 3.0


def test_the_slowest_reader_is_where_the_run_is(state):
    ahead = replace(state, feed=FeedStats(30, 0, 100, 100, True))
    found = merged([ahead, state])
    assert (found.feed.read, found.feed.position, found.feed.ended) == (40, 50, False)
    assert merged([ahead, ahead]).feed.ended


def test_an_end_is_guessed_only_where_every_worker_guesses(state):
    assert merged([state, replace(state, eta_s=20.0)]).eta_s == 20.0
    found = merged([state, replace(state, eta_s=None, remaining=None)])
    assert (found.eta_s, found.remaining, found.fraction) == (None, None, None)


def test_latencies_are_weighed_by_their_rows(state):
    other = replace(state, latency=Distribution(24, 20.0, 10.0, 40.0, 900.0))
    found = merged([state, other, replace(state, latency=Distribution(0))]).latency
    assert found == Distribution(32, 40.0, 30.0, 80.0, 900.0)
    assert merged([replace(state, latency=Distribution(0))]).latency == Distribution(0)


def test_errors_of_one_pattern_are_one_group(state):
    one = replace(state, errors=(group(2), group(1, "refused")), errors_other=1)
    found = merged([one, replace(one, errors=(group(5, endpoint="b"),))])
    assert [(g.pattern, g.count, g.endpoint) for g in found.errors] == [
        ("timed out", 7, "a"),
        ("refused", 1, "a"),
    ]
    assert found.errors_other == 2
