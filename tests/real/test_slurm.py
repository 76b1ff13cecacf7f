"""Batch jobs on a real SLURM: engines on every node, a warning, a requeue, and every row once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from real.serve_slurm import SlurmCluster
from support.cli import clean_env, run_bagent
from support.jobs import journal_lines, results_by_id, rows, write_rows

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons run as root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="tests/real/install_slurm.sh"),
]

SIM = "bagent sim --host {node} --port {port} --decode 60 --output-tokens 30"
NO_TABLES = {"parquet": False, "duckdb": False}
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with SlurmCluster(3, folder) as cluster:
        yield cluster


@pytest.fixture
def env(slurm, job_dir):
    return clean_env(job_dir / ".home", slurm.env)


def write(folder, count, **cluster):
    write_rows(folder / "rows.jsonl", count)
    usual = {
        "scheduler": "slurm",
        "nodes": 3,
        "walltime": "10m",
        "engine": ["sh", "-c", f"exec {sys.executable} -m {SIM} --api-key $VLLM_API_KEY"],
        "ports": 18600,
        "min_fraction": 1,
        "start_timeout": "2m",
    }
    job = {
        "name": "job",
        "input": "rows.jsonl",
        "prompt": "say {{ text }}",
        "sampling": {"max_tokens": 500},
        "limits": {"concurrency": 6},
        "results": NO_TABLES,
        "cluster": usual | cluster,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def submit(folder, env):
    done = run_bagent(["submit", "job.yaml", "--go"], folder, env=env)
    assert done.code == 0, done.err
    return re.search(r"submitted job (\d+)", done.err)[1]


def wait_for(slurm, number, done, seconds=150):
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, f"{slurm.job(number)}\n{slurm.logs()}"
        time.sleep(0.5)
    return value


def state(slurm, number):
    found = slurm.job(number)["JobState"]
    return found if found in ENDED else ""


def done_rows(folder):
    journal = folder / "runs" / "job"
    return [line for line in journal_lines(journal) if line.get("status") == "ok"]


def output(folder, number):
    return (folder / f"job.{number}.out").read_text()


def test_a_job_that_is_warned_of_its_end_is_requeued_and_every_row_is_answered_once(
    slurm, job_dir, env
):
    write(job_dir, 120, stage="rows.jsonl", stage_by="sbcast", stage_to=f"{job_dir}/disk-$USER")
    number = submit(job_dir, env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    batch = job_dir / "runs" / "job.batch"
    wait_for(slurm, number, (batch / f"{number}.1").exists)
    kept = len(done_rows(job_dir))
    assert 12 <= kept < 120
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    text = output(job_dir, number)
    assert slurm.job(number)["ExitCode"] == "0:0", text
    assert slurm.job(number)["Restarts"] == "1"
    found = results_by_id(job_dir)
    assert sorted(found) == sorted(row["id"] for row in rows(120))
    assert all(row["status"] == "ok" for row in found.values())
    assert max(Counter(line["id"] for line in done_rows(job_dir)).values()) == 1
    assert len({row["endpoint"] for row in found.values()}) == 3
    hosts = (batch / f"{number}.0" / "hosts.txt").read_text().split("\n")[:3]
    assert [line.split("\t")[:2] for line in hosts] == [[n, "18600"] for n in ("n1", "n2", "n3")]
    assert sorted(p.name for p in (batch / f"{number}.1" / "staged").iterdir()) == slurm.nodes
    assert "got USR1" in text
    assert "exit code 75" in text
    assert "requeued, for the 1. time of at most 5" in text
    assert text.count("3 of 3 engines started") == 2
    assert text.count("stopped") >= 6


def test_the_deadline_is_the_end_that_slurm_knows(slurm, job_dir, env):
    write(job_dir, 6, nodes=1, walltime="7m")
    number = submit(job_dir, env)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    job = slurm.job(number)
    limit = datetime.fromisoformat(job["StartTime"]).timestamp() + 7 * 60
    told = re.search(r"BAGENT_DEADLINE=@(\d+)", output(job_dir, number))
    assert told is not None
    assert abs(int(told[1]) + 30 - limit) <= 2


def test_an_engine_that_dies_is_started_again_and_the_run_goes_on(slurm, job_dir, env):
    mark = job_dir / "died"
    once = f"test -e {mark} || (touch {mark}; exit 7)"
    engine = f"{once} && exec {sys.executable} -m {SIM} --api-key $VLLM_API_KEY"
    write(job_dir, 12, nodes=1, engine=["sh", "-c", engine])
    number = submit(job_dir, env)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    assert "1 restarts" in output(job_dir, number)
    assert len(results_by_id(job_dir)) == 12


def test_a_cancelled_job_ends_in_good_order_and_stays_away(slurm, job_dir, env):
    write(job_dir, 200, nodes=2)
    number = submit(job_dir, env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 6)
    slurm.run("scancel", number)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "CANCELLED"
    assert slurm.run("squeue", "--noheader").strip() == ""
    assert 6 <= len(results_by_id(job_dir)) < 200


def test_the_tasks_of_a_step_share_the_rows_among_them(slurm, job_dir, env, fs):
    write_rows(job_dir / "rows.jsonl", 30)
    job = {"name": "job", "input": "rows.jsonl", "prompt": "id={{ id }}", "results": NO_TABLES}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job | {"backend": fs.url, "model": "m"}))
    command = [sys.executable, "-m", "bagent", "run", "job.yaml", "--shard", "auto"]
    subprocess.run(
        ["srun", "--nodes=3", "--ntasks=3", *command],
        cwd=job_dir,
        env=env,
        check=True,
        timeout=120,
        stderr=subprocess.DEVNULL,
    )
    assert len(fs.requests) == 30
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(30))
    assert len(list((job_dir / "runs/job/journal").glob("rows-*.jsonl"))) == 3
