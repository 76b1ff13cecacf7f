"""Tables of rows whose values change their minds, and targets that cannot be written."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.jobs import database, parquet, results_by_id, sql, write_job
from support.replies import echo, ok, ok_json, status
from support.run_outcomes import RUN, run_rows

pytestmark = pytest.mark.slow


def test_properties_that_are_null_first_keep_their_type(fs, job_dir):
    schema = {
        "type": "object",
        "properties": {
            "word": {"type": ["string", "null"]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "mixed": {},
            "many": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    }
    nulls = {"word": None, "count": None, "mixed": None, "many": None}
    full = {"word": "w", "count": 3, "mixed": {"deep": [1]}, "many": ["a", "b"]}
    fs.set_script({"r4": [ok_json(full)], "r5": [ok_json({"mixed": "t"})], "*": [ok_json(nulls)]})
    write_job(job_dir, fs.url, 5, output={"schema": schema}, limits={"concurrency": 1})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in parquet(job_dir / "runs/job", "answers")}
    assert (rows["r4"]["word"], rows["r4"]["count"]) == ("w", 3)
    assert rows["r1"]["word"] is None
    assert {name: row["output"] for name, row in results_by_id(job_dir).items()} == {
        "r1": nulls,
        "r2": nulls,
        "r3": nulls,
        "r4": full,
        "r5": {"mixed": "t"},
    }


def test_no_failure_at_all_still_gives_text_columns_for_errors(fs, job_dir):
    fs.set_script({"*": [ok("fine")]})
    write_job(job_dir, fs.url, 2)
    assert run_bagent(RUN, job_dir).code == 0
    found = sql(f"describe select error, error_kind from '{job_dir}/runs/job/results.parquet'")
    assert {row["column_type"] for row in found} == {"VARCHAR"}


def test_tables_grow_with_a_resume_that_brings_new_keys(fs, job_dir):
    fs.set_script({"r1": [ok_json({"a": 1})], "r2": [status(400)], "*": [ok_json({"a": 3})]})
    write_job(job_dir, fs.url, 3, output={"schema": {"type": "object"}})
    assert run_bagent(RUN, job_dir).code == 1
    fs.set_script({"*": [ok_json({"a": "text", "New": {"k": None}})]})
    assert run_bagent(RUN, job_dir).code == 0
    found = {row["id"]: row["output"] for row in parquet(job_dir / "runs/job")}
    assert "New" in found["r2"]
    assert len(database(job_dir / "runs/job", "select * from results")) == 3


def test_columns_of_a_csv_named_as_ours_are_kept_apart(fs, job_dir):
    fs.set_script({"*": [ok("fine")]})
    (job_dir / "rows.csv").write_text(
        "id,Status,STATUS,error,text,endpoint,Input\nr1,a,b,c,d,e,f\nr2,,,,,,\n"
    )
    write_job(job_dir, fs.url, input="rows.csv", prompt={"user": "id={{ id }} {{ STATUS }}"})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    for row in parquet(job_dir / "runs/job"):
        assert (row["status"], row["text"]) == ("ok", "fine")
        assert row["endpoint"] == fs.address
    shown = run_bagent(["results", "--with-input", "--ordered"], job_dir).lines()
    assert shown[0]["input"] == {
        "id": "r1",
        "Status": "a",
        "STATUS": "b",
        "error": "c",
        "text": "d",
        "endpoint": "e",
        "Input": "f",
    }


def test_an_input_that_is_not_kept_leaves_its_names_free(fs, job_dir):
    fs.set_script({"*": [ok("fine")]})
    values = [{"id": "r1", "text": "t", "input": "mine", "INPUT": 1}]
    write_job(job_dir, fs.url, values, results={"keep_input": False})
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert found["r1"]["status"] == "ok"
    (row,) = parquet(job_dir / "runs/job")
    assert row["input"] is None


@pytest.mark.parametrize("target", ["run.duckdb", "results.parquet"])
def test_a_table_that_cannot_be_replaced_costs_no_result(fs, job_dir, target):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    (job_dir / "runs/job" / target).mkdir(parents=True)
    (job_dir / "runs/job" / target / "kept").touch()
    done = run_bagent(RUN, job_dir)
    assert done.code in (0, 74), done.err
    assert "Traceback" not in done.err
    assert target.partition(".")[0] in done.err
    assert (job_dir / "runs/job" / target / "kept").exists()
    assert len(results_by_id(job_dir)) == 3


def test_a_database_that_is_broken_is_made_anew(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert run_bagent([*RUN, "--limit", "2"], job_dir).code == 0
    run = job_dir / "runs/job"
    (run / "run.duckdb").write_bytes(b"not a database" * 400)
    (run / "results.parquet").write_bytes(b"PAR1 broken")
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert database(run, "select count(*) n from results") == [{"n": 3}]
    assert len(parquet(run)) == 3
