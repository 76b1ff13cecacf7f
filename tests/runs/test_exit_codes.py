"""Each way a run can end, reached by the real command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from bagent.runs.run_store import RunStore
from bagent.runs.session import TICK_SECONDS, RunSession
from bagent.store.lock import RunLock, owner_path
from support.cli import Running, run_here
from support.jobs import results_by_id, run_json, write_job
from support.replies import echo, error_body, gated, hang, ok, status
from support.run_outcomes import NO_TABLES, RUN, shell


@pytest.mark.process("concurrent")
def test_a_live_owner_is_2_naming_it(fs, job_dir):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 3, results=NO_TABLES)
    with Running(RUN, job_dir) as first:
        fs.wait_for(3)
        second = run_here(RUN, job_dir)
        assert second.code == 2
        assert str(first.process.pid) in second.err
        fs.release()
        assert first.finish().code == 0


def test_a_full_disk_is_74_and_the_same_command_goes_on(fs, job_dir, bagent, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        fs.set_script({"*": [ok("x" * 3000)]})
        write_job(job_dir, fs.url, 60, results=NO_TABLES)
        command = [*RUN, "-o", str(disk / "run")]
        done = bagent(command)
        assert done.code == 74, done.err
        assert "Traceback" not in done.err
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        again = bagent(command)
        assert again.code == 0, again.err
        lines = (disk / "run/journal/rows-all-000001.jsonl").read_bytes().splitlines()
        ids = [msgspec.json.decode(line)["id"] for line in lines]
        assert len(ids) == len(set(ids)) == 60
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


@pytest.mark.parametrize(
    ("typed", "env", "code", "words"),
    [
        (["--deadline", "2020-01-01T00:00:00Z"], {}, 2, "passed "),
        ([], {"BAGENT_DEADLINE": "@9"}, 75, "ago, by BAGENT_DEADLINE"),
    ],
)
def test_a_deadline_that_has_passed_sends_nothing_and_is_named(
    fs, job_dir, bagent, typed, env, code, words
):
    write_job(job_dir, fs.url, 3)
    done = bagent([*RUN, *typed], env=env)
    assert done.code == code, done.err
    assert words in done.err
    assert "--deadline none" in done.err
    assert fs.requests == []


def test_a_stale_end_of_a_batch_job_and_a_short_deadline_let_rows_run(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 3)
    done = bagent([*RUN, "--limit", "1"], env={"SLURM_JOB_ID": "9", "SLURM_JOB_END_TIME": "0"})
    assert done.code == 0, done.err
    assert "SLURM_JOB_END_TIME names a time that is over" in done.err
    assert bagent([*RUN, "--deadline", "45s"]).code == 0


def test_a_run_writes_and_shows_nothing_while_its_servers_stop(fs, job_dir, bagent, monkeypatch):
    ticks, with_servers = [], RunSession._with_servers

    async def stop_slowly():
        monkeypatch.setattr(RunStore, "tick", lambda store: ticks.append(store))
        await asyncio.sleep(2.5 * TICK_SECONDS)

    async def with_slow_servers(session, stack):
        stack.push_async_callback(stop_slowly)
        return await with_servers(session, stack)

    monkeypatch.setattr(RunSession, "_with_servers", with_slow_servers)
    write_job(job_dir, fs.url, 1, results=NO_TABLES)
    assert bagent(RUN).code == 0
    assert ticks == []


def test_more_hosts_than_the_hostfile_has_is_2_and_says_so(fs, job_dir, bagent):
    (job_dir / "hosts.txt").write_text(f"{fs.address}\n")
    write_job(job_dir, "", 3, backend="vllm", hostfile="hosts.txt")
    done = bagent([*RUN, "--min-hosts", "2"])
    assert done.code == 2, done.err
    assert "--min-hosts 2: 1 endpoint is in hosts.txt (--min-hosts 1 waits for all)" in done.err
    assert fs.requests == []


@pytest.mark.process("signal")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_75_and_keeps_what_is_in_flight(fs, job_dir, number):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 20, limits={"concurrency": 4}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(4)
        running.send(number)
        running.wait_for_err("waiting up to")
        fs.release()
        assert running.finish().code == 75
    assert len(fs.requests) == 4
    assert len(results_by_id(job_dir)) == 4
    assert run_json(job_dir / "runs/job")["starts"][-1]["exit_code"] == 75


def test_a_signal_while_the_run_is_opened_is_75_and_unlocks_it(fs, job_dir, bagent, monkeypatch):
    acquire = RunLock.acquire

    def signalled(*args, **options):
        owner = acquire(*args, **options)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)  # the handlers of Python run between two of its instructions
        return owner

    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    with monkeypatch.context() as patch:
        patch.setattr(RunLock, "acquire", signalled)
        stopped = bagent(RUN)
    assert stopped.code == 75
    assert "got SIGTERM before anything was sent" in stopped.err
    assert not owner_path(job_dir / "runs/job", "all").exists()
    assert run_json(job_dir / "runs/job")["starts"][-1]["exit_code"] == 75
    assert fs.requests == []


@pytest.mark.process("signal")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_second_signal_does_not_wait_for_what_is_in_flight(fs, job_dir, number, code):
    fs.set_script({"*": [hang(60)]})
    write_job(job_dir, fs.url, 4, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(4)
        running.send(number)
        running.wait_for_err("waiting up to")
        running.send(number)
        assert running.finish().code == code
    assert results_by_id(job_dir) == {}


@pytest.mark.process("pipe")
@pytest.mark.parametrize(
    ("options", "reader", "printed"), [([], "head -3", 3), (["--ordered"], "true", 0)]
)
def test_a_closed_stdout_is_75_and_the_rows_are_kept(fs, job_dir, options, reader, printed):
    """In order, all lines wait for the first row, so that nothing is left to stop then."""
    fs.set_script({"r1": [echo(delay=0.5)], "*": [echo()]})
    rows = 20 if options else 200
    write_job(job_dir, fs.url, rows, limits={"concurrency": 2}, results=NO_TABLES)
    command = [sys.executable, "-m", "bagent", *RUN, "-o", "-", *options]
    done = shell(f"{' '.join(command)} | {reader}; echo ${{PIPESTATUS[0]}} > code", job_dir)
    assert len(done.stdout.splitlines()) == printed
    assert "Traceback" not in done.stderr
    assert (job_dir / "code").read_text().strip() == "75", done.stderr
    assert ("stdout was closed" in done.stderr) >= bool(options)
    finished = len(results_by_id(job_dir))
    assert max(printed, 1) <= finished <= rows
    assert len(fs.requests) == finished
    if options:  # all rows are finished: a reader that leaves stops nothing
        shell(f"{' '.join(command)} | true; echo ${{PIPESTATUS[0]}} > code", job_dir)
        assert (job_dir / "code").read_text().strip() == "75"
        assert run_here([*RUN, "-o", "-", *options], job_dir).code == 0
        shell(f"{' '.join(command)} | head -1; echo ${{PIPESTATUS[0]}} > code", job_dir)
        assert (job_dir / "code").read_text().strip() == "0"


def test_a_spent_quota_is_76(fs, job_dir, bagent):
    body = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    fs.set_script({"*": [status(429, body)]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 2})
    done = bagent(RUN)
    assert done.code == 76, done.err
    assert len(fs.requests) <= 4


def test_first_rows_that_all_fail_alike_are_76_unless_told_otherwise(fs, job_dir, bagent):
    fs.set_script({"*": [status(400, error_body(400, "no such thing"))]})
    write_job(job_dir, fs.url, 80, limits={"concurrency": 4})
    assert bagent(RUN).code == 76
    assert len(fs.requests) < 70
    assert bagent([*RUN, "--no-canary", "--retry", "all"]).code == 1


def test_rows_refused_for_the_key_are_sent_again_after_76(fs, job_dir, bagent):
    lasting = status(400, error_body(400, "no such thing"))
    refused = status(401, error_body(401, "bad key"))
    fs.set_script({"r1": [lasting], "r2": [refused], "r3": [refused], "*": [echo()]})
    limits = {"concurrency": 1, "retries": 0, "stop_after_failures": 3}
    write_job(job_dir, fs.url, 9, limits=limits)
    assert bagent(RUN).code == 76
    fs.set_script({"*": [echo()]})
    assert bagent(RUN).code == 1, "r1 failed for good before, and is left until the run has ended"
    found = results_by_id(job_dir)
    assert [name for name, row in found.items() if row["status"] != "ok"] == ["r1"]


@pytest.mark.process("workers")
def test_tables_that_workers_cannot_make_are_74(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 3)
    blocked = job_dir / "runs" / "job" / "results.parquet"
    blocked.mkdir(parents=True)
    done = bagent(["run", "job.yaml", "--workers", "2"])
    assert done.code == 74, done.err
    assert "the tables could not be made" in done.err
    assert "3 ok" in done.err
    state = json.loads(bagent(["status", "job", "--json"]).out)
    assert (state["state"], state["exit_code"]) == ("stopped", 74)
    blocked.rmdir()
    again = bagent(["run", "job.yaml"])
    assert (again.code, len(fs.requests)) == (0, 3), again.err
    assert blocked.is_file()
    assert json.loads(bagent(["status", "job", "--json"]).out)["exit_code"] == 0


@pytest.mark.process("workers")
def test_the_exit_code_of_workers_is_that_of_all_their_rows(fs, job_dir, bagent):
    fs.set_script({"r1": [status(400)], "*": [echo()]})
    write_job(job_dir, fs.url, 4, results=NO_TABLES)
    allowed = ["run", "job.yaml", "--workers", "2", "--allow-failures", "25%"]
    assert bagent(allowed).code == 0
    assert json.loads(bagent(["status", "job", "--json"]).out)["exit_code"] == 0
