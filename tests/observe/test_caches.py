"""What prefix caches knew, from counters that run on from before the run."""

from __future__ import annotations

import pytest

from bagent.observe.next_step import Advice
from bagent.observe.snapshot import CacheRate, Caches
from bagent.observe.summary import EndInfo, summary_lines
from bagent.types import EndpointSample


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
