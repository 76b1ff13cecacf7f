"""A run directory that an earlier version left unfinished (commit 7c89c50, 2026-11-29).

Of its 20 rows 8 are ok, 4 are truncated, 2 reached ``max_turns``, 1 failed for a passing reason,
and 1 conversation is unfinished after 2 turns.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from support.cli import run_bagent
from support.simulated_fleets import simulated

STORED = Path(__file__).parent / "data" / "stored_run"
BY_STATUS = {"ok": 8, "truncated": 4, "failed": 3}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return shutil.copytree(STORED, tmp_path / "job")


def results(job: Path) -> dict[str, dict[str, object]]:
    rows = run_bagent(["results", "runs/stored"], job).lines()
    return {row["id"]: row for row in rows}


def test_status_results_and_query_read_it(job):
    status = msgspec.json.decode(run_bagent(["status", "runs/stored", "--json"], job).out)
    assert status["by_kind"] == {"truncated": 4, "max_turns": 2, "bad_response": 1}
    assert (status["run"], status["total"]) == ("stored", 20)
    rows = results(job)
    assert Counter(row["status"] for row in rows.values()) == status["by_status"] == BY_STATUS
    expected = {"row": 1, "line": 2, "text": "Question finds deep sea.", "attempts": 3, "turns": 2}
    assert rows["r2"].items() >= expected.items()
    sql = """select (select count(*) from attempts where error_kind is null) as answered,
                    (select count(*) from attempts) as attempts,
                    (select string_agg(distinct name) from tool_calls) as tools"""
    done = run_bagent(["query", "runs/stored", sql, "--format", "jsonl"], job)
    assert done.lines() == [{"answered": 29, "attempts": 41, "tools": "add"}]


def test_resume_sends_only_unfinished_rows_and_continues_conversations(job):
    before = results(job)
    del before["r6"]  # failed for a passing reason
    with simulated("speedup=100&tool_rate=0&output_tokens=4") as sim:
        run = run_bagent(["run", "job.yaml", "--backend", f"{sim.urls[0]}/v1"], job)
    assert run.code == 1, run.err
    after = results(job)
    resumed = {name: row for name, row in after.items() if name not in before}
    assert after == before | resumed
    assert {name: (row["status"], row["turns"]) for name, row in resumed.items()} == {
        "r6": ("ok", 1),
        "r12": ("ok", 3),
        **{f"r{n}": ("ok", 1) for n in range(17, 21)},
    }
