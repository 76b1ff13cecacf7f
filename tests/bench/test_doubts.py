"""What makes the numbers of a load test less than they seem."""

from __future__ import annotations

from typing import Any

from bagent.bench.doubts import doubts

COUNTS = ("estimated", "one_piece", "undertold")


def row(endpoint: str, **numbers: float) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "ok": 100,
        **dict.fromkeys(COUNTS, 0),
        "output_tokens": 8.0,
        **numbers,
    }


def test_numbers_that_are_told_in_full_are_not_doubted() -> None:
    assert doubts([row("a:1"), row("b:1", one_piece=10)]) == []


def test_tokens_that_a_server_does_not_tell_are_said_to_be_estimated() -> None:
    (words,) = doubts([row("a:1"), row("b:1", estimated=100)])
    assert words.startswith("output tokens of 100 requests at b:1 are estimated")


def test_streams_that_come_in_one_piece_are_said_to_have_no_tpot() -> None:
    rows = [row(f"n{n}:1", one_piece=100) for n in range(3)]
    (words,) = doubts(rows)
    assert words.startswith("answers to 300 requests at 3 endpoints (n0:1, n1:1, ...) came in one")
    (words,) = doubts([row("a:1", one_piece=1, ok=1)])
    assert "1 request at a:1" in words


def test_an_endpoint_that_answered_nothing_has_no_doubts() -> None:
    assert doubts([row("a:1", ok=0)]) == []


def test_a_usage_that_cannot_be_true_is_said() -> None:
    (words,) = doubts([row("a:1", undertold=7)])
    assert words.startswith("the usage of 7 requests at a:1 tells fewer tokens than pieces came")
    (words,) = doubts([row("a:1"), row("b:1", output_tokens=1000.0)], 8)
    assert words.startswith("the usage of 100 requests at b:1 tells more output tokens than the 8")
    assert doubts([row("b:1", output_tokens=1000.0)]) == []
