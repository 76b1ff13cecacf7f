"""What a run says at each ending, word for word: summary, ``--progress json`` and ``status``.

``UPDATE_GOLDEN=1 pytest tests/runs/test_endings.py`` writes the files anew; read their diff.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import threading
from pathlib import Path

import pytest

from bagent.fleet.fleet import Fleet
from support.cli import Running
from support.fake_server import FakeServer
from support.http_servers import refusing_port
from support.in_process import meanwhile
from support.jobs import wait_for_text, write_job
from support.jumping_loop import turns
from support.replies import echo, error_body, gated, refused, slow, status
from support.run_outcomes import CUT

pytestmark = pytest.mark.database

GOLDEN = Path(__file__).parent / "golden"
RUN = ["run", "job.yaml", "--progress", "json"]
NO = status(400, error_body(400, "no"))

MASKS = [
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "DATE"),
    (re.compile(r"(?m)^(started|last|rows_per_s|latency |time  ).*"), r"\1 ..."),
    (re.compile(r"-?[\d,.]+ completion tokens/s"), "N completion tokens/s"),
    (re.compile(r"\.tables-[^/]+/"), ".tables/"),
    (re.compile(r"the deadline is \d+ s away"), "the deadline is N s away"),
]
VARYING = (
    *("errors", "quiet_s", "elapsed_s", "eta_s", "latency", "ttft", "recent", "overall"),
    *("fleet", "feed"),
)


def masked(text, folder):
    text = text.replace(str(folder.resolve()), "FOLDER").replace(str(folder), "FOLDER")
    for pattern, put in MASKS:
        text = pattern.sub(put, text)
    return text


def told(bagent, done, folder):
    """The three outputs of an ended run, as one text."""
    events = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    end = next((event for event in events if event["event"] == "end"), {})
    end = {name: value for name, value in end.items() if name not in VARYING}
    closing = next(event for event in events if event["event"] == "summary")
    state = bagent(["status", "job"])
    assert state.code == 0, state.err
    fields = [f"{name}: {json.dumps(value)}" for name, value in end.items()]
    parts = [f"exit code {done.code}", *closing["lines"], "", "--- status", state.out.rstrip()]
    text = masked("\n".join([*parts, "", "--- end", *fields]), folder)
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(lines) + "\n", closing["lines"]


def check(bagent, done, name):
    """Compare with the golden file; return the command of the last line."""
    text, lines = told(bagent, done, bagent.keywords["cwd"])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs"
    assert lines[0].startswith("rows  ")
    label, command = lines[-1].split(maxsplit=1)
    assert label == "next"
    words = shlex.split(command.removesuffix(" | head"))
    assert words[0] == "bagent"
    return words[1:]


def test_all_rows_ok(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    command = check(bagent, bagent(RUN), "all_ok")
    assert len(bagent(command).lines()) == 3


def test_some_rows_failed(fs, job_dir, bagent):
    fs.set_script({"r1": [NO], "r2": [CUT], "*": [echo()]})
    write_job(job_dir, fs.url, 3)
    command = check(bagent, bagent(RUN), "some_failed")
    fs.set_script({"*": [echo()]})
    assert (bagent(command).code, len(fs.requests)) == (0, 5)


def test_resumed(fs, job_dir, bagent):
    fs.set_script({"r1": [NO], "*": [echo()]})
    write_job(job_dir, fs.url, 4)
    bagent([*RUN, "--limit", "2"])
    command = check(bagent, bagent(RUN), "resumed")
    fs.set_script({"*": [echo()]})
    assert (bagent(command).code, len(fs.requests)) == (0, 5)


def test_stopped_by_the_deadline(fs, job_dir, bagent, run_clock, monkeypatch):
    fs.set_script({"r1": [echo()], "*": [gated(echo())]})
    write_job(job_dir, fs.url, 3, limits={"concurrency": 1})

    drain, draining = Fleet.drain, threading.Event()

    async def note_drain(fleet, seconds):
        waiting = asyncio.ensure_future(drain(fleet, seconds))
        await turns()
        draining.set()
        return await waiting

    def skip_to_deadline():
        fs.wait_for(2)
        run_clock.skip(101)
        assert draining.wait(20)
        run_clock.skip(100)

    monkeypatch.setattr(Fleet, "drain", note_drain)

    with meanwhile(skip_to_deadline):
        done = bagent([*RUN, "--deadline", "200s", "--deadline-margin", "100s"])
    command = check(bagent, done, "deadline")
    fs.set_script({"*": [echo()]})
    command[command.index("--deadline") + 1] = "none"  # the same would stop as early again
    again = bagent(command)
    assert (again.code, fs.count("r1")) == (0, 1), again.err


def test_stopped_by_the_budget(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    prices = {"input": 1000, "output": 1000}
    write_job(job_dir, fs.url, 3, limits={"concurrency": 1}, prices=prices)
    done = bagent([*RUN, "--budget", "0.085"])
    command = check(bagent, done, "budget")
    command[command.index("--budget") + 1] = "100"
    again = bagent(command)
    assert (again.code, fs.count("r1")) == (0, 1), again.err


def test_a_deadline_after_the_last_server_died_says_so(job_dir, bagent, run_clock):
    def kill_and_skip_to_deadline():
        own.wait_for(2)
        own.stop()
        wait_for_text(job_dir, "runs/job/run.log", "does not answer")
        run_clock.skip(198)

    with FakeServer() as own:
        own.set_script({"*": [slow(0.2, echo())]})
        write_job(job_dir, own.url, 99, limits={"concurrency": 1})
        limits = ["--deadline", "200s", "--deadline-margin", "3s", "--wait-hosts", "10m"]
        with meanwhile(kill_and_skip_to_deadline):
            done = bagent([*RUN, *limits])
        own.start()
    assert done.code == 75, done.err
    assert "the deadline is 3 s away, and no endpoint works: cannot connect to" in done.err


def test_a_pipe_is_part_of_the_command_that_resumes(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3, prices={"input": 1000, "output": 1000})
    rows = (job_dir / "rows.jsonl").read_bytes()
    done = bagent([*RUN, "-i", "-", "--budget", "0.001"], stdin=rows)
    assert done.code == 76
    advice = "this command, with the same rows on standard input, resumes where the run stopped"
    assert advice in done.err


def test_a_budget_is_for_one_start_and_tells_what_others_spent(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    sampling = {"temperature": 0, "max_tokens": 1}
    prices = {"input": 1000, "output": 1000}
    write_job(job_dir, fs.url, 9, limits={"concurrency": 1}, prices=prices, sampling=sampling)
    first, second = (bagent([*RUN, "--budget", "0.12"]) for _ in range(2))
    assert (first.code, second.code) == (76, 76)
    assert "earlier starts spent" not in first.err
    assert "; earlier starts spent $0.0" in second.err
    for done in (first, second):
        assert "a budget is for one start: the same command may spend it again" in done.err
    assert 0 < fs.count("r1") <= 1 < len(fs.requests) < 9


@pytest.mark.process("signal")
def test_stopped_by_a_signal(fs, job_dir, bagent):
    fs.set_script({"r1": [echo()], "*": [gated(echo())]})
    write_job(job_dir, fs.url, 3, limits={"concurrency": 1})
    with Running(RUN, job_dir) as running:
        fs.wait_for(2)
        running.send(signal.SIGTERM)
        running.wait_for_err("waiting up to")
        fs.release()
        done = running.finish()
    command = check(bagent, done, "signal")
    fs.set_script({"*": [echo()]})
    again = bagent(command)
    assert (again.code, fs.count("r1")) == (0, 1), again.err


def test_stopped_by_an_outage(fs, job_dir, bagent):
    with refusing_port() as port:
        write_job(job_dir, f"http://127.0.0.1:{port}/v1", 3)
        done = bagent([*RUN, "--wait-hosts", "1s"])
    command = check(bagent, done, "outage")
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert bagent(command).code == 0


def test_stopped_since_the_first_rows_failed_alike(fs, job_dir, bagent):
    fs.set_script({"*": [NO]})
    write_job(job_dir, fs.url, 60, limits={"concurrency": 1})
    command = check(bagent, bagent(RUN), "early_failures")
    fs.set_script({"*": [echo()]})
    again = bagent(command)
    assert (again.code, fs.count("r60")) == (0, 1), "the rejected rows are sent again"


def test_stopped_since_the_model_refused_every_row(fs, job_dir, bagent):
    fs.set_script({"*": [refused()]})
    write_job(job_dir, fs.url, 60, limits={"concurrency": 1})
    command = check(bagent, bagent(RUN), "all_refused")
    fs.set_script({"*": [echo()]})
    assert (bagent(command).code, fs.count("r1")) == (0, 2), "the refused rows are sent again"


def test_no_tables(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    blocked = job_dir / "runs" / "job" / "results.parquet"
    blocked.mkdir(parents=True)
    command = check(bagent, bagent(RUN), "no_tables")
    blocked.rmdir()
    assert (bagent(command).code, len(fs.requests)) == (0, 3)
    assert blocked.is_file()
