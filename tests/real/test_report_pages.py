"""Pages in a real browser, Debian's ``chromium``: of a run of several stages and of a load test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.bench.metrics import HEATMAP_BINS
from bagent.report import ReportInfo, make_page
from bagent.report.load_test import page
from support.chromium import CHROMIUM, look
from support.report_pages import TableRun

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium"),
]


@pytest.fixture(scope="module")
def run_page() -> str:
    run = TableRun()
    for row in range(200):
        bad = {"status": "failed", "error_kind": "timeout", "error": "no answer in time " * 12}
        for stage in ("blackboard.a-long-name", "vote"):
            run.result(
                row,
                stage=stage,
                text="an answer of some words " * 20,
                input={"kind": "review" if row % 9 else "abstract", "notes": "n" * row},
                completion_tokens=10 + row,
                ttft_ms=5.0 + row,
                cost_usd=0.01,
                turns=1 + row % 3,
                **(bad if row % 9 == 0 else {}),
            )
            node = f"node{row % 3:04d}.a-long-name.example.org:8000"
            run.attempt(row, node, 1.0 + row % 3, stage=stage)
        call = {"name": "read_file", "started": 1.0, "shared": False, "cached": False}
        run.add("tool_calls", row=row, stage="vote", answer=0, turn=1, latency_ms=5.0, **call)
    run.fill()
    made = make_page(run.connection, ReportInfo("a run", [("model", "m")], ("blackboard", "vote")))
    run.close()
    return made


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False)])
def test_the_page_of_a_run_is_drawn_whole(
    tmp_path: Path, run_page: str, width: int, dark: bool
) -> None:
    found = look(run_page, tmp_path, width, dark=dark)
    assert found["wide"] <= 0, "the page is wider than its window"
    assert (found["charts"], found["broken"], found["outside"]) == (6, 0, [])
    assert (found["thin"], found["small"]) == ([], 0)
    assert found["loaded"] == 0, "something was loaded from elsewhere"
    assert found["found"].startswith("0 of ")
    assert (found["ground"] == "rgb(255, 255, 255)") == (not dark)


def summary() -> dict[str, Any]:
    """A fleet of three with long names, and a sweep of six loads."""
    loads = [
        {
            "load": f"c={2**step}",
            "rate": None,
            "requests": 100 * 2**step,
            "ok_share": 1.0,
            "rps": 12.5 * 2**step,
            "output_tok_s": 800.0 * 2**step,
            "e2e_p50_ms": 900.0 * 1.3**step,
            "e2e_p99_ms": 1900.0 * 1.5**step,
            "ttft_p50_ms": 90.0 * 1.5**step,
            "goodput_rps": 12.0 * 2**step,
        }
        for step in range(6)
    ]
    words = ["ok", "slow", "dead"]
    endpoints = [
        {
            "endpoint": f"node{n:04d}.a-long-name.example.org:8000",
            "verdict": word,
            "reason": "words that go on and on " * (n > 0) * 4,
        }
        for n, word in enumerate(words)
    ]
    return {
        "plan": {
            "input_tokens": 750,
            "output_tokens": 150,
            "seed": 0,
            "ways": ["chat"],
            "slo": {"ttft": 2000.0, "tpot": 100.0, "e2e": None},
        },
        "fleet": {**dict.fromkeys(words, 1), "failing": 0},
        "models": ["a-model"],
        "started_at": "2026-01-01T00:00:00+00:00",
        "client": {"host": "login01"},
        "bagent": "0",
        "command": "bagent bench",
        "simulated": True,
        "stopped": False,
        "client_limited": {},
        "loads": loads,
        "endpoints": endpoints,
        "failures": [],
        "definitions": {"TTFT": "words"},
        "seconds": 300.0,
    }


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_the_page_of_a_load_test_is_drawn_whole(tmp_path: Path, width: int, dark: bool) -> None:
    made = summary()
    heat = [
        {"endpoint": one["endpoint"], "bin": place, "ok": 1, "bad": 0, "pace_ms": 10.0 + 90 * n}
        for n, one in enumerate(made["endpoints"][:2])
        for place in range(HEATMAP_BINS)
    ]
    found = look(page(made, heat, None), tmp_path, width, dark=dark)
    assert found["wide"] <= 0, "the page is wider than its window"
    assert (found["charts"], found["broken"], found["outside"]) == (4, 0, [])
    assert found["rows"] == 2 + 3 + 6
    assert found["loaded"] == 0, "something was loaded from elsewhere"
    assert (found["ground"] == "rgb(255, 255, 255)") == (not dark)
