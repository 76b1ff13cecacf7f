"""Stages whose rows may call tools, and rows of all stages on stdout."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from bagent.errors import UsageError
from bagent.job.load import JobRequest, load_job
from bagent.runs.agents_setup import open_job_tools
from bagent.stages.prepare import prepare_stages
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import journal_lines
from support.replies import echo, ok, ok_tools, tool_call
from support.stage_jobs import RUN, run_scripted, texts, write_stages

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}
SECOND = {"kind": "map", "name": "second", "prompt": "two id={{ id }} <{{ first }}>"}


def test_a_stage_has_tools_of_its_own(tmp_path):
    tool = {"command": ["echo", "{word}"], "name": "say", "description": "Say a word."}
    call = tool_call("say", msgspec.json.encode({"word": "hello"}).decode())
    stages = [FIRST, {**SECOND, "agent": {"tools": [tool]}}]
    server = run_scripted(tmp_path, 1, stages, script={"r1": [echo(), ok_tools(call), ok("said")]})
    first, second, third = (seen.body for seen in server.requests)
    assert "tools" not in first
    assert second["tools"][0]["function"]["name"] == "say"
    assert third["messages"][-1]["role"] == "tool"
    assert texts(tmp_path, "second") == {"r1": "said"}
    [called] = [line for line in journal_lines(tmp_path / "runs" / "job") if "arguments" in line]
    assert (called["name"], called["id"], called["stage"]) == ("say", "r1", "second")


def test_rows_of_all_stages_go_to_stdout_and_in_order_where_asked(tmp_path):
    with FakeServer({"r1": [echo(delay=0.2)], "*": [echo()]}) as server:
        write_stages(tmp_path, server.url, 3, [FIRST, SECOND])
        done = run_bagent([*RUN, "-o", "-"], tmp_path)
        ordered = run_bagent([*RUN, "-o", "-", "--ordered", "--name", "again"], tmp_path)
    names = [(row["stage"], row["id"]) for row in ordered.lines()]
    wanted = [(stage, f"r{n}") for stage in ("first", "second") for n in (1, 2, 3)]
    assert names == wanted
    assert sorted((row["stage"], row["id"]) for row in done.lines()) == wanted


AGENT = "agent: {tools: [{builtin: sql, files: [x.csv]}, §{name: n, command: [no-such-program]}]}"
PLACES = {
    "of the job": f"{AGENT}\nstages: [{{kind: map}}]",
    "of a stage": f"stages:\n- kind: map\n- kind: map\n  {AGENT}",
    "of a step": f"topology:\n  name: pipeline\n  steps: [{{{AGENT}}}]",
    "of a judge": f"topology: {{name: judge, judge: {{prompt: y, {AGENT}}}}}",
    "of a section": f"topology: {{name: blackboard, sections: [{{name: a, {AGENT}}}]}}",
}


@pytest.mark.parametrize("marked", PLACES.values(), ids=PLACES.keys())
def test_a_tool_that_cannot_be_opened_is_told_with_its_place_in_the_job(tmp_path, marked):
    (tmp_path / "x.csv").write_text("a\n1\n")
    head = "backend: vllm://host\nmodel: m\ninput: rows.jsonl\nprompt: x\n"
    before = (head + marked[: marked.index("§")]).split("\n")
    (tmp_path / "job.yaml").write_text(head + marked.replace("§", ""))
    job = load_job(JobRequest(path=Path("job.yaml"), cwd=tmp_path))
    jobs = [request.job for stage in prepare_stages(job) for request in stage.requests]

    async def main() -> None:
        for one in jobs:
            async with open_job_tools(one, {"PATH": "/usr/bin:/bin"}):
                pass

    with pytest.raises(UsageError) as caught:
        asyncio.run(main())
    place = f"job.yaml:{len(before)}:{len(before[-1]) + 1}: "
    assert str(caught.value).startswith(f"{place}cannot run no-such-program: no such program")
