"""Which changes of a job change its answers."""

from __future__ import annotations

import pytest

BASE = """\
input: rows.jsonl
prompt: {system: {file: s.md}, user: "Say {{ text }}"}
output: {schema: s.json}
sampling: {temperature: 0}
agent: {tools: [{python: "t.py:f"}, {builtin: http_get}]}
"""


@pytest.fixture
def parts(load, tmp_path):
    (tmp_path / "s.md").write_text("Be brief.\n")
    (tmp_path / "s.json").write_text('{"$ref": "common.json#/p"}')
    (tmp_path / "common.json").write_text('{"p": {"type": "string"}}')
    (tmp_path / "t.py").write_text("def f() -> int: ...\n")

    def fingerprint(text=BASE, **keys):
        return load(text, **keys).fingerprint_parts()

    return fingerprint


def changed(before, after):
    return {part for part in before if before[part] != after[part]}


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("prompt.user=Tell {{ text }}", {"prompt"}),
        ("sampling.extra={a: 1}", {"sampling"}),
        ("answers=2", {"answers"}),
        ("agent.max_turns=9", {"agent"}),
        ("agent.tools.1.max_tokens=5", {"tools"}),
        ("topology={name: reduce, reduce: {prompt: x}}", {"topology"}),
        ("stages=[{kind: map, prompt: x}]", {"stages"}),
        ("output.enforce=prompt", {"output"}),
        ("output.describe=always", {"output"}),
        ("output.grow=2", {"output"}),
        ("output.schema={type: number}", {"schema"}),
        ("backend=sim", set()),
        ("hostfile=h", set()),
        ("limits={concurrency: 3, timeout: 1s}", set()),
        ("batching.mode=single", set()),
        ("results={dir: elsewhere, parquet: false}", set()),
        ("input=other.jsonl", set()),
        ("name=other", set()),
        ("dedupe=false", set()),
        ("model=other", set()),
        ("cluster.nodes=3", set()),
        ("agent.tools.1.timeout=5", set()),
        ("agent.tools.1.cache=true", set()),
    ],
)
def test_only_the_part_that_changes_answers_changes(parts, option, part):
    assert changed(parts(), parts(sets=(option,))) == part


def test_what_is_said_in_another_way_is_the_same(parts, tmp_path):
    (tmp_path / "s.json").write_text('{"type": "object", "required": ["a"]}')
    (tmp_path / "renamed.md").write_text("Be brief.\n")
    before = parts()
    written_out = BASE.replace("s.md", "renamed.md").replace("temperature: 0", "temperature: 0.0")
    written_out = written_out.replace("schema: s.json", "schema: {type: object, required: [a]}")
    assert parts(written_out + "answers: 1\ntopology: map\nstages: []\n") == before


def test_the_order_of_schema_keys_counts(parts):
    one = parts(sets=("output.schema={properties: {a: {}, b: {}}}",))
    two = parts(sets=("output.schema={properties: {b: {}, a: {}}}",))
    assert changed(one, two) == {"schema"}


def test_places_of_a_stage_do_not_count(parts):
    one = "stages=[{kind: map, prompt: x, backend: sim, limits: {retries: 1}, select: {role: a}}]"
    two = "stages=[{kind: map, prompt: x, hostfile: h, batching: {size: 5}}]"
    three = "stages=[{kind: map, prompt: x, model: m}]"
    assert parts(sets=(one,)) == parts(sets=(two,))
    assert changed(parts(sets=(one,)), parts(sets=(three,))) == {"stages"}


def test_files_of_stages_count(parts, tmp_path):
    option = "stages=[{kind: map, prompt: {user: {file: s.md}}, output: {schema: s.json}}]"
    before = parts(sets=(option,))
    (tmp_path / "common.json").write_text("{}")
    assert changed(before, parts(sets=(option,))) == {"stages", "schema"}


def test_secrets_of_tools_do_not_count(parts):
    one = parts(sets=("agent.tools.1={mcp: {url: 'https://h', headers: {A: x}}}",))
    two = parts(sets=("agent.tools.1={mcp: {url: 'https://h', headers: {A: y}}}",))
    assert one == two
