"""What people are shown of a large fleet."""

from __future__ import annotations

from typing import Any

import pytest

from bagent.bench.verdict import failure_lines, fleet_text, main_failure_kinds, rank_endpoints


def endpoint(name: str, verdict: str = "ok", speed: float | None = 1.0) -> dict[str, Any]:
    return {"endpoint": name, "verdict": verdict, "speed": speed}


def failure(endpoint: str, kind: str, n: int, **more: Any) -> dict[str, Any]:
    return {"load": "c=1", "endpoint": endpoint, "kind": kind, "n": n, "code": None} | {
        "example": "why",
        **more,
    }


def test_a_small_fleet_stands_in_the_order_of_its_hostfile() -> None:
    rows = [endpoint("a"), endpoint("b", "dead", None), endpoint("c", "slow", 0.1)]
    assert rank_endpoints(rows, 3) == (rows, "")


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
    rows = [endpoint(f"n{n}", "dead", None) for n in range(1500)]
    shown, rest = rank_endpoints(rows, 50)
    assert len(shown) == 50
    assert rest == "1,450 more endpoints, 1,450 of them not ok: endpoints.csv has every one"


def test_failures_of_many_endpoints_are_a_line_for_each_kind() -> None:
    rows = [failure(f"n{n}", "overloaded", n + 1, code=503) for n in range(300)]
    rows.append(failure("x", "connect", 2, load="c=8", example="refused"))
    first, second = failure_lines(rows, 5)
    assert (
        first == "45,150 x overloaded (HTTP 503) at 300 endpoints, most (300) at n299 in c=1: why"
    )
    assert second == "2 x connect at x in c=8: refused"


def test_kinds_beyond_the_most_are_counted() -> None:
    rows = [failure("a", f"kind{n}", 9 - n) for n in range(4)]
    found = failure_lines(rows, 2)
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
