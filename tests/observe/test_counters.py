"""Speeds, ends and unknown values; counts of rows, tokens and costs are invariants of worlds."""

import math
import re

import duckdb
import pytest

from bagent.observe import progress
from bagent.observe.counters import estimate_to_do
from bagent.observe.formatting import rate
from bagent.observe.next_step import Advice
from bagent.observe.snapshot import CacheRate, Caches, LogHistogram, RunTotals, TokenCount
from bagent.observe.summary import EndInfo, summary_lines
from bagent.store.tables.schema import VIEWS
from bagent.store.totals import Totals
from bagent.types import EndpointSample


def test_what_nobody_told_is_unknown_and_not_zero(tally, make):
    s = make.snapshot(tally)
    assert (s.total, s.ok, s.failed, s.this_start.copied, s.elapsed_s) == (0, 0, 0, 0, 0.0)
    assert s.tokens.prompt == TokenCount(total=None, unknown=0)
    assert s.cost_usd is s.first_try_share is s.recent.completion_tokens_per_s is None
    assert (s.latency.count, s.latency.p50) == (0, None)
    for row, valid in enumerate([True, True, False, None]):
        times = {"latency_ms": 50.0 * row, "ttft_ms": 2.0 if row % 2 else None}
        cost = 0.0 if row else None
        tally.outcomes([make.outcome(row, first_try_valid=valid, cost_usd=cost, **times)])
    s = make.snapshot(tally)
    assert (s.cost_usd, s.cost_unknown) == (0.0, 1)
    assert (s.first_try_valid, s.first_try_total) == (2, 3), "rows without a schema do not count"
    assert s.first_try_share == pytest.approx(2 / 3)
    assert (s.latency.count, s.ttft.count, s.ttft.max) == (4, 2, 2.0)
    assert s.latency.p50 == pytest.approx(50, rel=0.01)


def test_unknown_token_counts_are_told_not_taken_as_zero(tally, make):
    counts = {"prompt_tokens": 5, "completion_tokens": 7, "cached_tokens": 0}
    for row, told in enumerate([counts, {}, {"prompt_tokens": 5}, {}]):
        tally.outcomes([make.outcome(row, **told)])
    tally.outcomes([make.outcome(4, "failed", error_kind="connect")])  # it has no answer to count
    tokens = make.snapshot(tally).tokens
    assert tokens.prompt == TokenCount(total=10, unknown=2)
    assert tokens.completion == TokenCount(total=7, unknown=3)
    assert tokens.cached == TokenCount(total=0, unknown=3)
    assert tokens.reasoning == TokenCount(total=None, unknown=4)
    assert tokens.without_counts == 3


def test_the_recent_speed_forgets_what_is_older_than_30_s(tally, make, clock):
    for row in range(60):
        tally.outcomes([make.outcome(row, prompt_tokens=10, completion_tokens=5)])
    assert make.snapshot(tally).overall.rows_per_s == 0
    clock.now += 20
    s = make.snapshot(tally)
    assert s.recent.rows_per_s == pytest.approx(3)
    assert s.recent.completion_tokens_per_s == pytest.approx(15)
    clock.now += 40
    s = make.snapshot(tally)
    assert (s.recent.rows_per_s, s.quiet_s) == (0, 60)
    assert make.snapshot(tally, make.fleet(in_flight=5)).eta_s == pytest.approx(5)
    assert s.overall.rows_per_s == pytest.approx(1)
    assert s.overall.prompt_tokens_per_s == pytest.approx(10)
    several = RunTotals(Totals(ok=10), several_stages=True)
    s = tally.snapshot(make.fleet(), make.feed(), several)
    assert progress.speed(s)[0].text == "1.00 results/s"


def test_requests_tries_retries_and_throttling_are_counted(tally, make):
    for _ in range(3):
        tally.attempts([make.attempt("g1", group_size=3, status_code=200)])
    refused = {"status_code": 429, "error_kind": "rate_limited"}
    for _ in range(2):
        tally.attempts([make.attempt("g2", group_size=2, **refused)])
    tally.attempts([make.attempt("g3", try_=2, error_kind="timeout")])
    s = make.snapshot(tally)
    assert (s.requests, s.tries, s.retries, s.throttled) == (3, 6, 1, 1)
    assert s.failed_tries == {"rate_limited": 2, "timeout": 1}
    s = make.snapshot(tally, make.fleet(requests=4, throttle_answers=2))
    assert (s.requests, s.throttled) == (4, 2), "the fleet counts those that belong to no row"


def test_the_end_is_reckoned_from_size_and_speed(tally, make, clock):
    for row in range(100):
        clock.now += 0.1
        tally.outcomes([make.outcome(row)])
    feed = make.feed(read=120, position=1200, size=4000, ended=False)
    s = make.snapshot(tally, make.fleet(in_flight=10, ready=8, retrying=2), feed)
    assert s.to_do == 20 + 280
    assert s.total == 400
    assert s.fraction == pytest.approx(0.25)
    assert s.eta_s == pytest.approx(30)
    assert not s.total_is_exact
    assert s.recent.rows_per_s == s.overall.rows_per_s == pytest.approx(10)
    pipe = make.snapshot(tally, feed=make.feed(size=None, ended=False, read=3))
    assert (pipe.eta_s, pipe.fraction) == (None, None)
    assert make.snapshot(tally, make.fleet(in_flight=1, throttled_s=45.0)).eta_s == 45
    dead = make.snapshot(tally, make.fleet(in_flight=1, endpoints_up=0))
    assert (dead.eta_s, progress.arrival(dead)) == (None, "ETA ?")


@pytest.mark.parametrize(("most", "total"), [(150, 150), (1000, 400), (110, 120)])
def test_a_limit_bounds_the_rows_that_are_expected(tally, make, most, total):
    for row in range(100):
        tally.outcomes([make.outcome(row)])
    feed = make.feed(read=120, position=1200, size=4000, ended=False, most=most)
    assert make.snapshot(tally, make.fleet(in_flight=20), feed).total == total


@pytest.mark.parametrize(("rows", "speed"), [(9, 9 / 50), (10, 10 / 29)])
def test_the_speed_that_is_shown_leads_to_the_eta(tally, make, clock, rows, speed):
    clock.now += 30
    for row in range(rows):
        tally.outcomes([make.outcome(row, completion_tokens=2)])
    clock.now += 20
    s = make.snapshot(tally, make.fleet(in_flight=6))
    assert s.eta_s == pytest.approx(6 / speed)
    shown = [phrase.text for phrase in progress.speed(s)]
    assert shown == [f"{rate(speed)} rows/s", f"{rate(2 * speed)} tok/s"]


def test_where_the_speed_changed_the_end_is_a_range(tally, make, clock):
    for row in range(100):
        clock.now += 1
        tally.outcomes([make.outcome(row)])
    steady = make.snapshot(tally, make.fleet(in_flight=60))
    assert steady.eta_range is None
    assert " to " not in progress.arrival(steady)
    for row in range(100, 400):
        clock.now += 0.1
        tally.outcomes([make.outcome(row)])
    s = make.snapshot(tally, make.fleet(in_flight=60))
    assert s.eta_range == pytest.approx((6, 60 / (400 / 130)), rel=0.02)
    assert progress.arrival(s) == "ETA 6.0s to 19s"


def test_the_cost_at_the_end_is_a_range_by_the_answers_so_far(tally, make):
    fleet = make.fleet(in_flight=300)
    for row in range(19):
        tally.outcomes([make.outcome(row, cost_usd=0.01)])
    assert make.snapshot(tally, fleet).cost_at_end is None
    for row in range(19, 100):
        tally.outcomes([make.outcome(row, cost_usd=0.01)])
    assert make.snapshot(tally, fleet).cost_at_end == pytest.approx((4.0, 4.0))
    for row in range(100, 200):
        tally.outcomes([make.outcome(row, cost_usd=0.03)])
    s = make.snapshot(tally, fleet)
    assert s.cost_usd == pytest.approx(4.0)
    # 300 more of 0.02 each, with a deviation of 0.01 in the sum and in the mean
    spread = 2 * 0.01 * (300 + 300**2 / 200) ** 0.5
    assert s.cost_at_end == pytest.approx((10 - spread, 10 + spread))
    assert "at the end" in progress.speed(s)[-1].text
    tally.outcomes([make.outcome(200, cost_usd=None)])
    assert make.snapshot(tally, fleet).cost_at_end is None


SIXTEEN = {"in_flight": 16, "ready": 16}


@pytest.mark.parametrize(
    ("done", "fleet", "feed", "to_do"),
    [
        (0, {}, {"size": None, "ended": False, "read": 5, "position": 5}, None),
        (0, {}, {"size": None, "ended": True, "read": 5, "position": 5}, 3),
        (0, {}, {"size": 100, "ended": False, "position": 0}, None),
        (0, {}, {"size": 100, "ended": False, "position": 100, "read": 10}, 3),
        # Rows finished earlier are not work, wherever they are in the input.
        (0, {}, {"size": 100, "ended": False, "position": 50, "read": 50, "expected": 20,
                 "skipped": 30, "finished": 40}, 60),

        (0, {}, {"size": 20, "ended": False, "position": 10, "read": 10, "skipped": 10}, 13),
        # A filter of the input scales what is left.
        (90, {"in_flight": 10, "ready": 0, "retrying": 0},
         {"read": 1000, "position": 50, "size": 100, "ended": False}, 110),
        # A small file is read as a whole before its first row is answered.
        (50, SIXTEEN, {"read": 800, "expected": 800, "position": 100, "size": 100, "ended": False},
         750),
        (50, SIXTEEN, {"read": 800, "expected": 1600, "position": 50, "size": 100, "ended": False},
         1550 + 1600),
        (690, {"in_flight": 4},
         {"read": 800, "skipped": 100, "expected": 700, "position": 100, "size": 100,
          "ended": True},
         10),
    ],
)  # fmt: skip
def test_what_is_left_is_unknown_only_where_the_size_is(make, done, fleet, feed, to_do):
    usual = {"in_flight": 1, "ready": 1, "retrying": 1}
    open_rows = sum((usual | fleet).values())
    assert estimate_to_do(done, open_rows, make.feed(**feed)) == to_do


@pytest.mark.parametrize("count", [1, 2, 10, 88])
def test_percentiles_of_the_summary_are_those_of_the_views(make, count):
    values = [float(1 + 7919 * n % 997) for n in range(count)]
    histogram = LogHistogram()
    histogram.add(values)
    [columns] = re.findall(r"quantile_(\w+)\(latency_ms", VIEWS["latency"])[:1]
    for share in (0.5, 0.9, 0.99):
        sql = f"select quantile_{columns}(x::double, {share}) from (select unnest({values}) as x)"
        [[exact]] = duckdb.sql(sql).fetchall()
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.011)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 6.0], (3, 3.0, 6.0)),
        ([], (0, None, None)),
        ([0.01, 1e9], (2, 500000000.005, 1e9)),
    ],
)
def test_count_mean_and_maximum_are_exact(values, expected):
    histogram = LogHistogram()
    histogram.add(values[:2])
    histogram.add(values[2:])
    found = histogram.distribution()
    assert (found.count, found.mean, found.max) == expected
    assert (found.p50 is None) == (histogram.quantile(0.5) is None) == (not values)


def test_impossible_durations_are_counted_at_the_ends():
    histogram = LogHistogram()
    histogram.add([math.nan, 5.0, -3.0, 0.0, math.inf, 1e300])
    assert histogram.count == 6
    assert histogram.quantile(0.5) == pytest.approx(0.01, rel=0.011)
    assert histogram.quantile(1.0) == pytest.approx(1e9, rel=0.011)
    assert math.isfinite(histogram.total)


def test_buckets_hold_every_value_under_their_bound():
    histogram = LogHistogram()
    values = [3.0, 40.0, 41.0, 500.0]
    histogram.add(values)
    buckets = histogram.buckets()
    assert sum(count for _, count in buckets) == 4
    for limit in (3.5, 50.0, 600.0):
        below = sum(count for bound, count in buckets if bound <= limit)
        assert below == sum(value <= limit for value in values)


def sample(endpoint, hits, queries):
    return EndpointSample(
        endpoint=endpoint,
        at=1.0,
        healthy=True,
        in_flight=1,
        limit=2,
        cache_hits=hits,
        cache_queries=queries,
    )


def test_only_what_grew_since_the_first_reading_counts():
    caches = Caches()
    for hits, queries in ((900, 1000), (930, 1100), (960, 1200)):
        caches.add(sample("a", hits, queries))
    caches.add(sample("b", 7, 8))
    caches.add(sample("c", None, 5))
    assert caches.share("a") == pytest.approx(60 / 200)
    assert caches.share("b") is caches.share("c") is None
    assert caches.rate() == CacheRate(60, 200, 1)
    caches.add(sample("a", 10, 40))  # a restarted engine goes on from zero
    assert caches.rate() == CacheRate(70, 240, 1)


def cache_line(make, tally, **fleet):
    lines = summary_lines(
        make.snapshot(tally, make.fleet(**fleet)), EndInfo(Advice(0, "r", "runs/r", ["bagent"]))
    )
    return [line.partition("cache")[2].strip() for line in lines if line.startswith("cache")]


def test_the_summary_tells_the_rate_by_answers_first_and_who_did_not_tell(make, tally):
    tally.outcomes([make.outcome(0, prompt_tokens=100, completion_tokens=1)])
    [line] = cache_line(make, tally)
    assert line == "unknown: the server does not tell what its prefix cache knew"
    tally.outcomes([make.outcome(0, prompt_tokens=100, completion_tokens=1, cached_tokens=20)])
    own = "20 % of 100 prompt tokens were known (1 answer did not say)"
    assert cache_line(make, tally) == [own]
    for hits in (0, 75):
        tally.sample(sample("a", hits, hits * 4 // 3))
        tally.sample(sample("b", 0, 0))  # never sent anything
    tally.attempts([make.attempt(endpoint="a")])
    # several stages count the same endpoint several times
    [line] = cache_line(make, tally, endpoints=4)
    assert line == f"{own}; 75 %, by the counters of 1 endpoint, of all its clients"
    tally.attempts([make.attempt(endpoint="c")])
    tally.attempts([make.attempt(endpoint="b")])  # it dies before it tells again
    assert cache_line(make, tally, endpoints=4)[0].endswith("clients; unknown of 2 more")


def test_counters_of_all_clients_are_named_where_they_differ_from_the_answers(make, tally):
    for hits, queries in ((0, 0), (75, 100)):
        tally.sample(sample("a", hits, queries))
    tally.outcomes([make.outcome(0, prompt_tokens=100, completion_tokens=1, cached_tokens=75)])
    assert cache_line(make, tally) == ["75 % of 100 prompt tokens were known"]
    tally.outcomes([make.outcome(0, prompt_tokens=100, completion_tokens=1, cached_tokens=5)])
    counters = "75 %, by the counters of 1 endpoint, of all its clients"
    assert cache_line(make, tally) == [f"40 % of 200 prompt tokens were known; {counters}"]


def test_counters_alone_say_that_they_count_all_clients(make, tally):
    for hits, queries in ((0, 0), (75, 100)):
        tally.sample(sample("a", hits, queries))
    tally.outcomes([make.outcome(0, prompt_tokens=100, completion_tokens=1)])
    text = "75 % of 100 prompt tokens were known, by the counters of 1 endpoint, of all its clients"
    assert cache_line(make, tally) == [text]
