"""Which endpoints are called bad, however few there are."""

from __future__ import annotations

import statistics

import pytest

from bagent.bench.verdict import Judged, Seen, judge


def seen(name: str, speed: float = 1.0, load: str = "c=8", **fields: object) -> Seen:
    """An endpoint that gives ``speed`` times 1,000 tokens a second."""
    known: dict[str, object] = {
        "requests": 100,
        "ok": 100,
        "failed": 0,
        "tokens": 10_000 * speed,
        "output_tok_s": 1000 * speed,
        "pace_ms": 10 / speed if speed else None,
    }
    return Seen(name, load, **{**known, **fields})  # type: ignore[arg-type]


def words(rows: list[Seen], *names: str, not_ready: dict[str, Judged] | None = None) -> list[str]:
    return [one.verdict for one in judge(names, not_ready or {}, rows)]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.0], ["ok"]),
        ([1.0, 0.1], ["ok", "slow"]),
        ([1.0, 1.0, 0.1], ["ok", "ok", "slow"]),
        ([1.0, 0.1, 0.1], ["ok", "slow", "slow"]),
        ([1.0, 1.0, 0.1, 0.1], ["ok", "ok", "slow", "slow"]),
        ([1.0, 0.95, 0.9, 0.8], ["ok", "ok", "ok", "ok"]),
        ([1.0, 1.0, 0.71], ["ok", "ok", "ok"]),
        ([1.0, 1.0, 0.69], ["ok", "ok", "slow"]),
    ],
)
def test_slow_is_slower_than_the_others_by_a_stated_factor(
    speeds: list[float], expected: list[str]
) -> None:
    names = [f"{place}:1" for place in range(len(speeds))]
    rows = [seen(name, speed) for name, speed in zip(names, speeds, strict=True)]
    assert words(rows, *names) == expected


def test_in_an_open_loop_the_pace_decides_since_all_get_the_same_work() -> None:
    rows = [
        seen("a", closed=False),
        seen("b", closed=False),
        seen("c", closed=False, pace_ms=40.0),
    ]
    assert words(rows, "a", "b", "c") == ["ok", "ok", "slow"]


def test_less_work_in_an_open_loop_is_no_fault() -> None:
    rows = [seen("a", closed=False), seen("b", closed=False, output_tok_s=100.0)]
    assert words(rows, "a", "b") == ["ok", "ok"]


def test_one_odd_load_among_several_does_not_decide() -> None:
    rows = [seen("a", load=f"c={n}") for n in (1, 2, 4)]
    rows += [seen("b", 0.3 if n == 1 else 1.0, load=f"c={n}") for n in (1, 2, 4)]
    assert words(rows, "a", "b") == ["ok", "ok"]


@pytest.mark.parametrize(
    ("requests", "failed", "expected"),
    [
        (100, 0, "ok"),
        (100, 1, "ok"),
        (1000, 9, "ok"),
        (100, 2, "failing"),
        (9, 1, "failing"),
        (10, 10, "dead"),
    ],
)
def test_failing_is_more_than_one_in_a_hundred_and_no_chance(
    requests: int, failed: int, expected: str
) -> None:
    tokens = None if failed == requests else 10_000.0
    bad = seen("b", requests=requests, ok=requests - failed, failed=failed, tokens=tokens)
    assert words([seen("a"), bad], "a", "b") == ["ok", expected]


def test_a_bad_endpoint_is_no_measure_for_the_others() -> None:
    rows = [seen("a", 0.5), seen("b", 0.5), seen("c", 5.0, failed=50, ok=50)]
    assert words(rows, "a", "b", "c") == ["ok", "ok", "failing"]


def test_an_endpoint_whose_requests_never_end_but_give_tokens_is_slow_not_dead() -> None:
    stuck = seen("b", 0.02, ok=0, requests=2, tokens=30.0)
    assert words([seen("a"), stuck], "a", "b") == ["ok", "slow"]
    silent = seen("b", 0.0, ok=0, requests=2, tokens=None)
    assert words([seen("a"), silent], "a", "b") == ["ok", "dead"]


def test_what_is_known_before_stays_and_the_reason_is_told() -> None:
    known = Judged("b", "dead", "cannot connect")
    first, second = judge(["a", "b"], {"b": known}, [seen("a")])
    assert second == known
    assert (first.verdict, first.reason) == ("ok", "nothing to compare it with")


def test_without_token_counts_requests_are_compared() -> None:
    rows = [
        seen("a", tokens=None, output_tok_s=None, pace_ms=100.0),
        seen("b", tokens=None, output_tok_s=None, pace_ms=900.0),
    ]
    assert words(rows, "a", "b") == ["ok", "slow"]


def test_endpoints_of_another_model_are_no_measure() -> None:
    rows = [seen("a", model="7b"), seen("b", 0.1, model="70b"), seen("c", 0.1, model="70b")]
    assert words(rows, "a", "b", "c") == ["ok", "ok", "ok"]


def test_a_failing_endpoint_is_told_what_fails_there() -> None:
    rows = [seen("a", failed=50, ok=50), seen("b", ok=0, failed=100, tokens=0)]
    causes = {"a": "overloaded (HTTP 503)", "b": "connect"}
    first, second = judge(["a", "b"], {}, rows, causes)
    assert first.reason == "50 of 100 requests failed, mostly overloaded (HTTP 503)"
    assert second.reason == "all of 100 requests failed, mostly connect"


def test_each_of_a_large_fleet_is_held_against_the_median_of_the_others() -> None:
    speeds = [1.0 + place / 1000 for place in range(400)]
    rows = [seen(f"n{place}", speed) for place, speed in enumerate(speeds)]
    found = judge([row.endpoint for row in rows], {}, rows)
    for place, one in enumerate(found):
        others = speeds[:place] + speeds[place + 1 :]
        by_work = speeds[place] / statistics.median_high(others)
        by_pace = statistics.median_low(10 / other for other in others) * speeds[place] / 10
        assert one.speed == pytest.approx(min(by_work, by_pace))
