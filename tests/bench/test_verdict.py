"""Verdicts on endpoints, and the text about a fleet."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bagent.bench.verdict import (
    EndpointStats,
    EndpointVerdict,
    failure_lines,
    fleet_text,
    judge,
    main_failure_kinds,
    rank_endpoints,
)


def seen(name: str, speed: float = 1.0, load: str = "c=8", **fields: object) -> EndpointStats:
    """An endpoint that gives ``speed`` times 1,000 tokens a second."""
    known: dict[str, object] = {
        "requests": 100,
        "ok": 100,
        "failed": 0,
        "tokens": 10_000 * speed,
        "output_tok_s": 1000 * speed,
        "pace_ms": 10 / speed if speed else None,
    }
    return EndpointStats(name, load, **{**known, **fields})  # type: ignore[arg-type]


def words(
    rows: list[EndpointStats], *names: str, not_ready: dict[str, EndpointVerdict] | None = None
) -> list[str]:
    return [one.verdict for one in judge(names, not_ready or {}, rows)]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.0], ["ok"]),
        ([1.0, 0.1], ["ok", "slow"]),
        ([1.0, 0.1, 0.1], ["ok", "slow", "slow"]),
        ([1.0, 1.0, 0.1, 0.1], ["ok", "ok", "slow", "slow"]),
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


BY_REQUEST = {"tokens": None, "output_tok_s": None}
OPEN = [seen("a", closed=False), seen("b", closed=False, output_tok_s=100.0)]
STAND_STILL_IN_TURNS = [
    *(seen("a"), seen("b", 0.05, output_tok_s=0.0)),
    *(seen("a", 0.05, "c=2", output_tok_s=0.0), seen("b", 1.0, "c=2")),
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # in an open loop all get the same work, so that the pace decides
        ([*OPEN, seen("c", closed=False, pace_ms=40.0)], "ok ok slow"),
        # one odd load among several
        (
            [seen("a", load=f"c={n}") for n in (1, 2, 4)]
            + [seen("b", 0.3 if n == 1 else 1.0, load=f"c={n}") for n in (1, 2, 4)],
            "ok ok",
        ),
        # a bad endpoint and one of another model are no measure for the others
        ([seen("a", 0.5), seen("b", 0.5), seen("c", 5.0, failed=50, ok=50)], "ok ok failing"),
        ([seen("a", model="7b"), seen("b", 0.1, model="70b")], "ok ok"),
        # requests that never end, with tokens and without
        ([seen("a"), seen("b", 0.0, ok=0, requests=2, tokens=None)], "ok dead"),
        ([seen("a"), seen("b", 0.01, requests=8, ok=0, tokens=3, in_flight=8.0)], "ok slow"),
        # without counts of tokens requests are compared, but not with times of tokens
        (
            [seen("a", pace_ms=100.0, **BY_REQUEST), seen("b", pace_ms=900.0, **BY_REQUEST)],
            "ok slow",
        ),
        ([seen("a"), seen("b", pace_ms=900.0, **BY_REQUEST)], "ok ok"),
        (STAND_STILL_IN_TURNS, "ok ok"),
    ],
)
def test_what_endpoints_are_compared_by(rows: list[EndpointStats], expected: str) -> None:
    names = sorted({row.endpoint for row in rows})
    assert words(rows, *names) == expected.split()


@pytest.mark.parametrize(
    ("requests", "failed", "expected"),
    [
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


def test_what_is_known_before_stays_and_the_reason_is_told() -> None:
    known = EndpointVerdict("b", "dead", "cannot connect")
    first, second = judge(["a", "b"], {"b": known}, [seen("a")])
    assert second == known
    assert (first.verdict, first.reason) == ("ok", "nothing to compare it with")


def test_a_failing_endpoint_is_told_what_fails_there() -> None:
    rows = [seen("a", failed=50, ok=50), seen("b", ok=0, failed=100, tokens=0)]
    causes = {"a": "overloaded (HTTP 503)", "b": "connect"}
    first, second = judge(["a", "b"], {}, rows, causes)
    assert first.reason == "50 of 100 requests failed, mostly overloaded (HTTP 503)"
    assert second.reason == "all of 100 requests failed, mostly connect"


@pytest.mark.parametrize("alike", [{"pace_ms": 10.0}, {"output_tok_s": 1000.0}])
def test_each_is_held_against_the_median_of_the_others(alike: dict[str, float]) -> None:
    speeds = [1.0 + place / 10 for place in range(40)]
    rows = [seen(f"n{place}", speed, **alike) for place, speed in enumerate(speeds)]
    for place, one in enumerate(judge([row.endpoint for row in rows], {}, rows)):
        others = speeds[:place] + speeds[place + 1 :]
        share = speeds[place] / statistics.median_high(others)
        assert one.speed == pytest.approx(min(share, 1.0))


def test_what_may_be_chance_is_said_and_names_nobody() -> None:
    rows = [seen(name, requests=3, ok=3, spread=0.4) for name in ("a", "b", "c")]
    rows.append(seen("d", 0.6, requests=3, ok=3, spread=0.4))
    *_, last = judge(["a", "b", "c", "d"], {}, rows)
    assert last.verdict == "ok" and last.speed == pytest.approx(0.6)
    assert last.reason.endswith("(below 0.7), which may be chance: 3 requests")


def measured(
    rng: random.Random, speeds: Sequence[float], calls: int, rounds: int, spread: float
) -> list[EndpointStats]:
    """What endpoints of these speeds show of ``rounds`` times ``calls`` requests of 64 tokens.

    Half of the variance is of each request, half of all those that go on together.
    """
    found, each = [], spread / math.sqrt(2)
    for place, speed in enumerate(speeds):
        logs, ends = [], 0.0
        for _ in range(rounds):
            held_up = rng.gauss(0, each)
            together = [held_up + rng.gauss(0, each) for _ in range(calls)]
            ends += statistics.fmean(map(math.exp, together)) / speed
            logs += together
        one = seen(
            f"n{place}",
            requests=len(logs),
            ok=len(logs),
            tokens=64 * len(logs),
            output_tok_s=64 * len(logs) / ends,
            pace_ms=1000 / 64 / speed * math.exp(statistics.median(logs)),
            spread=statistics.stdev(logs),
            in_flight=float(calls),
        )
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("count", "fleets", "calls", "rounds", "spread"),
    [(4, 100, 1, 3, 0.4), (40, 10, 4, 6, 0.5), (400, 1, 4, 6, 0.5)],
)
def test_of_a_hundred_fleets_of_any_size_at_most_one_has_a_good_endpoint_named(
    count: int, fleets: int, calls: int, rounds: int, spread: float
) -> None:
    rng = random.Random(count)
    named = 0
    for _ in range(fleets):
        speeds = [rng.uniform(0.9, 1.0) for _ in range(count)]
        rows = measured(rng, speeds, calls, rounds, spread)
        named += any(one.verdict != "ok" for one in judge([row.endpoint for row in rows], {}, rows))
    assert named <= fleets / 100


@pytest.mark.parametrize(("count", "fleets"), [(4, 10), (400, 1)])
@pytest.mark.parametrize(("speed", "rounds"), [(0.1, 3), (0.5, 40)])
def test_a_slow_endpoint_is_named_in_every_fleet(
    count: int, fleets: int, speed: float, rounds: int
) -> None:
    rng = random.Random(count)
    for _ in range(fleets):
        rows = measured(rng, [speed], 4, rounds, 0.3)
        rows += [
            msgspec.structs.replace(row, endpoint=f"good{place}")
            for place, row in enumerate(measured(rng, [1.0] * min(count - 1, 40), 4, rounds, 0.3))
        ]
        rows += [
            msgspec.structs.replace(rng.choice(rows[1:]), endpoint=f"more{place}")
            for place in range(count - len(rows))
        ]
        found = judge([row.endpoint for row in rows], {}, rows)
        assert found[0].verdict == "slow"
        assert all(one.verdict == "ok" for one in found[1:])


def endpoint(name: str, verdict: str = "ok", speed: float | None = 1.0) -> dict[str, Any]:
    return {"endpoint": name, "verdict": verdict, "speed": speed}


def failure(endpoint: str, kind: str, n: int, **more: Any) -> dict[str, Any]:
    return {"load": "c=1", "endpoint": endpoint, "kind": kind, "n": n, "code": None} | {
        "example": "why",
        **more,
    }


def test_of_a_large_fleet_the_worst_come_first_and_the_rest_is_counted() -> None:
    rows = [endpoint(f"n{n}", speed=1 + n / 100) for n in range(100)]
    rows[70] = endpoint("slower", "slow", 0.1)
    rows[50] = endpoint("slow", "slow", 0.6)
    rows[90] = endpoint("gone", "dead", None)
    rows[99] = endpoint("failing", "failing", None)
    shown, rest = rank_endpoints(rows, 6)
    names = [one["endpoint"] for one in shown]
    assert names == ["gone", "failing", "slower", "slow", "n0", "n1"]
    assert rest == "94 more endpoints, all ok: endpoints.csv has every one"


def test_bad_endpoints_that_find_no_room_are_counted() -> None:
    few = [endpoint("a"), endpoint("b", "dead", None), endpoint("c", "slow", 0.1)]
    assert rank_endpoints(few, 3) == (few, ""), "in the order of its hostfile"
    rows = [endpoint(f"n{n}", "dead", None) for n in range(1500)]
    shown, rest = rank_endpoints(rows, 50)
    assert len(shown) == 50
    assert rest == "1,450 more endpoints, 1,450 of them not ok: endpoints.csv has every one"


def test_failures_of_many_endpoints_are_a_line_for_each_kind() -> None:
    rows = [failure(f"n{n}", "overloaded", n + 1, code=503) for n in range(300)]
    rows.append(failure("x", "connect", 2, load="c=8", example="refused"))
    first, second = failure_lines(rows, 5)
    where = "at 300 endpoints, most (300) at n299 in c=1"
    assert first == f"45,150 x overloaded (HTTP 503) {where}: why"
    assert second == "2 x connect at x in c=8: refused"
    kinds = [failure("a", f"kind{n}", 9 - n) for n in range(4)]
    found = failure_lines(kinds, 2)
    assert found[0].startswith("9 x kind0 at a in c=1")
    assert found[2:] == ["2 more kinds of failure: summary.json has every one"]


@pytest.mark.parametrize(
    ("code", "words"), [(200, "bad_response"), (429, "bad_response (HTTP 429)")]
)
def test_an_endpoint_has_its_most_frequent_failure(code: int, words: str) -> None:
    rows = [
        failure("a", "connect", 2),
        failure("a", "bad_response", 3, code=code),
        failure("a", "unfinished", 99),
    ]
    assert main_failure_kinds(rows) == {"a": words}


def test_the_fleet_in_a_line() -> None:
    fleet = {"ok": 2, "slow": 1, "failing": 0, "dead": 0, "max_by_min": 10.0, "cv": 0.5}
    assert fleet_text({"fleet": fleet}) == "2 ok, 1 slow; fastest / slowest 10.00, CV 0.50"
    found = {"best_rate": 119.4, "concurrency": 16, "sustained_rate": 101.0}
    words = fleet_text({"fleet": {**fleet, "max_by_min": None}, "saturation": found})
    assert words == "2 ok, 1 slow; saturated at 119 calls/s, c=16; 101 requests/s sustained"
