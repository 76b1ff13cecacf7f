"""Slots, time limits, kills and streams: what an agent does while its tools run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from support.agent_jobs import (
    agent_job,
    answers_in,
    calls,
    check_pairs,
    ran,
    runs_of,
)
from support.cli import Running
from support.fake_server import FakeServer
from support.jobs import parquet, results_by_id, wait_for_text, wait_until
from support.replies import delta, hang, ok, stream, usage_chunk

pytestmark = pytest.mark.slow  # tools and signals take their real time


def test_rows_that_wait_for_tools_are_open_only_up_to_a_multiple_of_the_slots(job_dir, bagent):
    with FakeServer({"*": [calls(("wait_for_gate", "{}")), ok("done")]}) as fs:
        tools = [{"python": "tools.py:wait_for_gate", "concurrency": 100}]
        agent_job(job_dir, fs.url, 30, limits={"concurrency": 1}, agent={"tools": tools})
        with Running(["run", "job.yaml"], job_dir) as running:
            fs.wait_for(4)
            time.sleep(1.0)  # others have the time to come too early
            most = len(fs.requests)
            (job_dir / "gate").touch()
            done = running.finish()
        assert done.code == 0, done.err
    assert 4 <= most <= 9


def test_the_row_s_limit_bounds_its_tools_too(job_dir, bagent):
    with FakeServer({"*": [calls(("nap", "{}"))]}) as fs:
        tools = [{"command": ["sleep", "30"], "name": "nap"}]
        agent_job(job_dir, fs.url, agent={"tools": tools}, limits={"row": "1s"})
        done = bagent(["run", "job.yaml"])
        assert done.code == 1, done.err
    row = results_by_id(job_dir)["r1"]
    assert (row["status"], row["error_kind"]) == ("failed", "timeout")
    assert "limits.row" in row["error"]


def test_a_call_that_a_kill_cut_short_is_reported_and_not_run_again(job_dir, bagent):
    turn = calls(("add", '{"a":1,"b":2}'), ("wait", '{"seconds":60}'))
    with FakeServer({"*": [turn, ok("never")]}) as fs:
        agent_job(job_dir, fs.url)
        bagent(["run", "job.yaml"], kill_at=lambda: wait_until((job_dir / "began").exists))
        fs.set_script({"*": [ok("looked after it")]})
        done = bagent(["run", "job.yaml"], timeout=30)
        assert done.code == 0, done.err
        assert len(fs.requests) == 2
        body = fs.requests[-1].body
    check_pairs(body)
    texts = answers_in(body)
    assert texts[-1].startswith("error: this call was started before the run was interrupted")
    assert "may have run" in texts[-1]
    assert ran(job_dir) in (["1+2"], [])  # it had ended, or begun, when the kill came; never twice
    table = parquet(job_dir / "runs/job", "tool_calls")
    assert "may_have_run" in [one["error"] for one in table]


def test_a_call_that_ended_before_a_kill_is_recorded_though_its_turn_was_not_whole(job_dir, bagent):
    def add_is_noted():
        wait_for_text(job_dir, "runs/job/journal/tools*.jsonl", '"add"')

    turn = calls(("add", '{"a":1,"b":2}'), ("wait", '{"seconds":60}'))
    with FakeServer({"*": [turn]}) as fs:
        agent_job(job_dir, fs.url, stream=False)
        bagent(["run", "job.yaml"], kill_at=add_is_noted)
        fs.set_script({"*": [ok("done")]})
        assert bagent(["run", "job.yaml"], timeout=30).code == 0
        assert answers_in(fs.requests[-1].body)[0] == "3"
    table = parquet(job_dir / "runs/job", "tool_calls")
    assert sorted((one["name"], one["error"]) for one in table) == [
        ("add", None),
        ("wait", "may_have_run"),
    ]


def test_a_call_without_side_effects_is_run_again_after_a_kill(job_dir, bagent):
    (job_dir / "note.txt").write_text("hello")
    tools = [{"builtin": "read_file", "root": "."}, {"python": "tools.py:wait"}]
    turn = calls(("read_file", '{"path":"note.txt"}'), ("wait", '{"seconds":60}'))
    with FakeServer({"*": [turn]}) as fs:
        agent_job(job_dir, fs.url, agent={"tools": tools}, stream=False)
        bagent(["run", "job.yaml"], kill_at=lambda: wait_until((job_dir / "began").exists))
        fs.set_script({"*": [ok("hello")]})
        assert bagent(["run", "job.yaml"], timeout=30).code == 0
        texts = answers_in(fs.requests[-1].body)
    assert "hello" in texts[0] and "may have run" in texts[1]


def test_a_changed_prompt_begins_anew(job_dir, bagent):
    with FakeServer({"*": [calls(("add", '{"a":1,"b":2}')), hang()]}) as fs:
        agent_job(job_dir, fs.url)
        bagent(["run", "job.yaml"], kill_at=lambda: fs.wait_for(2))
        fs.set_script({"*": [ok("anew")]})
        agent_job(job_dir, fs.url, prompt={"user": "id={{ id }} do it otherwise: {{ text }}"})
        assert bagent(["run", "job.yaml", "--on-change", "continue"]).code == 0
        assert len(fs.requests[-1].body["messages"]) == 1


def test_a_row_out_of_turns_begins_anew_by_the_printed_command(job_dir, bagent):
    with FakeServer({"*": [calls(("add", '{"a":1,"b":2}'))]}) as fs:
        agent_job(job_dir, fs.url, agent={"max_turns": 2})
        failed = bagent(["run", "job.yaml"])
        assert failed.code == 1
        fs.set_script({"*": [ok("better")]})
        _, command = failed.err.rsplit("bagent run ", 1)
        assert bagent(["run", *shlex.split(command)]).code == 0
        assert len(fs.requests[-1].body["messages"]) == 1
    assert results_by_id(job_dir)["r1"]["text"] == "better"


def test_sigterm_ends_tools_and_the_same_command_goes_on(job_dir, bagent):
    note = f"echo $$ > {job_dir}/noted && mv {job_dir}/noted {job_dir}/began"
    (job_dir / "nap.sh").write_text(f"#!/bin/sh\n{note}\nexec sleep 60\n")
    (job_dir / "nap.sh").chmod(0o755)
    tools = [{"command": ["./nap.sh"], "name": "nap"}]
    with FakeServer({"*": [calls(("nap", "{}")), ok("rested")]}) as fs:
        agent_job(job_dir, fs.url, agent={"tools": tools})
        with Running(["run", "job.yaml"], job_dir) as running:
            wait_until((job_dir / "began").exists)
            running.send(signal.SIGTERM)
            running.send(signal.SIGTERM)
            done = running.finish(30)
        assert done.code in (75, 130), done.err
        assert not (Path("/proc") / (job_dir / "began").read_text().strip()).exists()
        fs.set_script({"*": [ok("rested")]})
        assert bagent(["run", "job.yaml"]).code == 0
        assert "may have run" in answers_in(fs.requests[-1].body)[0]


WAIT = {"name": "wait", "arguments": '{"seconds":'}
ADD = {"name": "add", "arguments": '{"a":1,"b":2}'}
FIRST = delta(tool_calls=[{"index": 0, "id": "c0", "type": "function", "function": WAIT}])
REST = delta(tool_calls=[{"index": 0, "type": "function", "function": {"arguments": "0.1}"}}])
SECOND = delta(tool_calls=[{"index": 1, "id": "c1", "type": "function", "function": ADD}])
END = delta(None, "tool_calls")


def test_a_tool_starts_as_soon_as_its_call_is_whole_in_the_stream(job_dir, bagent):
    slow = stream([FIRST, REST, SECOND, delta(" "), delta(" "), END, usage_chunk()], gap=0.7)
    with FakeServer({"*": [slow, ok("done")]}) as fs:
        agent_job(job_dir, fs.url)
        assert bagent(["run", "job.yaml"]).code == 0
        ended = fs.requests[0].answered
        assert answers_in(fs.requests[1].body) == ["waited 0.1", "3"]
        runs = runs_of(job_dir)
        asked = fs.requests[1].received
    assert [run["words"] for run in runs] == ["waited 0.1", "1+2"]
    assert ended is None or asked >= ended
    # The stream goes on for 2.8 s after the first call is whole, and for 2.1 s after the second.
    (row,) = parquet(job_dir / "runs/job", "attempts")[:1]
    assert runs[1]["ended"] < row["done"]


def test_what_ran_before_a_stream_was_cut_is_kept_and_not_run_again(job_dir, bagent):
    cut = stream([FIRST, REST, SECOND], end="cut", gap=0.3)
    whole = calls(("wait", '{"seconds": 0.1}'), ("add", '{"b":2,"a":1}'))
    with FakeServer({"*": [cut, whole, ok("done")]}, allow_faults=True) as fs:
        agent_job(job_dir, fs.url)
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        assert answers_in(fs.requests[-1].body) == ["waited 0.1", "3"]
    assert sorted(ran(job_dir)) == ["1+2", "waited 0.1"]


def test_what_ran_before_a_cut_and_is_asked_for_no_more_is_told_to_the_model(job_dir, bagent):
    cut = stream([SECOND], end="cut", gap=0.3)
    with FakeServer({"*": [cut, calls(("add", '{"a":5,"b":5}')), ok("done")]}) as fs:
        agent_job(job_dir, fs.url)
        assert bagent(["run", "job.yaml"]).code == 0
        body = fs.requests[-1].body
    check_pairs(body)
    assert answers_in(body) == ["3", "10"]
    assert sorted(ran(job_dir)) == ["1+2", "5+5"]


def test_a_call_begun_in_a_stream_that_a_kill_cut_is_told_to_the_model(job_dir, bagent):
    held = stream([SECOND, delta(" "), END], gap=5.0)
    with FakeServer({"*": [held]}) as fs:
        agent_job(job_dir, fs.url)
        bagent(["run", "job.yaml"], kill_at=lambda: wait_until((job_dir / "ran.jsonl").exists))
        fs.set_script({"*": [ok("done")]})
        assert bagent(["run", "job.yaml"]).code == 0
        body = fs.requests[-1].body
    check_pairs(body)
    assert "may have run" in answers_in(body)[0]
    assert ran(job_dir) == ["1+2"]


ODD = '''
import multiprocessing, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

print("imported")

def speak() -> str:
    """Print."""
    print("spoken")
    subprocess.run(["echo", "by a program"], check=True)
    return "said"

def leave(how: str) -> str:
    """Leave something that does not end."""
    if how == "thread":
        ThreadPoolExecutor(1).submit(time.sleep, 300)
    else:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
        child.start()
        (Path(__file__).parent / "child").write_text(str(child.pid))
    return "left"
'''


def odd_job(folder: Path, url: str, function: str) -> None:
    """A job whose one tool is a function of the source above."""
    (folder / "odd.py").write_text(ODD)
    agent_job(folder, url, agent={"tools": [{"python": f"odd.py:{function}"}]})


def test_what_tools_print_does_not_stand_among_the_rows(job_dir, bagent):
    with FakeServer({"*": [calls(("speak", "{}")), ok("done")]}) as fs:
        odd_job(job_dir, fs.url, "speak")
        done = bagent(["run", "job.yaml", "-o", "-"])
    assert done.code == 0, done.err
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == ["done"]
    assert "spoken" in done.err and "by a program" in done.err


@pytest.mark.parametrize("how", ["thread", "process"])
def test_what_tools_left_running_does_not_hold_the_end_of_the_run(job_dir, bagent, how):
    turn = calls(("leave", json.dumps({"how": how})))
    with FakeServer({"*": [turn, ok("done")]}) as fs:
        odd_job(job_dir, fs.url, "leave")
        done = bagent(["run", "job.yaml"], timeout=60)
    assert done.code == 0, done.err
    assert "was not waited for" in done.err
    if how == "process":
        with pytest.raises(ProcessLookupError):
            os.kill(int((job_dir / "child").read_text()), 0)
