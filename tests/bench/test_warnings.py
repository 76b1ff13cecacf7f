"""What makes the numbers of a load test less than they seem."""

from __future__ import annotations

from typing import Any

import pytest

from bagent.bench.summary import warnings

COUNTS = ("estimated", "not_streamed", "usage_incomplete")


def row(endpoint: str, **numbers: float) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "ok": 100,
        **dict.fromkeys(COUNTS, 0),
        "output_tokens": 8.0,
        **numbers,
    }


@pytest.mark.parametrize(
    ("rows", "most", "message"),
    [
        ([row("a:1"), row("b:1", not_streamed=10)], None, None),
        ([row("a:1", ok=0)], None, None),
        ([row("b:1", output_tokens=1000.0)], None, None),
        (
            [row("a:1"), row("b:1", estimated=100)],
            None,
            "output tokens of 100 requests at b:1 are estimated",
        ),
        (
            [row(f"n{n}:1", not_streamed=100) for n in range(3)],
            None,
            "answers to 300 requests at 3 endpoints (n0:1, n1:1, ...) came in one",
        ),
        ([row("a:1", not_streamed=1, ok=1)], None, "answers to 1 request at a:1"),
        (
            [row("a:1", usage_incomplete=7)],
            None,
            "the usage of 7 requests at a:1 tells fewer tokens than pieces came",
        ),
        (
            [row("a:1"), row("b:1", output_tokens=1000.0)],
            8,
            "the usage of 100 requests at b:1 tells more output tokens than the 8",
        ),
    ],
)
def test_what_cannot_be_relied_on_is_said(
    rows: list[dict[str, Any]], most: int | None, message: str | None
) -> None:
    found = warnings(rows, most) if most else warnings(rows)
    assert len(found) == (message is not None)
    assert message is None or found[0].startswith(message)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (64.0, None),
        (63.0, None),
        (39.9, "the answers to 100 requests at a:1 have 39.9 output tokens on average, not the 64"),
    ],
)
def test_answers_shorter_than_requested_are_said(tokens: float, message: str | None) -> None:
    found = warnings([row("a:1", output_tokens=tokens), row("b:1", ok=0)], 64, 64)
    assert [one.startswith(message or "") for one in found] == [True] * (message is not None)
