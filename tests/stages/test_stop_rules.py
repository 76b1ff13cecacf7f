"""When a run stops because servers refuse row after row alike, and when it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagent.backends.request import CallSettings, Request
from bagent.fleet.call import Call
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import Outcome

Rows = list[tuple[str, str, str]]
"""Kind of failure (or ok), endpoint (none: no server answered), model."""
BAD_INPUT = ("bad_input", "", "m")


def outcome(number: int, kind: str, endpoint: str) -> Outcome:
    status = "ok" if kind == "ok" else "failed"
    error = None if kind == "ok" else kind
    return Outcome(
        key=f"{number:016x}", row=number, id=number, source="f", line=number, stage="main",
        status=status, error_kind=error, error=error and f"{kind} it is", endpoint=endpoint or None,
    )  # fmt: skip


def run(rows: Rows, ends: Callable[[int], float] = lambda number: 0.0) -> tuple[int, str]:
    """How many rows failed until the run stops (all ended: -1), and why.

    Rows begin 64 at a time, and end in the order of ``ends``.
    """
    guards, failed, open_rows, begun = StopRules(canary=True, stop_after=None), 0, [], 0
    while begun < len(rows) or open_rows:
        while begun < len(rows) and len(open_rows) < 64:
            request = Request(CallSettings(rows[begun][2], {}, {}), b"")
            guards.begin([Call(lambda *_: None, request, "", begun, "main", 0, owner=begun)])
            open_rows.append(begun)
            begun += 1
        number = min(open_rows, key=lambda one: (ends(one), one))
        open_rows.remove(number)
        kind, endpoint, _ = rows[number]
        failed += kind != "ok"
        advice = guards.ended([(number, outcome(number, kind, endpoint))])
        if isinstance(advice, StopReason):
            return failed, advice.reason
    return -1, ""


def mixed(count: int, every: int, bad: str = "rejected", endpoints: int = 1) -> Rows:
    return [
        ("ok" if number % every else bad, f"e{number % endpoints}", "m") for number in range(count)
    ]


def ok_rows_take_longer(rows: Rows) -> Callable[[int], float]:
    return lambda number: number // 64 + (0.5 if rows[number][0] == "ok" else 0.0)


@pytest.mark.parametrize(
    ("rows", "failed", "words"),
    [
        ([("rejected", "e0", "m")] * 400, 50, "all 50 rows that servers answered so far failed"),
        ([("schema", f"e{n % 8}", "m") for n in range(400)], 50, "all 50 rows that servers"),
        ([("ok", "e0", "m")] * 30 + [("rejected", "e0", "m")] * 90, 50, "the last 50 rows that"),
        (
            [BAD_INPUT if n % 3 else ("rejected", "e0", "m") for n in range(400)],
            148,
            "all 50 rows that servers answered so far failed alike (rejected): rejected it is",
        ),
        (
            [("ok" if n % 2 else "rejected", "e0", "ab"[n % 2]) for n in range(200)],
            50,
            "all 50 rows that servers answered so far failed alike",
        ),
        (mixed(800, 8, endpoints=8), 50, "all 50 rows that e0 answered so far failed alike"),
    ],
    ids=["one", "eight", "later", "among bad input", "one of two models", "one of eight endpoints"],
)
def test_a_run_stops_where_servers_refuse_row_after_row_alike(rows, failed, words):
    stopped, reason = run(rows)
    assert stopped == failed
    assert words in reason
    assert f", {failed} not ok in this start" in reason


@pytest.mark.parametrize(
    "rows",
    [
        mixed(4000, 10, "template", 8),
        [("template", "", "m")] * 100,
        mixed(1000, 2),
        [("ok", "e0", "m")] * 64 + [("context_overflow", "e0", "m")] * 73,
        [("overloaded", "e0", "m")] * 200,
        [("rejected" if n % 2 else "schema", "e0", "m") for n in range(200)],
        [("ok" if n == 0 else "rejected" if n % 9 else "refused", "e0", "m") for n in range(200)],
    ],
)
def test_rows_that_are_bad_themselves_stop_no_run(rows):
    assert run(rows) == (-1, "")
    assert run(rows, ok_rows_take_longer(rows)) == (-1, "")


@pytest.mark.parametrize("served", [0, 30, 63])
def test_a_list_with_one_ok_row_is_not_said_to_have_failed_as_a_whole(served):
    def ended(kind: str) -> StopReason | None:
        rows = [(n, outcome(n, "ok" if n == served else kind, "e0")) for n in range(64)]
        return StopRules(canary=True, stop_after=None).ended(rows)

    assert ended("schema") is None, "the rows' own fault: others were served"
    reason = ended("rejected")
    assert reason is not None
    assert "the last 50 rows that servers answered failed alike" in reason.reason
    assert "; 1 row ok, 63 not ok in this start" in reason.reason
