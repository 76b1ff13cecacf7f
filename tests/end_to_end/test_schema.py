"""Answers that a schema asks for: cut off, wrong, and schemas that are wrong themselves."""

from __future__ import annotations

import socket

import pytest

from support.cli import run_bagent
from support.jobs import write_job
from support.replies import ok, ok_json
from support.run_outcomes import RUN, error_of, run_script, statuses

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "items"],
    "additionalProperties": False,
}
GOOD = ok_json({"name": "n", "items": ["a"]})


@pytest.fixture
def answers(fs, job_dir):
    """Runs one row for each list of replies with PERSON as the schema."""

    def run(script, **output):
        limits = {"concurrency": 50}
        return run_script(fs, job_dir, script, output={"schema": PERSON} | output, limits=limits)

    return run


# --- cut off --------------------------------------------------------------------------------------


def test_a_cut_answer_may_be_asked_again_once_with_more_room(fs, answers):
    cut = ok('{"name":"n","items":["' + "a" * 50, "length")
    done, found = answers({"once": [cut, GOOD], "never": [cut]}, grow=2)
    assert done.code == 1
    assert statuses(found) == {"once": "ok", "never": "truncated"}
    for name in ("once", "never"):
        assert [seen.body["max_tokens"] for seen in fs.of(name)] == [64, 128]
    assert "aaaa" not in str(fs.of("once")[1].body["messages"])


# --- not what was asked for ----------------------------------------------------------------------


def test_prose_and_half_an_object_are_asked_again_with_the_validators_words(fs, answers):
    prose = [ok("Sure! The name is n."), GOOD]
    half = [ok('{"name":"n","items":["a","b'), GOOD]
    done, found = answers({"a": prose, "b": prose, "c": half, "d": [GOOD]})
    assert done.code == 0, done.err
    assert [found[name]["turns"] for name in "abcd"] == [2, 2, 2, 1]
    assert [fs.count(name) for name in "abcd"] == [2, 2, 2, 1]
    assert found["c"]["output"] == {"name": "n", "items": ["a"]}
    again = fs.of("a")[1].body["messages"]
    assert again[-2] == {"role": "assistant", "content": "Sure! The name is n."}
    assert "not valid" in again[-1]["content"]
    assert fs.of("a")[0].body["response_format"]["type"] == "json_schema"
    assert "1 of 4" in done.err
    assert "may not enforce the schema" in done.err


def test_a_server_that_refuses_response_format_is_asked_in_words(fs, answers):
    words = "response_format.type json_schema is not supported"
    fs.server.check = lambda seen: words if "response_format" in seen.body else None
    try:
        done, _ = answers({"r1": [GOOD], "r2": [GOOD], "r3": [GOOD]})
    finally:
        fs.faults.clear()
    assert done.code == 0, done.err
    assert "response_format" in done.err
    last = fs.requests[-1].body
    assert "response_format" not in last
    assert '"items"' in last["messages"][0]["content"]


# --- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"$ref": "http://127.0.0.1:PORT/s.json"}', "http://127.0.0.1"),
        ('{"properties": {"a": {"$ref": "../secret.json"}}}', "secret.json"),
        ('{"type": "strng"}', "strng"),
        ('{\n  "type": "object",\n  "required": ["a",]\n}\n', "s.json:3:"),
    ],
)
def test_a_schema_that_cannot_be_used_is_an_error_before_anything(fs, job_dir, schema, words):
    (job_dir.parent / "secret.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (job_dir / "s.json").write_text(schema.replace("PORT", str(port)))
        write_job(job_dir, fs.url, 2, output={"schema": "s.json"})
        error = error_of(run_bagent(RUN, job_dir))
        listener.settimeout(0.01)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert words in error
    assert "s.json" in error
    assert fs.requests == []
