"""Job files: YAML as PyYAML reads it, and whatever else stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.templates.prompt import Prompt
from bagent.job.yaml.parser import decode, read_yaml
from bagent.job.yaml.scalars import SourceFloat, SourceInt, plain, resolve_plain
from bagent.types import Json
from support.strategies import json_objects, texts_of

JOB = """\
# words
x-base: &base {temperature: 0.5}
name: run
backend: {url: "vllm://h:8000", headers: {A: "b"}, query: {c: 1}}
input: [a.jsonl, 'b/*.csv']
prompt:
  messages:
    - {role: system, content: 'Be {{ kind | default("x") }}.'}
    - role: user
      content:
        - text: |
            Review {{ symbol }}:
            {% for x in items %}{{ x.name }}{% endfor %}
        - image: "{{ path }}"
answers: 2
output: {schema: {type: object}, retries: 1}
sampling: {<<: *base, max_tokens: 1e2, stop: [a, 'b'], extra: {k: [1, null]}}
agent: {tools: [{builtin: http_get, allow_hosts: [x.org]}], compact: {at: 0.5}}
limits: {timeout: {total: 1h30m, idle: }, hedge: off, row: none}
results: {allow_failures: 5%}
cluster: {walltime: 01:00:00, ports: 8000-8003}
"""
PIECES = (
    *":{}[]\"'|>-&*!%@`#\n\t ,?~<\r", "{{", "}}", "{%", "null", "1e5", "08", "0o7", "0x1f", ".inf",
    "${A}", "${", "<<: *base", "- ", "\n  ", "\n", "a: ", "b: ", "&x ", "*x", "!!int ", "!!str ",
    "!x ", "! ", "|\n", ">-\n ", "---\n", "...\n", "%YAML 1.2\n", "? ", ": ", '"\\', "\\x", "\\U",
    "FFFFFFFF", '"', "\u2028", "\x85", "é", "\ufeff", "yes", "~", "9" * 400,
)  # fmt: skip
TEXTS = texts_of(*PIECES)


class Quoted(yaml.SafeDumper):
    """Writes each text in one given style, since what needs quotes differs between versions."""

    style = '"'

    def represent_str(self, data: str) -> Any:
        """Return a text in quotes or as a block."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=self.style)


Quoted.add_representer(str, Quoted.represent_str)


@given(
    value=json_objects(),
    style=st.sampled_from(["'", '"', "|", ">"]),
    flow=st.booleans(),
    unicode=st.booleans(),
)
def test_what_pyyaml_writes_is_read_as_it_was(value, style, flow, unicode):
    dumper = type("Dumper", (Quoted,), {"style": style})
    text = yaml.dump(
        value, Dumper=dumper, default_flow_style=flow, allow_unicode=unicode, sort_keys=False
    )
    if yaml.safe_load(text) != value:  # PyYAML's own blocks lose some blanks
        return
    data = plain(read_yaml(text, "job.yaml").data)
    assert data == value
    assert repr(data) == repr(value)


@given(TEXTS)
@example('a: "\\UFFFFFFFF"\n')
@example("%YAML 1." + "9" * 5000 + "\n---\na: 1\n")
def test_any_yaml_is_read_as_pyyaml_does_or_an_error_of_one_line(text):
    data = read_or_error(text)
    if data is None:
        return
    try:
        tree = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError):
        return  # rules of YAML 1.2 that it lacks
    if tree is not None and "<<" not in text:
        compare(data, tree)


def read_or_error(text: str) -> Json:
    try:
        return read_yaml(text, "job.yaml").data
    except JobError as error:
        check_error(error, text)
        return None


def check_error(error: JobError, text: str) -> None:
    """An error is one line, and names a line that the file has."""
    assert "\n" not in str(error)
    assert str(error).startswith("job.yaml")
    assert error.at is not None
    lines = text.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    assert 0 <= error.at.line <= lines + text.count("\x85") + text.count("\u2028") + 1


def compare(data: Json, node: yaml.Node) -> None:
    if isinstance(node, yaml.SequenceNode):
        assert isinstance(data, list)
        for item, child in zip(data, node.value, strict=True):
            compare(item, child)
    elif isinstance(node, yaml.MappingNode):
        assert isinstance(data, dict)
        assert list(data) == [key.value for key, _ in node.value]
        for item, (_, child) in zip(data.values(), node.value, strict=True):
            compare(item, child)
    elif isinstance(data, SourceInt | SourceFloat):
        assert data.source == node.value
    else:
        assert data == node.value or data is resolve_plain(node.value)


@given(st.binary(max_size=20) | TEXTS.map(str.encode))
def test_any_bytes_are_text_or_an_error_with_position(content):
    try:
        text = decode(content, "job.yaml")
    except JobError as error:
        assert "\n" not in str(error)
    else:
        assert content.decode("utf-8-sig") == text


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "copy", "indent"]),
        st.integers(0, 1 << 16),
        st.integers(0, 1 << 16),
        st.integers(0, 40),
        st.sampled_from(PIECES),
    ),
    min_size=1,
    max_size=3,
)


def edited(edits: list[tuple[str, int, int, int, str]]) -> str:
    text = JOB
    for kind, first, second, size, piece in edits:
        at, other = first % len(text), second % len(text)
        if kind == "insert":
            text = text[:at] + piece + text[at:]
        elif kind == "delete":
            text = text[:at] + text[at + size % 8 + 1 :]
        elif kind == "copy":
            text = text[:at] + text[other : other + size] + text[at:]
        else:
            lines = text.split("\n")
            number = first % len(lines)
            lines[number] = " " * (size % 5) + lines[number].strip()
            text = "\n".join(lines)
    return text


def loaded(text: str, folder: Path) -> bool:
    try:
        job = load_job(JobRequest(path=Path("job.yaml"), text=text, cwd=folder))
        if job.prompt is not None:
            Prompt.from_job(job)
        job.masked()
        job.fingerprint_parts()
    except JobError as error:
        check_error(error, text)
        return False
    return True


def test_the_job_without_edits_is_loaded(folder):
    assert loaded(JOB, folder)


@given(EDITS)
def test_a_damaged_job_is_a_job_or_an_error_of_one_line(folder, edits):
    loaded(edited(edits), folder)
