"""Failed tools are seen: in tool_calls, in the log, in the summary and in status."""

from __future__ import annotations

import json

import pytest

from support.agent_jobs import agent_job, calls
from support.fake_server import FakeServer
from support.jobs import results_by_id
from support.replies import ok

TOOLS = '''
import time

def lookup(name: str) -> str:
    """Look a name up."""
    raise ValueError("database is down")

def slow(name: str) -> str:
    """Return after a while."""
    time.sleep(0.1)
    return "fine"
'''


def job(folder, url, *functions, **agent):
    (folder / "own.py").write_text(TOOLS)
    tools = [{"python": f"own.py:{name}"} for name in functions]
    agent_job(folder, url, agent={"tools": tools, **agent})


def run(bagent):
    return bagent(["run", "job.yaml", "--progress", "plain"])


def test_a_failed_tool_is_told_with_its_line_in_every_output(job_dir, bagent):
    call = calls(("lookup", '{"name": "a"}'))
    with FakeServer({"*": [call, ok("done")]}) as fs:
        job(job_dir, fs.url, "lookup")
        done = run(bagent)
    assert done.code == 0, done.err
    error = 'ValueError: database is down (File "own.py", line 6, in lookup)'
    [row, *_] = bagent(["query", "job", "select * from tool_calls", "--format", "jsonl"]).lines()
    assert row["error"] == error
    rows = len(results_by_id(job_dir))
    assert (
        f"tools       {rows} calls, {rows} failed (lookup {rows})"
        in done.err.replace("1 calls", "1 call")
        or "tools       1 call, 1 failed (lookup 1)" in done.err
    )
    assert f"of lookup failed: {error}" in done.err
    log = (job_dir / "runs/job/run.log").read_text()
    assert "Traceback (most recent call last):" in log
    assert 'raise ValueError("database is down")' in log
    [state] = bagent(["status", "job", "--json"]).lines()
    assert state["tools"]["lookup"] == {"calls": rows, "failed": rows, "error": error}
    assert f"{rows} failed (lookup {rows})" in bagent(["status", "job"]).out


def test_a_tool_that_no_row_called_is_a_warning(job_dir, bagent):
    with FakeServer({"*": [ok("done")]}) as fs:
        job(job_dir, fs.url, "lookup", "slow")
        done = run(bagent)
    assert "tools       0 calls, 0 failed" in done.err
    assert "warning     no row called a tool: lookup, slow" in done.err


@pytest.mark.parametrize(("word", "code"), [("continue", 0), ("fail", 1)])
def test_the_job_says_whether_a_failed_tool_fails_its_row(job_dir, bagent, word, code):
    turn = calls(("slow", '{"name": "a"}'), ("lookup", '{"name": "a"}'))
    with FakeServer({"*": [turn, ok("done")]}) as fs:
        job(job_dir, fs.url, "lookup", "slow", on_tool_failure=word)
        done = run(bagent)
    assert done.code == code, done.err
    if word == "fail":
        [row, *_] = results_by_id(job_dir).values()
        assert (row["status"], row["error_kind"]) == ("failed", "tool")
        assert row["error"].startswith("tool lookup failed: ValueError: database is down (File")


def test_bad_arguments_of_the_model_do_not_fail_the_row(job_dir, bagent):
    turn = calls(("lookup", json.dumps({"nome": "a"})))
    with FakeServer({"*": [turn, ok("done")]}) as fs:
        job(job_dir, fs.url, "lookup", on_tool_failure="fail")
        assert run(bagent).code == 0


def test_a_call_without_a_name_is_described_as_such(job_dir, bagent):
    with FakeServer({"*": [calls(("", "{}")), ok("done")]}) as fs:
        job(job_dir, fs.url, "lookup")
        done = run(bagent)
    assert "tools       1 call, 1 failed (no name 1)" in done.err
    problem = "unknown_tool: the call names no tool; the tools are: lookup"
    assert f"warning     the only call without a tool's name failed: {problem}" in done.err
