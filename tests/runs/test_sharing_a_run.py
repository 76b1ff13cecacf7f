"""Who may work on a run, what counts as finished, and how a run ends when others hold it up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from bagent.runs.result_lines import StdoutWriter
from bagent.store.lock import LockRenewer, RunLock, owner_path, read_owner
from support.cli import Running, clean_env
from support.jobs import results_by_id, write_job
from support.replies import echo, gated, ok, ok_tools, tool_call
from support.run_outcomes import NO_TABLES, RUN

pytestmark = pytest.mark.slow  # each test runs the command several times


def test_rows_that_parts_finished_are_sent_by_no_other_division(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 20, results=NO_TABLES)
    for part in ("1/2", "2/2"):
        assert bagent([*RUN, "--shard", part]).code == 0
    assert len(fs.requests) == 20
    assert bagent(RUN).code == 0
    assert bagent([*RUN, "--shard", "1/3"]).code == 0
    assert len(fs.requests) == 20
    assert len(results_by_id(job_dir)) == 20


def test_a_part_is_refused_while_another_division_is_at_work(fs, job_dir, bagent):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 4, results=NO_TABLES)
    with Running(RUN, job_dir) as whole:
        fs.wait_for(4)
        part = bagent([*RUN, "--shard", "1/2"])
        assert part.code == 2
        assert str(whole.process.pid) in part.err
        fs.release()
        assert whole.finish().code == 0
    assert len(fs.requests) == 4


def test_a_job_may_pass_tools_on_and_else_wants_an_answer(fs, job_dir, bagent):
    call = tool_call("weigh", '{"kg": 3}')
    fs.set_script({"r1": [ok_tools(call), ok("3 kg")], "r2": [ok("2 kg")]})
    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    assert bagent(RUN).code == 0
    assert results_by_id(job_dir)["r1"]["text"] == "3 kg"
    fs.set_script({"*": [ok_tools(call)]})
    tools = {"tools": [{"type": "function", "function": {"name": "weigh"}}]}
    write_job(job_dir, fs.url, 1, results=NO_TABLES, sampling={"extra": tools})
    assert bagent([*RUN, "--fresh"]).code == 0
    row = results_by_id(job_dir)["r1"]
    assert (row["status"], row["output"]) == ("ok", {"tool_calls": [call]})


def test_a_signal_before_the_first_piped_row_is_a_stop_in_good_order(fs, job_dir):
    write_job(job_dir, fs.url, None, input=None)
    with Running([*RUN, "-i", "-"], job_dir) as running:
        owner = job_dir / "runs/job/owner.json"
        while not owner.exists():
            assert running.process.poll() is None, running.err
        running.send(signal.SIGTERM)
        assert running.finish().code == 75
    assert not owner.exists()


def test_a_reader_that_stops_reading_cannot_hold_a_stopped_run(fs, job_dir):
    fs.set_script({"*": [ok("x" * 20_000)]})
    write_job(job_dir, fs.url, 60, results=NO_TABLES)
    command = [sys.executable, "-m", "bagent", *RUN, "-o", "-"]
    child = subprocess.Popen(
        command,
        cwd=job_dir,
        env=clean_env(job_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        journal = job_dir / "runs/job/journal/rows-all-000001.jsonl"
        _until(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 60)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 75
    finally:
        child.kill()
        child.communicate()
    assert len(results_by_id(job_dir)) == 60


def test_an_owner_is_renewed_by_a_thread_and_learns_that_it_lost_the_run(tmp_path: Path):
    now = 1000.0
    owner = RunLock.acquire(tmp_path, "all", clock=lambda: now)
    renewer = LockRenewer(owner, interval=0.005)
    renewer.start()
    now += 20
    path = owner_path(tmp_path, "all")
    _until(lambda: (record := read_owner(path)) is not None and record.time == 1020.0)
    other = read_owner(path)
    assert other is not None
    other.token = "another"
    path.write_bytes(msgspec.json.encode(other))
    now += 20
    _until(lambda: renewer.lost is not None)
    renewer.stop()
    assert "taken this run over" in str(renewer.lost)


def _until(true) -> None:
    """Wait for a thread, at most ten seconds."""
    tick = threading.Event()
    for _ in range(2000):
        if true():
            return
        tick.wait(0.005)
    raise AssertionError("it did not happen in ten seconds")


def test_a_slow_reader_of_stdout_gets_every_line_in_order():
    async def main() -> bytes:
        reader, writer = os.pipe()
        lines = StdoutWriter(writer, lambda _: None)

        def read() -> bytes:
            pieces = []
            while piece := os.read(reader, 512):
                pieces.append(piece)
            return b"".join(pieces)

        reading = asyncio.create_task(asyncio.to_thread(read))
        for number in range(30_000):
            lines.put(b"%d" % number)
            await lines.wait_for_room()
        await lines.finish()
        os.close(writer)
        found = await reading
        os.close(reader)
        return found

    assert asyncio.run(main()).split() == [b"%d" % number for number in range(30_000)]
