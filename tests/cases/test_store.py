"""Results in files and tables: of odd values, while a run goes on, and beside a locked file."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from support.cli import Running, run_bagent
from support.jobs import database, parquet, results_by_id, sql, write_job
from support.replies import echo, gated, ok, ok_json, status
from support.run_outcomes import NO_TABLES, RUN, run_rows

ANY = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_late_errors_and_late_keys_are_all_there(fs, job_dir):
    script = {
        "r1": [ok_json({"a": 1})],
        "r2": [ok_json({"a": 2})],
        "r3": [status(400)],
        "r4": [ok_json({"a": 4, "late": {"deep": [1, None]}})],
        "r5": [ok_json({"late": "text"})],
    }
    fs.set_script(script)
    write_job(job_dir, fs.url, 5, output={"schema": ANY}, limits={"concurrency": 1})
    assert run_bagent(RUN, job_dir).code == 1
    query = "select id, status, error, output ->> '$.late' late, output->>'$.a' a from results"
    for found in (
        sql(query.replace("results", f"'{job_dir}/runs/job/results.parquet'")),
        database(job_dir / "runs/job", query),
    ):
        rows = {row["id"]: row for row in found}
        assert len(rows) == 5
        assert "400" in rows["r3"]["error"]
        assert rows["r4"]["late"] == '{"deep":[1,null]}'
        assert rows["r5"]["late"] == "text"
        assert rows["r1"]["a"] == "1"


def test_first_rows_that_all_fail_fix_no_type(fs, job_dir):
    script = {f"r{n}": [status(400)] for n in range(1, 5)}
    fs.set_script({**script, "*": [ok_json({"a": 5})]})
    write_job(job_dir, fs.url, 6, output={"schema": ANY}, limits={"concurrency": 1})
    assert run_bagent(RUN, job_dir).code == 1
    answers = parquet(job_dir / "runs/job", "answers")
    assert [row["a"] for row in answers] == [5, 5]
    assert isinstance(answers[0]["a"], int)


def test_no_rows_leave_tables_with_their_columns(fs, job_dir):
    write_job(job_dir, fs.url, 0, output={"schema": ANY})
    assert run_bagent(RUN, job_dir).code == 0
    names = sql(f"describe select * from '{job_dir}/runs/job/results.parquet'")
    assert {"id", "status", "output", "error", "input"} <= {row["column_name"] for row in names}
    assert run_bagent(["query", "select count(*) n from results"], job_dir).code == 0


def test_input_fields_named_as_columns_are_kept_apart(fs, job_dir):
    fs.set_script({"*": [ok("fine")]})
    rows = [
        {"id": 1, "ID": 2, "error": "mine", "status": "x", "output": {"a": 1}, "text": "t"},
        {"id": 2, "usage": 3, "row": "r", "input": [1], "answer": None, "a b": 1, 'q"': 2, "": 3},
    ]
    write_job(job_dir, fs.url, rows, prompt={"user": "id={{ id }}"})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    fields = ("id", "ID", "error", "status", "output")
    picked = ", ".join(f"input->'$.\"{name}\"' as f{n}" for n, name in enumerate(fields))
    query = f"select {picked}, status, error, text from results order by row"
    run = job_dir / "runs/job"
    for found in (
        sql(query.replace("from results", f"from '{run}/results.parquet'")),
        database(run, query),
    ):
        first = found[0]
        values = [first[f"f{n}"] for n in range(5)]
        assert values == ["1", "2", '"mine"', '"x"', '{"a":1}']
        assert (first["status"], first["error"], first["text"]) == ("ok", None, "fine")
    shown = run_bagent(["results", "--with-input", "--ordered"], job_dir).lines()
    assert [line["input"] for line in shown] == rows


def test_properties_of_an_answer_named_alike_or_as_columns_are_kept(fs, job_dir):
    names = ["Name", "name", "id", "ID", "stage", "answer", "a b", "row"]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    value = {name: f"value of {name}" for name in names}
    fs.set_script({"*": [ok_json(value)]})
    write_job(job_dir, fs.url, 2, output={"schema": schema})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert "table" not in done.err.lower()
    row = parquet(job_dir / "runs/job", "answers")[0]
    assert set(value.values()) <= set(row.values())
    assert row["id"] == "r1"
    assert results_by_id(job_dir)["r2"]["output"] == value


def test_values_that_tables_find_hard_are_kept_as_they_were(fs, job_dir):
    values = {
        "big": {"n": 123456789012345678901234567890},
        "float": {"n": 1e308},
        "text": {"n": "12"},
        "nul": {"n": "a\x00b"},
        "deep": {"n": [[[{"x": []}]]]},
        "none": {"n": None},
    }
    fs.set_script({name: [ok_json(value)] for name, value in values.items()})
    rows = [{"id": name, "text": ""} for name in values]
    write_job(job_dir, fs.url, rows, output={"schema": {"type": "object"}})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert "could not be made" not in done.err
    found = results_by_id(job_dir)
    assert {name: found[name]["output"] for name in values} == values
    assert len(parquet(job_dir / "runs/job")) == 6
    shown = run_bagent(["results", "--format", "csv"], job_dir)
    assert shown.code == 0
    assert "123456789012345678901234567890" in shown.out


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"type": "string", "enum": ["yes", "no"]}, "yes"),
    ],
)
def test_an_answer_that_is_no_object_has_a_column_of_its_own(fs, job_dir, schema, value):
    fs.set_script({"*": [ok_json(value)]})
    write_job(job_dir, fs.url, 2, output={"schema": schema})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert results_by_id(job_dir)["r1"]["output"] == value
    assert [row["value"] for row in parquet(job_dir / "runs/job", "answers")] == [value, value]


@pytest.mark.process("concurrent")
def test_a_run_can_be_looked_at_while_it_goes_on(fs, job_dir):
    fs.set_script({"r1": [echo()], "r2": [echo()], "*": [gated(echo())]})
    write_job(job_dir, fs.url, 5, limits={"concurrency": 3})
    with Running(RUN, job_dir) as running:
        fs.wait_for(2, "finished")
        fs.wait_for(5)
        shown = run_bagent(["results"], job_dir)
        assert {row["id"] for row in shown.lines()} == {"r1", "r2"}
        for _ in range(2):
            asked = run_bagent(
                ["query", "--format", "csv", "select count(*) from results"], job_dir
            )
            assert asked.code == 0, asked.err
            assert asked.out.split()[-1] == "2"
        status = run_bagent(["status", "job"], job_dir)
        assert "running" in status.out
        kept = run_bagent(["results", "--format", "parquet", "-o", "now.parquet"], job_dir)
        assert kept.code == 0, kept.err
        assert len(sql(f"select * from '{job_dir}/now.parquet'")) == 2
        fs.release()
        assert running.finish().code == 0
    assert len(parquet(job_dir / "runs/job")) == 5


HOLD = """
import duckdb, sys
connection = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == "read")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_database_that_somebody_holds_open_costs_no_result(fs, job_dir, how):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert run_bagent([*RUN, "--limit", "1"], job_dir).code == 0
    path = job_dir / "runs/job/run.duckdb"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        done = run_bagent(RUN, job_dir)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert len(parquet(job_dir / "runs/job")) == 3
        if how == "write":
            assert ".duckdb" in done.err
        asked = run_bagent(["query", "--format", "csv", "select count(*) from results"], job_dir)
        assert asked.out.split()[-1] == "3", asked.err
    finally:
        holder.communicate(b"")
    assert run_bagent(RUN, job_dir).code == 0
    assert database(job_dir / "runs/job", "select count(*) n from results") == [{"n": 3}]


@pytest.mark.process("concurrent")
def test_many_readers_and_one_run_do_not_disturb_each_other(fs, job_dir):
    fs.set_script({"*": [echo(delay=0.05)]})
    write_job(job_dir, fs.url, 60, limits={"concurrency": 2})
    codes = []

    def look():
        for _ in range(3):
            codes.append(run_bagent(["query", "select count(*) from results"], job_dir).code)

    with Running(RUN, job_dir) as running:
        fs.wait_for(4)
        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        done = running.finish()
        for reader in readers:
            reader.join()
    assert done.code == 0, done.err
    assert codes == [0] * 6
    assert len(parquet(job_dir / "runs/job")) == 60


def test_failed_rows_are_a_file_that_can_be_run_on(fs, job_dir):
    fs.set_script({"r2": [status(400)], "r4": [status(400)], "*": [echo()]})
    write_job(job_dir, fs.url, 5)
    assert run_bagent(RUN, job_dir).code == 1
    fs.set_script({"*": [echo()]})
    done, found = run_rows(
        job_dir, "-i", "runs/job/failed.jsonl", "--name", "rest", "--set", "results.duckdb=false"
    )
    assert done.code == 0, done.err
    assert sorted(found) == ["r2", "r4"]


def test_a_table_for_people_and_a_csv_have_a_line_for_each_row(fs, job_dir):
    fs.set_script({"*": [ok('two\nlines, "quoted"')]})
    write_job(job_dir, fs.url, 3)
    assert run_bagent(RUN, job_dir).code == 0
    import csv
    import io

    shown = run_bagent(["results", "--format", "csv", "--columns", "id,text"], job_dir)
    cells = list(csv.reader(io.StringIO(shown.out)))
    assert cells[0] == ["id", "text"]
    assert [row[1] for row in cells[1:]] == ['two\nlines, "quoted"'] * 3
    table = run_bagent(["results", "--format", "table"], job_dir)
    assert table.code == 0
    assert len(table.out.splitlines()) == 5, table.out


def test_results_that_are_not_wanted_as_tables_are_not_made(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0
    assert not list((job_dir / "runs/job").glob("*.parquet"))
    assert not list((job_dir / "runs/job").glob("*.duckdb"))
    asked = run_bagent(["query", "--format", "csv", "select count(*) from results"], job_dir)
    assert asked.out.split()[-1] == "2", asked.err
