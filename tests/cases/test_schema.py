"""Answers that a schema asks for: cut, wrong, wrapped, and schemas that are wrong themselves."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from support.cli import run_bagent
from support.jobs import parquet, write_job
from support.replies import error_body, ok, ok_json, status
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows, statuses

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
    """Runs one row for each list of replies; returns the end and the result rows by name."""

    def run(script, output=None, **keys):
        fs.set_script(script)
        rows = [{"id": name, "text": "x"} for name in script]
        write_job(
            job_dir,
            fs.url,
            rows,
            output={"schema": PERSON} | (output or {}),
            **{"results": NO_TABLES, "limits": {"concurrency": 50}} | keys,
        )
        return run_rows(job_dir)

    return run


# --- cut off --------------------------------------------------------------------------------------


def test_a_cut_answer_is_truncated_however_well_it_can_be_repaired(fs, answers):
    script = {
        "half": [ok('{"name":"n","items":["a","b', "length"), GOOD],
        "whole": [ok('{"name":"n","items":["a"]}', "length"), GOOD],
        "stop": [ok('{"name":"n","items":["a","b', "max_tokens"), GOOD],
    }
    done, found = answers(script)
    assert done.code == 1
    assert set(statuses(found).values()) == {"truncated"}
    assert {row["output"] for row in found.values()} == {None}
    assert {row["error_kind"] for row in found.values()} == {"truncated"}
    assert all(fs.count(name) == 1 for name in script)
    assert found["half"]["text"] == '{"name":"n","items":["a","b'


def test_a_cut_answer_may_be_asked_again_with_more_room(fs, answers):
    cut = ok('{"name":"n","items":["' + "a" * 50, "length")
    done, found = answers({"once": [cut, GOOD], "never": [cut]}, {"grow": 2})
    assert done.code == 1
    assert statuses(found) == {"once": "ok", "never": "truncated"}
    assert [seen.body["max_tokens"] for seen in fs.of("once")] == [64, 128]
    assert [seen.body["max_tokens"] for seen in fs.of("never")] == [64, 128]
    assert "aaaa" not in str(fs.of("once")[1].body["messages"])


def test_half_an_object_is_not_completed_where_the_end_says_stop(fs, answers):
    done, found = answers({"r1": [ok('{"name":"n","items":["a","b'), GOOD]})
    assert done.code == 0, done.err
    assert found["r1"]["output"] == {"name": "n", "items": ["a"]}
    assert found["r1"]["turns"] == 2


# --- not what was asked for ----------------------------------------------------------------------


def test_prose_is_asked_again_with_the_validators_words(fs, answers):
    prose = [ok("Sure! The name is n."), GOOD]
    script = {"a": prose, "b": prose, "c": prose, "d": [GOOD]}
    done, found = answers(script)
    assert done.code == 0, done.err
    assert {row["turns"] for row in found.values()} == {1, 2}
    assert fs.count("a") == fs.count("b") == fs.count("c") == 2
    again = fs.of("a")[1].body["messages"]
    assert again[-2] == {"role": "assistant", "content": "Sure! The name is n."}
    assert "not valid" in again[-1]["content"]
    assert fs.of("a")[0].body["response_format"]["type"] == "json_schema"
    assert "1 of 4" in done.err
    assert "may not enforce the schema" in done.err


def test_an_answer_that_stays_wrong_is_invalid_with_the_reason(fs, answers):
    wrong = ok_json({"name": 7, "items": "a"})
    done, found = answers({"r1": [wrong]})
    assert done.code == 1
    row = found["r1"]
    assert (row["status"], row["error_kind"], row["turns"]) == ("invalid", "schema", 3)
    assert "/name" in row["error"] or "/items" in row["error"]
    assert row["output"] is None
    assert json.loads(row["text"]) == {"name": 7, "items": "a"}
    assert len(fs.of("r1")[2].body["messages"]) == len(fs.of("r1")[1].body["messages"])
    assert "1 x schema" in done.err


def test_a_long_wrong_answer_goes_back_bounded(fs, answers):
    done, _ = answers({"r1": [ok("blah " * 20_000), ok("blah " * 30_000), GOOD]})
    assert done.code == 0, done.err
    first, second, third = (len(seen.raw) for seen in fs.of("r1"))
    assert second < first + 4000
    assert third < second + 200


def test_json_in_the_usual_wrappings_is_found(answers):
    value = '{"name": "n", "items": ["a"]}'
    texts = {
        "fence": f"```json\n{value}\n```",
        "prose": f"Here it is:\n{value}\nAnything else?",
        "thinking": f'<think>{{"name": 1}}</think>{value}',
        "blanks": f"\ufeff  {value}\n\n",
        "token": f"{value}<|im_end|>",
        "comma": '{"name": "n", "items": ["a",],}',
    }
    done, found = answers({name: [ok(text)] for name, text in texts.items()})
    assert done.code == 0, done.err
    assert len(found) == len(texts)
    assert all(row["output"] == {"name": "n", "items": ["a"]} for row in found.values())
    assert {row["turns"] for row in found.values()} == {1}


def test_only_what_fits_exactly_is_ok(answers):
    wrong = {
        "more": {"name": "n", "items": [], "extra": 1},
        "less": {"name": "n"},
        "null": {"name": None, "items": []},
        "text": '{"name": "n", "items": []',
        "list": [{"name": "n", "items": []}, {"name": "m", "items": []}],
        "number": 5,
        "inner": {"answer": {"name": 1, "items": []}},
    }
    script = {name: [ok_json(value)] for name, value in wrong.items()}
    done, found = answers(script, {"retries": 0})
    assert done.code == 1
    assert statuses(found) == dict.fromkeys(script, "invalid")


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


# --- formats --------------------------------------------------------------------------------------


FORMATS = {
    "date-time": ("tomorrow", "2024-05-06T07:08:09Z"),
    "date": ("2024-13-01", "2024-05-06"),
    "time": ("25:00:00", "07:08:09Z"),
    "uri": ("not a uri", "https://example.org/a"),
    "uuid": ("1234", "123e4567-e89b-12d3-a456-426614174000"),
    "ipv4": ("300.1.1.1", "192.0.2.1"),
    "ipv6": ("12345::", "2001:db8::1"),
    "email": ("nobody", "a@example.org"),
    "hostname": ("-bad-", "example.org"),
}


def test_formats_are_checked(fs, job_dir):
    schema = {"type": "object", "properties": {n: {"type": "string", "format": n} for n in FORMATS}}
    script = {n: [ok_json({n: bad}), ok_json({n: good})] for n, (bad, good) in FORMATS.items()}
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in FORMATS]
    write_job(job_dir, fs.url, rows, output={"schema": schema}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert {name: row["turns"] for name, row in found.items()} == dict.fromkeys(FORMATS, 2)
    assert found["date"]["output"] == {"date": "2024-05-06"}


def test_an_unknown_format_is_a_warning_at_the_start(fs, job_dir):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "banana"}}}
    write_job(job_dir, fs.url, 1, output={"schema": schema}, results=NO_TABLES)
    done, _ = run_rows(job_dir)
    assert done.code == 0
    assert "banana" in done.err
    assert done.err.index("banana") < done.err.index("finished")


# --- references -----------------------------------------------------------------------------------


def test_a_reference_to_a_file_beside_the_schema_is_followed(fs, job_dir):
    (job_dir / "schemas").mkdir()
    (job_dir / "schemas/s.json").write_text('{"$ref": "common.json#/$defs/p"}')
    common = {"$defs": {"p": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}}}
    common["$defs"]["n"] = {"type": "integer"}
    (job_dir / "schemas/common.json").write_text(json.dumps(common))
    fs.set_script({"r1": [ok_json({"a": "x"}), ok_json({"a": 1})]})
    write_job(job_dir, fs.url, 1, output={"schema": "schemas/s.json"}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert (found["r1"]["output"], found["r1"]["turns"]) == ({"a": 1}, 2)
    sent = json.dumps(fs.requests[0].body["response_format"])
    assert "common.json" not in sent


@pytest.fixture
def listener():
    """A port that counts the connections made to it."""
    hits = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        over = threading.Event()

        def accept():
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                hits.append(connection)
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], hits
        over.set()
        thread.join(5)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://127.0.0.1:PORT/s.json"}, "http://127.0.0.1"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "/etc/passwd"),
        ({"properties": {"a": {"$ref": "../secret.json"}}}, "secret.json"),
        ({"$ref": "#/$defs/nope"}, "#/$defs/nope"),
        ({"type": "strng"}, "strng"),
    ],
)
def test_a_schema_that_cannot_be_used_is_an_error_before_anything(
    fs, job_dir, listener, schema, words
):
    port, hits = listener
    text = json.dumps(schema).replace("PORT", str(port))
    (job_dir / "s.json").write_text(text)
    (job_dir.parent / "secret.json").write_text("{}")
    write_job(job_dir, fs.url, 2, output={"schema": "s.json"})
    error = error_of(run_bagent(RUN, job_dir))
    assert words in error
    assert "s.json" in error
    assert hits == []
    assert fs.requests == []


def test_a_schema_file_that_is_no_json_names_the_place(fs, job_dir):
    (job_dir / "s.json").write_text('{\n  "type": "object",\n  "required": ["a",]\n}\n')
    write_job(job_dir, fs.url, 2, output={"schema": "s.json"})
    error = error_of(run_bagent(RUN, job_dir))
    assert "s.json:3:" in error
    assert fs.requests == []


def test_a_schema_that_refers_to_itself_works(fs, job_dir):
    tree = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/definitions/node"}},
                },
                "required": ["name"],
            }
        },
        "$ref": "#/definitions/node",
    }
    value = {"name": "a", "children": [{"name": "b", "children": []}]}
    bad = {"name": "a", "children": [{"children": []}]}
    fs.set_script({"r1": [ok_json(bad), ok_json(value)]})
    write_job(job_dir, fs.url, 1, output={"schema": tree})
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert (found["r1"]["output"], found["r1"]["turns"]) == (value, 2)
    assert parquet(job_dir / "runs/job", "answers")[0]["name"] == "a"


def test_a_schema_of_the_wrong_kind_for_the_endpoint_is_not_every_rows_failure(fs, job_dir):
    """Servers refuse schemas that they cannot compile; the job then asks in words."""
    refusal = status(400, error_body(400, "Invalid schema for response_format 'answer'"))
    fs.set_script({"*": [refusal, GOOD]})
    write_job(job_dir, fs.url, 3, output={"schema": PERSON}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert set(statuses(found).values()) == {"ok"}
