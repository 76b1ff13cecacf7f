"""Schemas in several files, and formats that stand deep inside a schema."""

from __future__ import annotations

import json

import pytest

from support.cli import run_bagent
from support.jobs import write_job
from support.replies import ok, ok_json
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows, statuses

pytestmark = pytest.mark.slow


def test_files_may_refer_to_each_other_in_a_circle(fs, job_dir):
    folder = job_dir / "parts"
    folder.mkdir()
    (job_dir / "s.json").write_text('{"type":"object","properties":{"a":{"$ref":"parts/a.json"}}}')
    node = {"type": "object", "properties": {"b": {"$ref": "b.json#/$defs/b"}}}
    (folder / "a.json").write_text(json.dumps(node))
    back = {"anyOf": [{"type": "integer"}, {"$ref": "a.json"}]}
    (folder / "b.json").write_text(json.dumps({"$defs": {"b": back}}))
    value = {"a": {"b": {"b": 1}}}
    fs.set_script({"r1": [ok_json({"a": {"b": {"b": "x"}}}), ok_json(value)]})
    write_job(job_dir, fs.url, 1, output={"schema": "s.json"}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert (found["r1"]["output"], found["r1"]["turns"]) == (value, 2)
    assert ".json" not in json.dumps(fs.requests[0].body.get("response_format"))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("gone.json", "gone.json"),
        ("common.json#/$defs/nope", "nope"),
        ("link.json", "link.json"),
        ("https://127.0.0.1:1/s.json#/a", "https://127.0.0.1:1"),
        ("#nowhere", "nowhere"),
    ],
)
def test_a_reference_that_leads_nowhere_or_outside_is_an_error(fs, job_dir, reference, words):
    (job_dir.parent / "outside.json").write_text('{"type": "integer"}')
    (job_dir / "link.json").symlink_to(job_dir.parent / "outside.json")
    (job_dir / "common.json").write_text('{"$defs": {}}')
    schema = {"type": "object", "properties": {"a": {"items": {"$ref": reference}}}}
    (job_dir / "s.json").write_text(json.dumps(schema))
    write_job(job_dir, fs.url, 1, output={"schema": "s.json"})
    assert words in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []


def test_an_inline_schema_reads_no_file_outside_the_jobs_folder(fs, job_dir):
    (job_dir.parent / "outside.json").write_text('{"type": "integer"}')
    write_job(job_dir, fs.url, 1, output={"schema": {"$ref": "../outside.json"}})
    assert "outside.json" in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []


def test_a_format_counts_wherever_it_stands_and_leaves_other_types_alone(fs, job_dir):
    day = {"type": "string", "format": "date"}
    schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/day"}},
            "either": {"anyOf": [day, {"type": "null"}]},
            "loose": {"format": "email"},
        },
        "$defs": {"day": day},
    }
    script = {
        "list": [ok_json({"list": ["2024-05-06", "2023-02-29"]})],
        "either": [ok_json({"either": "soon"})],
        "null": [ok_json({"either": None})],
        "loose": [ok_json({"loose": 5})],
    }
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in script]
    output = {"schema": schema, "retries": 0}
    write_job(job_dir, fs.url, rows, output=output, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    expected = {"list": "invalid", "either": "invalid", "null": "ok", "loose": "ok"}
    assert statuses(found) == expected


def test_a_cut_after_a_reask_is_truncated_and_stored_without_an_output(fs, job_dir):
    fs.set_script({"r1": [ok("prose"), ok('{"a": [1, 2', "length")]})
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    write_job(job_dir, fs.url, 1, output={"schema": schema}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert (found["r1"]["status"], found["r1"]["output"]) == ("truncated", None)
    assert fs.count("r1") == 2
