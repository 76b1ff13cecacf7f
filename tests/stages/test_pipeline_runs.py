"""Stages one after another as a user runs them, some with tools of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from bagent.errors import UsageError
from bagent.job.load import JobRequest, load_job
from bagent.runs.agents_setup import open_job_tools
from bagent.stages.prepare import prepare_stages
from support.cli import Running, run_bagent
from support.fake_server import FakeServer
from support.jobs import journal_lines, sql
from support.replies import echo, gated, ok, ok_tools, status, tool_call
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages, texts, write_stages

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}
SECOND = {"kind": "map", "name": "second", "prompt": "two id={{ id }} <{{ first }}> {{ text }}"}


@pytest.mark.tables
def test_the_list_of_failures_has_the_rows_that_no_later_stage_brought_to_a_good_end(tmp_path):
    script = {
        "r1": [status(400), echo()],
        "r2": [echo(), status(400)],
        "r3": [status(400), status(400)],
        "*": [echo()],
    }
    run_scripted(tmp_path, 4, [FIRST, SECOND], results={"duckdb": False}, script=script, code=1)
    lines = (tmp_path / "runs/job/failed.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["r3", "r2"]
    found = sql(f"select stage, count(*) n from read_parquet('{tmp_path}/runs/job/results.parquet')"
                " group by 1 order by 1")  # fmt: skip
    assert found == [{"stage": "first", "n": 4}, {"stage": "second", "n": 4}]


def test_a_vote_is_joined_to_the_fields_of_its_input_row(tmp_path):
    query = "SELECT id, count(*) AS n FROM first GROUP BY id"
    stages = [
        {**FIRST, "answers": 2},
        {"kind": "sql", "name": "count", "query": query},
        {"kind": "map", "name": "tell", "from": ["count", "input"],
         "prompt": "{{ count.n }} answers about {{ text }}"},
    ]  # fmt: skip
    rows = [{"id": n, "text": f"t{n}"} for n in (1, 2)]
    run_scripted(tmp_path, rows, stages)
    assert texts(tmp_path, "tell") == {1: "2 answers about t1", 2: "2 answers about t2"}


def test_a_stage_may_ask_other_servers_or_some_of_a_hostfile(tmp_path):
    with FakeServer({"*": [ok("one")]}) as one, FakeServer({"*": [ok("two")]}) as two:
        hosts = f"{one.address} role=writer\n{two.address} role=critic\n"
        (tmp_path / "hosts.txt").write_text(hosts)
        stages = [
            {**FIRST, "select": {"role": "writer"}},
            {**SECOND, "select": {"role": "critic"}},
            {"kind": "map", "name": "third", "backend": one.url, "prompt": "three {{ second }}"},
        ]
        done = run_stages(tmp_path, one.url, 4, stages, backend=None, hostfile="hosts.txt")
        assert done.code == 0, done.err
        assert len(one.requests) >= 5
        assert all(seen.prompts[0].startswith("two") for seen in two.requests)
    assert set(texts(tmp_path, "second").values()) == {"two"}


def test_the_limit_of_an_account_holds_over_all_stages_that_use_it(tmp_path):
    stages = [{**FIRST, "limits": {"retries": 4}}, {**SECOND, "limits": {"retries": 3}}]
    run_scripted(tmp_path, 6, stages, limits={"rpm": 960})
    attempts = journal_lines(tmp_path / "runs/job")
    times = sorted(line["sent"] for line in attempts if "sent" in line)
    # Twelve requests at sixteen a second; each stage alone would let the other's pass beside it.
    assert len(times) == 12
    assert times[-1] - times[0] > 0.5


SUM = {"kind": "reduce", "name": "sum", "fanin": 2, "prompt": "sum {{ level }}\n{{ responses }}"}


def wait_for(server: FakeServer, start: str, count: int) -> None:
    """Block until so many requests begin with ``start``."""
    server.wait_until(
        lambda: sum(seen.prompts[0].startswith(start) for seen in server.requests) >= count
    )


@pytest.mark.process("concurrent")
def test_rows_and_full_groups_go_on_while_a_row_before_them_is_in_flight(tmp_path):
    with FakeServer({"r5": [gated(ok("late")), ok("late")], "*": [ok("short")]}) as server:
        write_stages(tmp_path, server.url, 6, [FIRST, SECOND, SUM])
        with Running(RUN, tmp_path) as running:
            wait_for(server, "two", 5)
            wait_for(server, "sum 1", 2)
            wait_for(server, "sum 2", 1)
            server.release()
            assert running.finish().code == 0
    assert [line["id"] for line in outcomes(tmp_path, "sum")][-1] == "sum:3.0"


NOTE = {"kind": "map", "name": "note", "prompt": "note id={{ id }}"}
PIECE = {"kind": "expand", "name": "piece", "split": {"field": "text", "tokens": 8}}
WORK = {"kind": "map", "name": "work", "from": "piece", "prompt": "work id={{ id }} {{ text }}"}
WHOLE = {"kind": "reduce", "name": "whole", "from": "work", "by": "id", "prompt": "whole {{ n }}"}
BOTH = {"kind": "map", "name": "both", "prompt": "both id={{ id }}"}
ROWS = [{"id": name, "text": f"{name} one two three, four five six seven."} for name in "xy"]


def test_reductions_and_pieces_are_joined_to_answers_about_their_input_row(tmp_path):
    both = {**BOTH, "from": ["note", "whole"], "prompt": "<{{ note }}> <{{ whole }}>"}
    each = {**BOTH, "name": "each", "from": ["work", "note"], "prompt": "<{{ note }}> {{ text }}"}
    stages = [NOTE, {**PIECE, "from": "input"}, WORK, WHOLE, both, each]
    run_scripted(tmp_path, ROWS, stages)
    found = texts(tmp_path, "both")
    assert set(found) == {"x", "y"}
    assert all(text.startswith(f"<note id={name}> <whole ") for name, text in found.items())
    assert outcomes(tmp_path, "both")[0]["parents"][1].startswith("whole:")
    pieces = outcomes(tmp_path, "each")
    assert len(pieces) == len(outcomes(tmp_path, "work")) > 2
    assert all(line["text"].startswith(f"<note id={line['id'][0]}> ") for line in pieces)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (["note", "work"], "work may have several rows for one of note"),
        (["note", "all"], "all brought rows together, none of its rows belongs to one"),
    ],
)
def test_rows_that_never_belong_together_are_refused_at_load(tmp_path, sources, words):
    whole = {"kind": "reduce", "name": "all", "from": "note", "prompt": "{{ responses }}"}
    both = {**BOTH, "from": sources}
    with FakeServer() as server:
        stages = [NOTE, {**PIECE, "from": "input"}, WORK, whole, both]
        done = run_stages(tmp_path, server.url, ROWS, stages)
        assert not server.requests
    assert done.code == 2
    assert f"stage both: from: {words}" in done.err


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
