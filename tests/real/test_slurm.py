"""Batch jobs on a real SLURM: a warning and a requeue, lost nodes, arrays; every row once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from real.serve_slurm import free_ports
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
# What is sent to a node that is gone is never answered: the usual limits would take minutes.
SOON = {"timeout": {"connect": "3s", "total": "8s"}, "concurrency": 6}
NO_TABLES = {"parquet": False, "duckdb": False}
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture
def env(slurm, job_dir):
    return clean_env(job_dir / ".home", slurm.env)


def write(folder, count, limits=None, **cluster):
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
        "limits": limits or {"concurrency": 6},
        "results": NO_TABLES,
        "cluster": usual | cluster,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def submit(folder, env, *more):
    done = run_bagent(["submit", "job.yaml", "--go", *more], folder, env=env)
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


def assert_every_row_once(folder, count):
    found = results_by_id(folder)
    assert sorted(found) == sorted(row["id"] for row in rows(count))
    assert {row["status"] for row in found.values()} == {"ok"}
    return found


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
    found = assert_every_row_once(job_dir, 120)
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


# Slower than a minute of walltime: about four rows a second.
SLOW = {"concurrency": 2}
NO_DEADLINE = {"BAGENT_DEADLINE": "@9999999999"}


def test_a_job_that_slurm_warns_before_its_walltime_goes_on_until_all_is_done(slurm, job_dir, env):
    write(job_dir, 150, SLOW, walltime="1m")
    number = submit(job_dir, env | NO_DEADLINE)
    assert wait_for(slurm, number, lambda: state(slurm, number), 280) == "COMPLETED"
    text = output(job_dir, number)
    assert slurm.job(number)["ExitCode"] == "0:0", text
    assert int(slurm.job(number)["Restarts"]) >= 1
    assert "got USR1" in text
    assert_every_row_once(job_dir, 150)
    assert max(Counter(line["id"] for line in done_rows(job_dir)).values()) == 1


def test_a_job_that_is_killed_at_its_walltime_goes_on_when_it_is_submitted_again(
    slurm, job_dir, env
):
    # No deadline and no warning: the first that is heard of the end is the end itself.
    write(job_dir, 600, SLOW, walltime="1m", directives=["--signal=B:CONT@1"])
    number = submit(job_dir, env | NO_DEADLINE)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "TIMEOUT"
    kept = len(done_rows(job_dir))
    assert 0 < kept < 600
    write(job_dir, 600, {"concurrency": 60}, walltime="10m")
    number = submit(job_dir, env)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    assert_every_row_once(job_dir, 600)
    assert max(Counter(line["id"] for line in done_rows(job_dir)).values()) == 1


@pytest.mark.skipif(shutil.which("qsub") is None, reason="tests/real/install_slurm.sh")
def test_a_script_of_pbs_is_followed_by_a_successor_and_every_row_is_answered_once(
    slurm, job_dir, env
):
    programs = f"{slurm.ssh_folder}:{Path(sys.executable).parent}"
    setup = [f"export PATH={programs}:$PATH"]
    write(job_dir, 120, nodes=2, scheduler="pbs", launcher="ssh", queue="pbs", setup=setup)
    first = submit(job_dir, env, "--scheduler", "pbs")
    wait_for(slurm, first, lambda: len(done_rows(job_dir)) >= 12)
    slurm.run("scancel", "--signal=USR1", "--batch", first)
    assert wait_for(slurm, first, lambda: state(slurm, first)) == "FAILED"
    assert slurm.job(first)["ExitCode"] == "75:0"
    kept = len(done_rows(job_dir))
    assert 12 <= kept < 120
    second = str(int(first) + 1)
    assert slurm.job(second)["Partition"] == "pbs"
    assert wait_for(slurm, second, lambda: state(slurm, second)) == "COMPLETED"
    found = assert_every_row_once(job_dir, 120)
    assert max(Counter(line["id"] for line in done_rows(job_dir)).values()) == 1
    assert len({row["endpoint"] for row in found.values()}) == 2
    assert (job_dir / "runs" / "job.batch" / f"{second}.1").is_dir()


def test_an_engine_that_dies_is_started_again_and_the_deadline_is_the_end_that_slurm_knows(
    slurm, job_dir, env
):
    mark = job_dir / "died"
    once = f"test -e {mark} || (touch {mark}; exit 7)"
    engine = f"{once} && exec {sys.executable} -m {SIM} --api-key $VLLM_API_KEY"
    write(job_dir, 12, nodes=1, walltime="7m", engine=["sh", "-c", engine])
    number = submit(job_dir, env)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    assert "1 restarts" in output(job_dir, number)
    assert_every_row_once(job_dir, 12)
    job = slurm.job(number)
    limit = datetime.fromisoformat(job["StartTime"]).timestamp() + 7 * 60
    told = re.search(r"BAGENT_DEADLINE=@(\d+)", output(job_dir, number))
    assert told is not None
    assert abs(int(told[1]) + 30 - limit) <= 2


def test_a_cancelled_job_ends_in_good_order_and_stays_away(slurm, job_dir, env):
    write(job_dir, 200, nodes=2)
    number = submit(job_dir, env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 6)
    slurm.run("scancel", number)
    assert wait_for(slurm, number, lambda: state(slurm, number)) == "CANCELLED"
    assert slurm.run("squeue", "--noheader").strip() == ""
    assert 6 <= len(results_by_id(job_dir)) < 200


def test_a_run_goes_on_when_one_node_is_cut_off_and_another_crashes(slurm, job_dir, env):
    write(job_dir, 100, SOON)
    number = submit(job_dir, env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    head = slurm.job(number)["BatchHost"]
    second, third = [node for node in slurm.nodes if node != head]
    slurm.cut_off(second)
    kept = len(done_rows(job_dir))
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= kept + 12)
    slurm.crash(third)
    try:
        assert wait_for(slurm, number, lambda: state(slurm, number)) == "COMPLETED"
    finally:
        slurm.revive(second, third)
    assert slurm.job(number)["Restarts"] == "0"
    assert len({row["endpoint"] for row in assert_every_row_once(job_dir, 100).values()}) == 3


def test_a_job_whose_first_node_crashes_goes_on_elsewhere(slurm, job_dir, env):
    write(job_dir, 100, SOON, nodes=2)
    number = submit(job_dir, env | {"BAGENT_SILENCE_SECONDS": "25"})
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    head = slurm.job(number)["BatchHost"]
    slurm.crash(head)
    kept = len(done_rows(job_dir))
    try:
        assert wait_for(slurm, number, lambda: state(slurm, number), 240) == "COMPLETED"
    finally:
        slurm.revive(head)
    assert slurm.job(number)["Restarts"] == "1"
    assert slurm.job(number)["BatchHost"] != head
    assert_every_row_once(job_dir, 100)
    lines = Counter(line["id"] for line in done_rows(job_dir))
    assert kept >= 12
    assert max(lines.values()) == 1


@pytest.fixture
def engine(slurm, job_dir):
    """A simulated engine on this machine that the nodes can reach; its hostfile line."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bagent", "sim", "--host", slurm.address, "--port", str(port)]
    process = subprocess.Popen([*command, "--output-tokens", "5"], stderr=subprocess.DEVNULL)
    yield f"vllm://{slurm.address}:{port}"
    process.terminate()
    process.wait(10)


@pytest.mark.parametrize("way", ["array", "step"])
def test_many_processes_share_the_rows_among_them(slurm, job_dir, env, engine, way):
    write_rows(job_dir / "rows.jsonl", 30)
    job = {"name": "job", "input": "rows.jsonl", "prompt": "id={{ id }}", "results": NO_TABLES}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job | {"backend": engine}))
    run = [sys.executable, "-m", "bagent", "run", "job.yaml", "--shard", "auto"]
    run += ["--wait-hosts", "60s"]
    command = {
        "array": ["sbatch", "--wait", "--array=2-6:2", "--wrap", shlex.join(run)],
        "step": ["srun", "--nodes=3", "--ntasks=3", *run],
    }[way]
    quiet = subprocess.DEVNULL
    subprocess.run(
        command, cwd=job_dir, env=env, check=True, timeout=120, stdout=quiet, stderr=quiet
    )
    assert_every_row_once(job_dir, 30)
    attempts = [line for line in journal_lines(job_dir / "runs/job") if "sent" in line]
    assert len(attempts) == 30
    assert len(list((job_dir / "runs/job/journal").glob("rows-*-of-3-*.jsonl"))) == 3
