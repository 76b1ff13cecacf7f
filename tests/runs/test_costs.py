"""What a run says of its money: rows by GPU time, the check's and the report's table by mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cli import Completed
from support.jobs import results, run_json, write_job

pytestmark = pytest.mark.slow  # each test is several runs

Bagent = Callable[..., Completed]
LONG = {"temperature": 0, "max_tokens": 4000}
MODES = ["single", "cached", "provider batch", "own fleet"]


def test_gpus_of_ones_own_cost_by_the_hour_and_the_report_sets_modes_side_by_side(
    job_dir: Path, bagent: Bagent
) -> None:
    prices = {"gpu_hour": 3600, "input": 4, "output": 20, "batch": 0.5}
    write_job(
        job_dir, "sim", 6, model="auto", prices=prices, limits={"concurrency": 2}, sampling=LONG
    )
    done = bagent(["run", "job.yaml", "--progress", "none"])
    assert done.code == 0, done.err
    found = results(job_dir)
    # At $1 a GPU second, shares of at most two rows at once: no less than half of each's time.
    for row in found:
        assert 0 < row["cost_usd"] <= row["latency_ms"] / 1000 + 0.05
    spent = sum(row["finished_at"] - row["started_at"] for row in found)
    assert sum(row["cost_usd"] for row in found) <= spent + 0.3
    (kept,) = run_json(job_dir / "runs" / "job")["prices"]
    assert (kept["gpu_hour"], kept["price"]["batch"]) == (3600, 0.5)
    assert bagent(["report"]).code == 0
    page = (job_dir / "runs" / "job" / "report.html").read_text()
    assert "This job by mode" in page
    assert all(f">{mode}<" in page for mode in MODES)


def test_a_price_of_gpus_only_leaves_the_providers_modes_empty(
    job_dir: Path, bagent: Bagent
) -> None:
    write_job(job_dir, "sim", 2, model="auto", prices={"gpu_hour": 2}, sampling=LONG)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    assert all(row["cost_usd"] > 0 for row in results(job_dir))
    over = bagent(["run", "job.yaml", "--fresh", "--budget", "5"])
    assert over.code == 2
    assert "prices: {input" in over.err


def test_a_check_estimates_each_mode_and_says_what_only_a_run_can_tell(
    job_dir: Path, bagent: Bagent
) -> None:
    prices = {"input": 10, "output": 100, "cached": 1, "batch": 0.5}
    write_job(job_dir, "sim", 20, model="auto", prices=prices)
    cost = json.loads(bagent(["check", "job.yaml", "--json"]).out)["cost"]
    modes = {one["mode"]: one["usd"] for one in cost["modes"]}
    assert list(modes) == MODES
    assert modes["single"] == pytest.approx(cost["total_usd_at_most"], rel=0.01)
    assert modes["provider batch"] == pytest.approx(modes["single"] / 2)
    assert modes["cached"] <= modes["single"]
    assert modes["own fleet"] is None
    text = bagent(["check", "job.yaml"]).out
    assert "provider batch" in text
    assert "measured by a run on your GPUs" in text
