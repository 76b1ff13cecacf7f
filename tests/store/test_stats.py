"""How much of the prompts the prefix caches knew, from the samples of a run's endpoints."""

from __future__ import annotations

import msgspec
import pytest

from bagent.store import totals
from bagent.store.totals import cache_share
from bagent.types import EndpointSample


def sample(endpoint, at, hits=None, queries=None):
    return EndpointSample(
        endpoint=endpoint,
        at=at,
        healthy=True,
        in_flight=1,
        limit=2,
        cache_hits=hits,
        cache_queries=queries,
    )


def write(run_dir, part, samples, rest=b""):
    (run_dir / "journal").mkdir(exist_ok=True)
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in samples)
    (run_dir / "journal" / f"endpoints-{part}-000001.jsonl").write_bytes(lines + rest)


def test_the_growth_of_all_endpoints_counts_not_what_was_before(tmp_path):
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("b", 1, 0, 0), sample("a", 2)])
    assert cache_share(tmp_path) is None
    more = [sample("a", 3, 950, 1100), sample("b", 4, 30, 100)]
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("b", 1, 0, 0), *more])
    assert cache_share(tmp_path) == pytest.approx(80 / 200)


def test_two_parts_that_look_at_one_engine_count_it_once(tmp_path):
    write(tmp_path, "1-of-2", [sample("a", 1, 0, 0), sample("a", 9, 50, 100)])
    write(tmp_path, "2-of-2", [sample("a", 2, 5, 10), sample("a", 8, 40, 90)])
    assert cache_share(tmp_path) == pytest.approx(0.5)


def test_a_restarted_engine_counts_from_its_restart(tmp_path):
    write(tmp_path, "all", [sample("a", 1, 900, 1000), sample("a", 2, 10, 40)])
    assert cache_share(tmp_path) == pytest.approx(0.25)


def test_only_the_ends_of_a_large_file_are_read_and_torn_lines_are_passed_over(tmp_path):
    many = [sample("b", 2 + n / 1e6, n, 2 * n) for n in range(60_000)]
    write(
        tmp_path, "all", [sample("a", 1, 0, 0), *many, sample("a", 3, 30, 40)], b'{"endpoint":"a"'
    )
    size = (tmp_path / "journal" / "endpoints-all-000001.jsonl").stat().st_size
    assert size > totals.HEAD + totals.TAIL
    assert cache_share(tmp_path) == pytest.approx((30 + 59_999) / (40 + 2 * 59_999), rel=0.01)
