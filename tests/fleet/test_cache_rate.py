"""The cache hit rate of an endpoint: what was told, and nothing that was not."""

from __future__ import annotations

import pytest

from bagent.backends.engine_metrics import EngineLoad
from bagent.fleet.cache_rate import CacheRate
from bagent.types import Usage


def seen(*counters: tuple[int | None, int | None]) -> CacheRate:
    """The rate after looks at an engine with these (hits, queries)."""
    rate = CacheRate()
    for at, (hits, queries) in enumerate(counters):
        rate.saw(EngineLoad(at=float(at), cache_hits=hits, cache_queries=queries))
    return rate


def test_only_what_came_since_the_first_look_counts() -> None:
    rate = seen((1000, 1000), (1010, 1100), (1060, 1200))
    assert (rate.hits, rate.queries) == (60, 200)
    assert rate.value == rate.of_engine == pytest.approx(0.3)


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    rate = seen((900, 1000), (910, 1100), (20, 80), (40, 100))
    assert (rate.hits, rate.queries) == (10 + 40, 100 + 100)


def test_a_restart_that_only_one_of_the_counters_shows_is_one_for_both() -> None:
    rate = seen((900, 1000), (50, 1200))
    assert (rate.hits, rate.queries) == (50, 1200)


@pytest.mark.parametrize(
    "looks", [[], [(5, 10)], [(None, 10), (None, 20)], [(5, None), (7, None)], [(5, 10), (5, 10)]]
)
def test_what_the_engine_did_not_tell_is_unknown(
    looks: list[tuple[int | None, int | None]],
) -> None:
    assert seen(*looks).value is None


def test_a_look_that_told_nothing_leaves_the_count_as_it_is() -> None:
    assert seen((0, 0), (None, None), (5, 20)).value == 0.25


def test_the_answers_own_counts_go_before_the_engines() -> None:
    rate = seen((0, 0), (10, 100))
    rate.answered(Usage(prompt=100, cached=64))
    rate.answered(Usage(prompt=100, cached=0))
    assert (rate.value, rate.of_answers, rate.of_engine) == (0.32, 0.32, 0.1)


def test_answers_without_cached_tokens_do_not_count_as_misses() -> None:
    rate = CacheRate()
    rate.answered(Usage(prompt=100))
    rate.answered(Usage(cached=3))
    assert rate.value is None
    rate.answered(Usage(prompt=100, cached=0))
    assert rate.value == 0.0
