"""Processes that share a run: every row once, one display, one end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bagent.errors import NeedsPerson
from bagent.observe.progress import NoProgress
from bagent.runs.context import RunOptions, prepare
from bagent.runs.parallel.worker import decode_options, encode_options
from bagent.runs.parallel.workers import Worker, finish_parts, part_options
from bagent.servers.fleet_factory import LimitShare
from bagent.store.lock import owners
from support.cli import Running
from support.jobs import results, results_by_id, rows, write_job, write_rows
from support.replies import echo, slow
from support.run_outcomes import NO_TABLES

pytestmark = pytest.mark.slow  # each test starts several processes

RUN = ["run", "job.yaml", "--progress", "plain", "--workers", "3"]


def ids(count):
    return sorted(row["id"] for row in rows(count))


def test_every_row_is_answered_once_and_told_once(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 60)
    done = bagent(RUN)
    assert done.code == 0, done.err
    assert len(fs.requests) == 60
    assert sorted(results_by_id(job_dir)) == ids(60)
    assert done.err.count("ended       finished") == 1
    assert "rows        60 rows: 60 ok, 0 failed" in done.err
    assert (job_dir / "runs/job/results.parquet").exists()
    again = bagent(RUN)
    assert again.code == 0
    assert "rows        60 rows: 60 ok, 0 failed; this start: 0 sent" in again.err
    assert len(fs.requests) == 60


def test_edited_rows_have_their_new_answers_only(fs, job_dir, bagent):
    """Edited, a row is of another worker's part most times."""
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 12, results=NO_TABLES)
    assert bagent(RUN).code == 0
    write_rows(job_dir / "rows.jsonl", [row | {"text": "edited"} for row in rows(12)])
    assert bagent(RUN).code == 0
    found = list(results(job_dir))
    assert sorted(row["id"] for row in found) == ids(12)
    assert {row["text"] for row in found} == {f"id={name} edited" for name in ids(12)}


def test_a_worker_that_is_killed_is_started_again(fs, job_dir):
    fs.set_script({"*": [slow(0.2, echo())]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 4}, results=NO_TABLES)
    with Running([*RUN[:-1], "2"], job_dir) as running:
        fs.wait_for(8)
        victim = owners(job_dir / "runs/job")["1-of-2"].pid
        os.kill(victim, signal.SIGKILL)
        done = running.finish()
    assert done.code == 0, done.err
    assert "a worker was killed by signal 9" in done.err
    assert sorted(results_by_id(job_dir)) == ids(40)


def test_workers_end_in_good_order_when_the_first_process_is_killed(fs, job_dir, bagent):
    fs.set_script({"*": [slow(0.2, echo())]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 4}, results=NO_TABLES)
    with Running([*RUN[:-1], "2"], job_dir) as running:
        fs.wait_for(8)
        running.send(signal.SIGKILL)
        running.finish()
    fs.set_script({"*": [echo()]})
    done = bagent([*RUN[:-1], "2"])
    assert done.code == 0, "the next start waits for the workers that the killed process left"
    assert sorted(results_by_id(job_dir)) == ids(40)
    assert len(fs.requests) == 40


@pytest.mark.parametrize(
    ("more", "words"),
    [(["-i", "-"], "rows from stdin"), (["-o", "-"], "prints one stream")],
)
def test_what_cannot_be_shared_is_refused(fs, job_dir, bagent, more, words):
    write_job(job_dir, fs.url, 3)
    done = bagent([*RUN, *more])
    assert done.code == 2
    assert words in done.err


@pytest.fixture
def prepared(job_dir):
    limits = {"concurrency": 7, "rpm": 60}
    write_job(job_dir, "http://127.0.0.1:9/v1", 3, limits=limits)

    def make(**more):
        options = RunOptions(job=Path("job.yaml"), cwd=job_dir, **more)
        return prepare(options)

    return make


def test_limits_are_shared_and_sum_up_to_what_was_asked_for(prepared):
    parts = part_options(prepared(), 3)
    assert [part.overrides["limits.concurrency"] for part in parts] == [3, 2, 2]
    assert sum(part.overrides["limits.rpm"] for part in parts) == 60
    assert [part.shard for part in parts] == ["1/3", "2/3", "3/3"]
    assert len(part_options(prepared(), 12)) == 7


@pytest.mark.parametrize(("limit", "count"), [(3, 2), (7, 3), (5, 4), (4, 2)])
def test_an_endpoints_limit_is_shared_and_no_worker_has_less_than_others(prepared, limit, count):
    parts = part_options(prepared(sets=(f"limits.per_endpoint={limit}",)), count)
    shares = [
        [LimitShare(part.limit_part, part.limit_parts).of(limit, n) for n in range(12)]
        for part in parts
    ]
    assert [sum(column) for column in zip(*shares, strict=True)] == [limit] * 12
    assert len({sum(row) for row in shares}) == 1
    assert max(map(max, shares)) - min(map(min, shares)) <= 1


def test_a_part_of_the_rows_may_itself_be_shared(prepared):
    parts = part_options(prepared(shard="2/3"), 2)
    taken = {
        key
        for part in parts
        for key in range(60)
        if key % int(part.shard.partition("/")[2]) == int(part.shard.partition("/")[0]) - 1
    }
    assert taken == {key for key in range(60) if key % 3 == 1}


def test_options_are_the_same_on_the_other_side(prepared):
    options = part_options(prepared(inputs=("rows.jsonl",), sets=("answers=2",)), 2)[0]
    assert decode_options(encode_options(options)) == replace(options, env=dict(os.environ))


def test_an_end_before_any_state_is_told_by_its_reason(prepared):
    worker = Worker(RunOptions(job=None), code=76, reason="no workers", action="look at x")
    with pytest.raises(NeedsPerson, match="no workers") as told:
        finish_parts(prepared(), [worker], NoProgress(), None)
    assert told.value.hint == "look at x"


def test_a_worker_whose_options_are_wrong_says_so(job_dir):

    line = encode_options(RunOptions(job=Path("none.yaml"), cwd=job_dir))
    command = [sys.executable, "-m", "bagent.runs.parallel.worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(line)
        process.stdin.flush()
        said = process.stderr.read()
        assert process.wait(30) == 2
    event = msgspec.json.decode(said.splitlines()[-1])
    assert event["event"] == "error"
    assert "none.yaml" in event["text"]
