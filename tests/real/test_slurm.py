"""Batch jobs on a real SLURM: a warning and a requeue, lost nodes, arrays; every row once."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from real.slurm_jobs import (
    BAGENT,
    ENGINE,
    NEEDS_SLURM,
    assert_every_row_once,
    done_rows,
    output,
    submit,
    wait_for,
    wait_for_end,
    write_cluster_job,
)
from support.jobs import journal_lines, results_by_id, write_job
from support.run_outcomes import NO_TABLES

pytestmark = NEEDS_SLURM

# What is sent to a node that is gone is never answered: the usual limits would take minutes.
SOON = {"timeout": {"connect": "3s", "total": "8s"}, "concurrency": 6}


def write(folder, count, limits=None, **cluster):
    usual = {
        "nodes": 3,
        "engine": ["sh", "-c", ENGINE],
        "ports": 18600,
        "min_fraction": 1,
        "start_timeout": "2m",
    }
    write_cluster_job(folder, count, usual | cluster, limits=limits or {"concurrency": 6})


def test_a_job_that_is_warned_of_its_end_is_requeued_and_every_row_is_answered_once(
    slurm, job_dir, slurm_env
):
    write(job_dir, 120, stage="rows.jsonl", stage_by="sbcast", stage_to=f"{job_dir}/disk-$USER")
    number = submit(job_dir, slurm_env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    batch = job_dir / "runs" / "job.batch"
    wait_for(slurm, number, (batch / f"{number}.1").exists)
    kept = len(done_rows(job_dir))
    assert 12 <= kept < 120
    assert wait_for_end(slurm, number) == "COMPLETED"
    text = output(job_dir, number)
    assert slurm.job(number)["ExitCode"] == "0:0", text
    assert slurm.job(number)["Restarts"] == "1"
    found = assert_every_row_once(job_dir, 120)
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


def test_a_job_that_slurm_warns_before_its_walltime_goes_on_until_all_is_done(
    slurm, job_dir, slurm_env
):
    write(job_dir, 150, SLOW, walltime="1m")
    number = submit(job_dir, slurm_env | NO_DEADLINE)
    assert wait_for_end(slurm, number, 280) == "COMPLETED"
    text = output(job_dir, number)
    assert slurm.job(number)["ExitCode"] == "0:0", text
    assert int(slurm.job(number)["Restarts"]) >= 1
    assert "got USR1" in text
    assert_every_row_once(job_dir, 150)


def test_a_job_that_is_killed_at_its_walltime_goes_on_when_it_is_submitted_again(
    slurm, job_dir, slurm_env
):
    # No deadline and no warning: the first that is heard of the end is the end itself.
    write(job_dir, 600, SLOW, walltime="1m", directives=["--signal=B:CONT@1"])
    number = submit(job_dir, slurm_env | NO_DEADLINE)
    assert wait_for_end(slurm, number) == "TIMEOUT"
    kept = len(done_rows(job_dir))
    assert 0 < kept < 600
    write(job_dir, 600, {"concurrency": 60}, walltime="10m")
    number = submit(job_dir, slurm_env)
    assert wait_for_end(slurm, number) == "COMPLETED"
    assert_every_row_once(job_dir, 600)


@pytest.mark.skipif(shutil.which("qsub") is None, reason="tests/real/install_slurm.sh")
def test_a_script_of_pbs_is_followed_by_a_successor_and_every_row_is_answered_once(
    slurm, job_dir, slurm_env
):
    programs = f"{slurm.ssh_folder}:{Path(sys.executable).parent}"
    setup = [f"export PATH={programs}:$PATH"]
    write(job_dir, 120, nodes=2, scheduler="pbs", launcher="ssh", queue="pbs", setup=setup)
    first = submit(job_dir, slurm_env, "--scheduler", "pbs")
    wait_for(slurm, first, lambda: len(done_rows(job_dir)) >= 12)
    slurm.run("scancel", "--signal=USR1", "--batch", first)
    assert wait_for_end(slurm, first) == "FAILED"
    assert slurm.job(first)["ExitCode"] == "75:0"
    kept = len(done_rows(job_dir))
    assert 12 <= kept < 120
    second = str(int(first) + 1)
    assert slurm.job(second)["Partition"] == "pbs"
    assert wait_for_end(slurm, second) == "COMPLETED"
    found = assert_every_row_once(job_dir, 120)
    assert len({row["endpoint"] for row in found.values()}) == 2
    assert (job_dir / "runs" / "job.batch" / f"{second}.1").is_dir()


def test_an_engine_that_dies_is_started_again_and_slurm_knows_the_deadline(
    slurm, job_dir, slurm_env
):
    mark = job_dir / "died"
    once = f"test -e {mark} || (touch {mark}; exit 7)"
    write(job_dir, 12, nodes=1, walltime="7m", engine=["sh", "-c", f"{once} && {ENGINE}"])
    number = submit(job_dir, slurm_env)
    assert wait_for_end(slurm, number) == "COMPLETED"
    assert "1 restarts" in output(job_dir, number)
    assert_every_row_once(job_dir, 12)
    job = slurm.job(number)
    limit = datetime.fromisoformat(job["StartTime"]).timestamp() + 7 * 60
    told = re.search(r"BAGENT_DEADLINE=@(\d+)", output(job_dir, number))
    assert told is not None
    assert abs(int(told[1]) + 30 - limit) <= 2


def test_a_cancelled_job_ends_in_good_order_and_stays_away(slurm, job_dir, slurm_env):
    write(job_dir, 200, nodes=2)
    number = submit(job_dir, slurm_env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 6)
    slurm.run("scancel", number)
    assert wait_for_end(slurm, number) == "CANCELLED"
    assert slurm.run("squeue", "--noheader").strip() == ""
    assert 6 <= len(results_by_id(job_dir)) < 200


def test_a_run_goes_on_when_one_node_is_cut_off_and_another_crashes(slurm, job_dir, slurm_env):
    write(job_dir, 100, SOON)
    number = submit(job_dir, slurm_env)
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    head = slurm.job(number)["BatchHost"]
    second, third = [node for node in slurm.nodes if node != head]
    slurm.cut_off(second)
    kept = len(done_rows(job_dir))
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= kept + 12)
    slurm.crash(third)
    try:
        assert wait_for_end(slurm, number) == "COMPLETED"
    finally:
        slurm.revive(second, third)
    assert slurm.job(number)["Restarts"] == "0"
    assert len({row["endpoint"] for row in assert_every_row_once(job_dir, 100).values()}) == 3


def test_a_job_whose_first_node_crashes_goes_on_elsewhere(slurm, job_dir, slurm_env):
    write(job_dir, 100, SOON, nodes=2)
    number = submit(job_dir, slurm_env | {"BAGENT_SILENCE_SECONDS": "25"})
    wait_for(slurm, number, lambda: len(done_rows(job_dir)) >= 12)
    head = slurm.job(number)["BatchHost"]
    slurm.crash(head)
    try:
        assert wait_for_end(slurm, number, 240) == "COMPLETED"
    finally:
        slurm.revive(head)
    assert slurm.job(number)["Restarts"] == "1"
    assert slurm.job(number)["BatchHost"] != head
    assert_every_row_once(job_dir, 100)


@pytest.mark.parametrize("way", ["array", "step"])
def test_many_processes_share_the_rows_among_them(slurm, job_dir, slurm_env, slurm_engine, way):
    write_job(job_dir, slurm_engine, 30, model=None, sampling=None, results=NO_TABLES)
    run = [*BAGENT, "run", "job.yaml", "--shard", "auto", "--wait-hosts", "60s"]
    command = {
        "array": ["sbatch", "--wait", "--array=2-6:2", "--wrap", shlex.join(run)],
        "step": ["srun", "--nodes=3", "--ntasks=3", *run],
    }[way]
    quiet = subprocess.DEVNULL
    subprocess.run(
        command, cwd=job_dir, env=slurm_env, check=True, timeout=120, stdout=quiet, stderr=quiet
    )
    assert_every_row_once(job_dir, 30)
    attempts = [line for line in journal_lines(job_dir / "runs/job") if "sent" in line]
    assert len(attempts) == 30
    assert len(list((job_dir / "runs/job/journal").glob("rows-*-of-3-*.jsonl"))) == 3
