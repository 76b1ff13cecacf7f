"""The JSON Schema of job files says what the loader says."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest

from bagent.errors import JobError
from bagent.job.spec.json_schema import job_schema, job_schema_text
from bagent.job.yaml.parser import read_yaml
from bagent.job.yaml.scalars import plain

FILE = Path(__file__).parents[2] / "schemas" / "job.schema.json"


@pytest.fixture(scope="module")
def validator():
    return jsonschema_rs.Draft202012Validator(job_schema())


def test_the_file_in_schemas_is_up_to_date():
    assert FILE.read_text(encoding="utf-8") == job_schema_text(), (
        f"make it new: bagent schema -o {FILE}"
    )


def sections(value, found):
    if isinstance(value, dict):
        if value.get("additionalProperties") is False:
            found.append(value)
        for item in value.values():
            sections(item, found)
    elif isinstance(value, list):
        for item in value:
            sections(item, found)
    return found


def test_every_section_and_every_key_is_described():
    found = sections(job_schema(), [])
    assert len(found) > 20
    for section in found:
        assert section["properties"]
        for key, item in section["properties"].items():
            assert item.get("description") or "$ref" in json.dumps(item), key


SAME = [
    "prompt: {system: {file: s.md}, user: x}",
    "prompt: {messages: [{role: user, content: [{text: a}, {image: b}]}]}",
    "prompt: {usr: x}",
    "backend: vllm://host:8000",
    "backend: vlm",
    "backend: {url: openai, headers: {A: b}, proxy: none}",
    "model: 08",
    "input: []",
    "input: {sql: select 1}",
    "answers: 1e2",
    'answers: "3"',
    "output: {schema: 5}",
    "output: {enforce: native, describe: never, retries: 0, grow: 2.5}",
    "output: {grow: 0.5}",
    "sampling: {temperature: 1e-1, top_p: 0.5, stop: [a], seed: -3, logprobs: true}",
    "sampling: {extra: [1]}",
    "sampling: {stop: [[a]]}",
    "batching: {mode: chat, size: auto}",
    "agent: {max_turns: 3, tools: [{builtin: sql}], compact: {at: 0.5, model: }}",
    "agent: {tools: [{builtin: nothing}]}",
    "agent: {tools: [{mcp: npx x}]}",
    "topology: jugde",
    "stages: [{kind: map, name: a, prompt: x, from: input}]",
    "limits: {concurrency: 5, per_endpoint: auto, hedge: off, row: 1h30m, rpm: none}",
    "limits: {timeout: {total: 1:30}}",
    "limits: {budget_usd: -1}",
    "results: {dir: out, allow_failures: 5%}",
    "cluster: {walltime: 01:30:00, ports: 8000-8003, modules: a}",
    "modle: x",
    "x-anchors: {a: 1}",
]


@pytest.mark.parametrize("line", SAME)
def test_the_schema_accepts_what_the_loader_accepts(load, validator, tmp_path, line):
    (tmp_path / "s.md").write_text("x")
    (tmp_path / "s.json").write_text("{}")
    given = {"input": "input: x", "prompt": "prompt: y"}
    given.pop(line.partition(":")[0], None)
    text = "\n".join([*given.values(), line]) + "\n"
    try:
        load(text)
        loads = True
    except JobError:
        loads = False
    assert validator.is_valid(plain(read_yaml(text, "job.yaml").data)) is loads


def test_the_schema_accepts_variables(load, validator):
    text = "input: x\nprompt: y\nlimits: {concurrency: '${N}', row: '${D}'}\n"
    load(text, env={"N": "3", "D": "5s"})
    assert validator.is_valid(plain(read_yaml(text, "job.yaml").data))
