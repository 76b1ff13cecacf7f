"""The page of a run of several stages in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.report import ReportInfo, make_page
from support.chromium import CHROMIUM, look
from support.report_pages import TableRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def page() -> str:
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


@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False)])
def test_the_page_is_drawn_whole(tmp_path: Path, page: str, width: int, dark: bool) -> None:
    found = look(page, tmp_path, width, dark=dark)
    assert found["wide"] <= 0, "the page is wider than its window"
    assert (found["charts"], found["broken"], found["outside"]) == (6, 0, [])
    assert (found["thin"], found["small"]) == ([], 0)
    assert found["loaded"] == 0, "something was loaded from elsewhere"
    assert found["found"].startswith("0 of ")
    assert (found["ground"] == "rgb(255, 255, 255)") == (not dark)
