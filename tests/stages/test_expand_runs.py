"""Answers and long texts that become rows."""

from __future__ import annotations

import json

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results
from support.replies import echo, ok_json
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages

PLAN_SCHEMA = {"type": "object", "properties": {"parts": {"type": "array"}}, "required": ["parts"]}
PLAN = {"kind": "map", "name": "plan", "prompt": "plan id={{ id }}"}
EXPAND = {"kind": "expand", "name": "part", "items": "plan.parts"}
WORK = {"kind": "map", "name": "work", "prompt": "work on {{ part.title }} of {{ text }}"}


def test_an_answer_without_a_list_is_a_failed_row_with_words(tmp_path):
    plan = {**PLAN, "output": {"schema": PLAN_SCHEMA}}
    with FakeServer({"r1": [ok_json({"parts": []})], "*": [echo()]}) as server:
        run_stages(tmp_path, server.url, 1, [plan, EXPAND, {**WORK, "on_failure": "drop"}])
    [part] = outcomes(tmp_path, "part")
    assert (part["status"], part["error"]) == ("failed", "the list of items is empty")


def test_a_long_text_is_cut_and_reduced_by_its_row(tmp_path):
    rows = [{"id": name, "text": " ".join(f"{name}{n}" for n in range(200))} for name in "ab"]
    split = {"field": "text", "tokens": 200, "overlap": 20}
    stages = [
        {"kind": "expand", "name": "piece", "split": split},
        {"kind": "map", "name": "read", "prompt": "read: {{ text }}"},
        {"kind": "reduce", "name": "all", "by": "id", "prompt": "all {{ id }}\n{{ responses }}"},
    ]
    run_scripted(tmp_path, rows, stages)
    finals = outcomes(tmp_path, "all")
    assert sorted(line["id"] for line in finals) == ["a:1.0", "b:1.0"]
    for line in finals:
        assert all(ref.startswith(f"read:{line['id'][0]}/") for ref in line["parents"])
    pieces = outcomes(tmp_path, "piece")
    assert len(pieces) > 4
    assert not any("a17 " in json.dumps(line) for line in pieces), "the journal holds no input text"


def test_an_answer_that_gives_no_rows_is_not_processed_and_may_be_mended(tmp_path):
    whole = {"kind": "reduce", "name": "whole", "by": "id", "prompt": "all {{ responses }}"}
    more = {"kind": "map", "name": "more", "prompt": "more {{ work }}"}
    rows = [{"id": "r1", "text": "t"}]
    bad, good = ok_json({"parts": "A"}), ok_json({"parts": [{"title": "A"}]})
    plan = {**PLAN, "output": {"schema": PLAN_SCHEMA, "retries": 0}}
    with FakeServer({"r1": [bad, good], "*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, rows, [plan, EXPAND, WORK, more, whole])
        assert len(server.requests) == 1
        assert done.code == 1
        [failed] = outcomes(tmp_path, "whole")
        assert "none of 1 rows came out ok" in failed["error"]
        assert "is not of type" in failed["error"]
        assert done.err.splitlines()[-1].endswith(" --retry schema")
        done = run_bagent([*RUN, "--retry", "schema"], tmp_path)
    assert done.code == 0, done.err
    found = [(row["stage"], row["id"], row["status"]) for row in results(tmp_path)]
    assert sorted(found) == [
        ("more", "r1/0", "ok"),
        ("part", "r1/0", "ok"),
        ("plan", "r1", "ok"),
        ("whole", "r1:1.0", "ok"),
        ("work", "r1/0", "ok"),
    ]
