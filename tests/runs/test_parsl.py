"""Chunks of a run that somebody else places: given out, lost, stopped, and told as one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_STOPPED
from bagent.hpc.parsl import PoolPlan
from bagent.observe.progress import NoProgress
from bagent.runs.context import RunOptions, open_input, prepare
from bagent.runs.deadline import Deadline
from bagent.runs.parallel.parsl import ParslCoordinator, ParslLimits, chunk_count, estimated_rows
from bagent.runs.parallel.parsl_task import (
    ChunkState,
    ChunkTask,
    read_state,
    run_chunk,
    signals_path,
)
from bagent.runs.parallel.worker import encode_options
from bagent.runs.parallel.workers import Worker, part_options
from bagent.store.lock import owners
from support.cli import Running
from support.jobs import journal_lines, results_by_id, rows, write_job
from support.replies import echo, gated, slow
from support.run_outcomes import NO_TABLES

HERE = PoolPlan("here", "python", 2)
SLURM = PoolPlan("slurm", "python", 1, jobs=2)


class ScriptedPool:
    """Answers each chunk by ``script``: an exit code, an error, "lost", or None for never."""

    def __init__(self, folder, script):
        self.folder = folder
        self.jobs_begun = 1
        self.tasks = []
        self._script = list(script)

    def submit(self, task):
        self.tasks.append(task)
        future = Future()
        what = self._script.pop(0)
        if what == "lost":
            from parsl.executors.high_throughput.errors import ManagerLost

            what = ManagerLost(b"m1", "n1")
        if isinstance(what, BaseException):
            future.set_exception(what)
        elif what is not None:
            future.set_result(msgspec.json.encode(ChunkState("n1", code=what, reason="stopped")))
        return future

    @property
    def parts(self):
        return [task.part for task in self.tasks]


@pytest.fixture
def prepared(job_dir):
    write_job(job_dir, "http://127.0.0.1:9/v1", 10, limits={"concurrency": 7}, results=NO_TABLES)
    found = prepare(
        RunOptions(job=Path("job.yaml"), cwd=job_dir, env={"SLURM_JOB_ID": "1", "K": "v"})
    )
    found.run_dir.mkdir(parents=True)
    return found


def run_chunks(prepared, tmp_path, script, **more):
    """The chunks after a run of three of them, and the pool."""
    pool = ScriptedPool(tmp_path, script)
    chunks = [Worker(options) for options in part_options(prepared, 3, 2)]
    limits = ParslLimits(2, more.get("plan", HERE), more.get("deadline"))
    ParslCoordinator(prepared, chunks, pool, NoProgress(), limits, {}).run(more.get("signals", []))
    return chunks, pool


@pytest.mark.parametrize(
    ("plan", "script", "codes"),
    [
        (HERE, [0, 1, 0], [0, 1, 0]),
        (HERE, ["lost", 0, "lost", 0, 0], [0, 0, 0]),
        (HERE, [0, 0, "lost", "lost", "lost", "lost"], [0, 0, EXIT_STOPPED]),
        (HERE, [75, 0, 0], [0, 0, 75]),
        (SLURM, [75, 0, 0, 0], [0, 0, 0]),
    ],
    ids=["all well", "lost", "lost for good", "out of time", "batch job out of time"],
)
def test_chunks_are_given_out_until_they_end_or_are_lost_four_times(
    prepared, tmp_path, plan, script, codes
):
    chunks, pool = run_chunks(prepared, tmp_path, script, plan=plan)
    assert sorted(chunk.code for chunk in chunks) == sorted(codes)
    assert set(pool.parts) == {"1-of-3", "2-of-3", "3-of-3"}
    assert len(pool.parts) == len(script)
    assert pool.tasks[0].env == {"K": "v"}
    if len(script) == 6:
        assert "3-of-3 was lost" in chunks[2].reason


def test_what_one_chunk_cannot_go_on_from_stops_the_others(prepared, tmp_path):
    chunks, pool = run_chunks(prepared, tmp_path, [EXIT_NEEDS_PERSON, None])
    assert [chunk.code for chunk in chunks] == [EXIT_NEEDS_PERSON, EXIT_STOPPED, EXIT_STOPPED]
    assert signals_path(tmp_path / "chunks").read_text() == f"{int(signal.SIGTERM)}\n"
    assert len(pool.parts) == 2


def test_without_workers_a_person_is_told_why(prepared, tmp_path):
    chunks, _ = run_chunks(prepared, tmp_path, [RuntimeError("sbatch:\n bad account"), None])
    assert chunks[0].code == EXIT_NEEDS_PERSON
    assert chunks[0].reason == "there are no workers: RuntimeError sbatch: bad account"


def test_batch_jobs_that_end_without_a_worker_are_not_sent_for_ever(prepared, tmp_path):
    pool = ScriptedPool(tmp_path, [None, None])
    pool.jobs_begun = 7
    chunks = [Worker(options) for options in part_options(prepared, 3, 2)]
    ParslCoordinator(prepared, chunks, pool, NoProgress(), ParslLimits(2, SLURM, None), {}).run([])
    assert chunks[0].code == EXIT_NEEDS_PERSON
    assert "6 batch jobs ended, and no worker came" in chunks[0].reason


def test_a_signal_is_passed_on_by_a_file_and_what_never_began_is_left(prepared, tmp_path):
    chunks, _ = run_chunks(prepared, tmp_path, [None, None], signals=[signal.SIGUSR1])
    assert [(c.code, c.reason) for c in chunks] == [(EXIT_STOPPED, "got SIGUSR1")] * 3
    assert signals_path(tmp_path / "chunks").read_text() == f"{int(signal.SIGUSR1)}\n"


def test_the_deadline_and_the_stop_file_stop_all_chunks(prepared, tmp_path):
    now = time.time()
    chunks, _ = run_chunks(prepared, tmp_path, [None, None], deadline=Deadline(now + 30, 60))
    assert {chunk.reason for chunk in chunks} == {"the deadline is near"}
    (prepared.run_dir / "stop").touch()
    chunks, _ = run_chunks(prepared, tmp_path, [None, None])
    assert all("stop is there" in chunk.reason for chunk in chunks)


@pytest.mark.parametrize(
    ("changes", "rows", "chunks"),
    [
        ({}, None, 8),
        ({}, 5_000, 5),
        ({}, 10, 2),
        ({"chunks": 100}, 10, 100),
        ({"workers": 256}, None, 256),
    ],
)
def test_workers_get_some_chunks_each_and_no_small_ones(changes, rows, chunks):
    assert chunk_count(msgspec.structs.replace(HERE, **changes), rows) == chunks


def test_rows_are_counted_by_size_and_by_what_was_asked_for(prepared):
    source = open_input(prepared)
    assert 8 <= estimated_rows(source, prepared.options) <= 12
    assert estimated_rows(source, replace(prepared.options, limit=3)) == 3
    source.close()


def test_limits_are_shared_by_the_chunks_that_run_at_once(prepared):
    parts = part_options(prepared, 6, 2)
    assert [part.overrides["limits.concurrency"] for part in parts] == [3] * 6
    assert [part.shard for part in parts] == [f"{n}/6" for n in range(1, 7)]


# --- the worker's side ------------------------------------------------------------------------


@pytest.fixture
def task(fs, job_dir, tmp_path):
    write_job(job_dir, fs.url, 12, results=NO_TABLES, limits={"concurrency": 3})
    options = RunOptions(
        job=Path("job.yaml"), cwd=job_dir, shard="1/1", progress="worker", tables=False
    )
    folder = tmp_path / "chunks"
    folder.mkdir()
    run_dir = job_dir / "runs" / "job"
    return ChunkTask(
        encode_options(options), str(run_dir), "1-of-1", str(folder), {"FROM_HEAD": "1"}
    )


def test_a_chunk_is_done_by_a_process_of_its_own(fs, task, job_dir):
    end = msgspec.json.decode(run_chunk(task), type=ChunkState)
    assert end.code == 0, end
    assert end.state.ok == 12
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(12))


def test_a_chunk_does_not_begin_once_there_is_a_signal(fs, task):
    signals_path(Path(task.folder)).write_text("10\n")
    end = msgspec.json.decode(run_chunk(task), type=ChunkState)
    assert end.code == EXIT_STOPPED
    assert fs.requests == []
    assert read_state(Path(task.folder), task.part) is None


def test_without_parsl_one_line_says_what_to_install(job_dir, bagent, monkeypatch):
    write_job(job_dir, "http://127.0.0.1:9/v1", 3)
    monkeypatch.setitem(sys.modules, "parsl", None)
    done = bagent(["run", "job.yaml", "--executor", "parsl"])
    assert done.code == 2
    assert done.err == (
        "bagent: error: --executor parsl needs Parsl, which is not installed"
        " (pip install 'parsl>=2026.10')\n"
    )
    assert not (job_dir / "runs").exists()


# --- with Parsl itself ------------------------------------------------------------------------

RUN = ["run", "job.yaml", "--progress", "plain", "--executor", "parsl", "--workers", "2"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_parsl_every_row_is_answered_once_and_told_once(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 60, cluster={"chunks": 4})
    done = bagent(RUN, env={"MY_KEY": "never-on-a-disk"}, timeout=100)
    assert done.code == 0, done.err
    assert len(fs.requests) == 60
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(60))
    assert "rows        60 rows: 60 ok, 0 failed" in done.err
    assert "4 chunks, 2 at once on this machine" in done.err
    assert (job_dir / "runs/job/results.parquet").exists()
    files = [path for path in (job_dir / "runs").rglob("*") if path.is_file()]
    assert [path for path in files if b"never-on-a-disk" in path.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_parsl_a_signal_stops_all_and_the_same_command_goes_on(fs, job_dir, bagent):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 4}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(4, timeout=100)
        running.send_to_group(signal.SIGTERM)  # Parsl's own processes too, as a scheduler does
        first = running.finish(100)
    assert first.code == EXIT_STOPPED, first.err
    assert "got SIGTERM" in first.err
    assert owners(job_dir / "runs/job") == {}
    fs.release()
    fs.set_script({"*": [echo()]})
    done = bagent(RUN, timeout=100)
    assert done.code == 0, done.err
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(40))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_parsl_a_killed_worker_loses_no_row_and_repeats_none(fs, job_dir):
    fs.set_script({"*": [slow(0.3, echo())]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 4}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(8, timeout=100)
        child = owners(job_dir / "runs/job")["1-of-2"].pid
        worker = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)
        done = running.finish(100)
    assert done.code == 0, done.err
    assert "chunk 1-of-2 was lost" in done.err
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(40))
    answered = [
        line["id"] for line in journal_lines(job_dir / "runs/job") if "output_sha256" in line
    ]
    assert max(Counter(answered).values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_parsl_nothing_is_left_behind_when_the_first_process_is_killed(fs, job_dir, bagent):
    fs.set_script({"*": [slow(0.3, echo())]})
    write_job(job_dir, fs.url, 400, limits={"concurrency": 2}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(8, timeout=100)
        running.send(signal.SIGKILL)
        running.finish()
    end = time.monotonic() + 110
    while left := _working_in(job_dir):
        assert time.monotonic() < end, left
        time.sleep(0.5)
    fs.set_script({"*": [echo()]})
    done = bagent(RUN, timeout=100)
    assert done.code == 0, done.err
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(400))
    assert len(fs.requests) == 400


def _working_in(folder):
    """The processes whose current folder this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text().replace("\0", " ")[:200])
    return found
