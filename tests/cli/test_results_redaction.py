"""``bagent results --redact``."""

from __future__ import annotations

import json

import msgspec
import pyarrow.parquet as pq
import pytest

from support.jobs import write_job
from support.replies import ok_json
from support.stored_runs import make_run, stored


@pytest.mark.parametrize("field", ["name", "output.name.first"])
def test_a_hidden_property_is_in_no_column_that_could_repeat_it(bagent, job_dir, field):
    secret = {"name": {"first": "Ada"}, "age": 36}
    raw = json.dumps(secret)
    outcome = stored(0, output=msgspec.Raw(raw.encode()), text=raw, reasoning="It is Ada.")
    listed = stored(1, output=msgspec.Raw(b'[{"name":"Ada"}]'), text="Ada")
    columns = [("name", "JSON"), ("age", "BIGINT")]
    make_run(job_dir / "runs" / "who", [outcome, listed], answer_columns=columns)
    shown = bagent(["results", "who", "--redact", field])
    assert shown.code == 0, shown.err
    assert "Ada" not in shown.out
    first = shown.lines()[0]
    assert first["output"]["age"] == 36
    assert (first["text"], first["reasoning"], first["error"]) == ("***", "***", None)
    for form in ("csv", "table"):
        hidden = bagent(["results", "who", "--redact", field, "--format", form]).out
        assert "Ada" not in hidden
        assert "36" in hidden
    args = ["--redact", field, "--format", "parquet", "-o", "out.parquet"]
    assert bagent(["results", "who", *args]).code == 0
    assert "Ada" not in str(pq.read_table(job_dir / "out.parquet").to_pylist())


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize("fields", ["mail", "text,mail", "mail, output"])
def test_a_hidden_field_is_hidden_under_every_name_that_it_has(bagent, fs, job_dir, form, fields):
    fs.set_script({"*": [ok_json({"mail": "a@x.org", "text": "hello"})]})
    rows = [{"mail": "a@x.org", "text": "hello"}, {"mail": "b@x.org", "text": "hello"}]
    properties = {"mail": {"type": "string"}, "text": {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    prompt = "id=r1 {{ text }}"
    write_job(job_dir, fs.url, rows, id="mail", prompt=prompt, output={"schema": schema})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    options = ["--with-input", *(["--all-columns"] if form == "csv" else [])]
    shown = bagent(["results", "--format", form, "--redact", fields, *options])
    assert shown.code == 0, shown.err
    assert "@x.org" not in shown.out
    assert ("hello" in shown.out) == ("text" not in fields)


@pytest.mark.parametrize("field", ["id", "output.id"])
def test_a_property_is_hidden_in_a_column_of_another_name(bagent, fs, job_dir, field):
    fs.set_script({"*": [ok_json({"id": "A-17"})]})
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    prompt = "id=r1 {{ text }}"
    write_job(job_dir, fs.url, [{"text": "hello"}], prompt=prompt, output={"schema": schema})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    assert "A-17" in bagent(["results", "--format", "csv"]).out
    for options in (["--format", "csv"], ["--format", "table"], ["--columns", "status,id_2"]):
        shown = bagent(["results", "--redact", field, *options])
        assert shown.code == 0, shown.err
        assert "A-17" not in shown.out


@pytest.mark.parametrize(
    ("field", "message"),
    [("row", "no field to hide"), ("scroe", "no row has this field"), ("", "no field to hide")],
)
def test_what_cannot_be_hidden_is_refused(bagent, job_dir, field, message):
    make_run(job_dir / "runs" / "who", [stored(0)])
    done = bagent(["results", "--redact", field])
    assert (done.code, done.out) == (2, "")
    assert message in done.err
