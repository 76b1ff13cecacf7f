"""The page of a load test in a real browser (Debian's ``chromium``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.bench.metrics import HEATMAP_BINS
from bagent.report.load_test import page
from support.chromium import CHROMIUM, look

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


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


@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_the_page_is_drawn_whole(tmp_path: Path, width: int, dark: bool) -> None:
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
