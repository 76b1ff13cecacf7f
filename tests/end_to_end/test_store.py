"""Results in files and tables: of odd values, while a run is at work, and beside a locked file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.cli import Running, run_bagent, run_here
from support.jobs import database, parquet, results_by_id, sql, write_job
from support.replies import echo, gated, ok, ok_json, status
from support.run_outcomes import RUN, run_rows, run_script

pytestmark = pytest.mark.database

ANY = {"type": "object", "properties": {"a": {"type": "integer"}}}
ONE_AT_A_TIME = {"concurrency": 1, "retries": 0}


def test_late_errors_late_keys_and_first_failures_fix_no_type(fs, job_dir):
    script = {
        "r1": [status(400)],
        "r2": [ok_json({"a": 2})],
        "r3": [status(400)],
        "r4": [ok_json({"a": 4, "late": {"deep": [1, None]}})],
        "r5": [ok_json({"late": "text"})],
    }
    done, _ = run_script(
        fs, job_dir, script, output={"schema": ANY}, limits=ONE_AT_A_TIME, results={}
    )
    assert done.code == 1
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
        assert rows["r2"]["a"] == "2"
    assert [row["a"] for row in parquet(job_dir / "runs/job", "answers")] == [2, 4, None]


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
        values = [found[0][f"f{n}"] for n in range(5)]
        assert values == ["1", "2", '"mine"', '"x"', '{"a":1}']
        assert [found[0][name] for name in ("status", "error", "text")] == ["ok", None, "fine"]
    shown = run_bagent(["results", "--with-input", "--ordered"], job_dir).lines()
    assert [line["input"] for line in shown] == rows


@pytest.mark.process("concurrent")
def test_a_run_can_be_read_while_it_is_at_work(fs, job_dir):
    fs.set_script({"r1": [echo()], "r2": [echo()], "*": [gated(echo())]})
    write_job(job_dir, fs.url, 5, limits={"concurrency": 3})
    query = ["query", "--format", "csv", "select count(*) from results"]
    with Running(RUN, job_dir) as running:
        fs.wait_for(2, "finished")
        fs.wait_for(5)
        shown = run_here(["results"], job_dir)
        assert {row["id"] for row in shown.lines()} == {"r1", "r2"}
        assert run_here(query, job_dir).out.split()[-1] == "2"
        assert "running" in run_here(["status", "job"], job_dir).out
        fs.release()
        assert run_here(query, job_dir).code == 0
        assert running.finish().code == 0
    assert len(parquet(job_dir / "runs/job")) == 5


HOLD = """
import duckdb, sys
connection = duckdb.connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_database_that_somebody_holds_open_costs_no_result(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert run_bagent([*RUN, "--limit", "1"], job_dir).code == 0
    path = job_dir / "runs/job/run.duckdb"
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout.readline() == b"held\n"
        done = run_bagent(RUN, job_dir)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert len(parquet(job_dir / "runs/job")) == 3
        assert "run.new.duckdb" in done.err
        assert sql("select count(*) n from results", path.with_name("run.new.duckdb")) == [{"n": 3}]
        asked = run_bagent(["query", "--format", "csv", "select count(*) from results"], job_dir)
        assert asked.out.split()[-1] == "3", asked.err
        holder.communicate(b"")
    assert run_bagent(RUN, job_dir).code == 0
    assert database(job_dir / "runs/job", "select count(*) n from results") == [{"n": 3}]


@pytest.mark.parametrize(
    ("target", "harm"), [("run.duckdb", "broken"), ("results.parquet", "a folder")]
)
def test_a_table_that_is_broken_or_cannot_be_replaced_costs_no_result(fs, job_dir, target, harm):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    path = job_dir / "runs/job" / target
    if harm == "broken":
        assert run_bagent([*RUN, "--limit", "2"], job_dir).code == 0
        path.write_bytes(b"not a table" * 400)
    else:
        (path / "kept").mkdir(parents=True)
    done = run_bagent(RUN, job_dir)
    assert done.code in (0, 74), done.err
    assert "Traceback" not in done.err
    assert len(results_by_id(job_dir)) == 3
    if harm == "broken":
        assert database(job_dir / "runs/job", "select count(*) n from results") == [{"n": 3}]
        assert len(parquet(job_dir / "runs/job")) == 3
    else:
        assert (path / "kept").exists()
        assert target.partition(".")[0] in done.err


def test_failed_rows_are_a_file_that_can_be_run(fs, job_dir):
    script = {"r1": [echo()], "r2": [status(400)], "r3": [status(400)]}
    assert run_script(fs, job_dir, script, results={})[0].code == 1
    fs.set_script({"*": [echo()]})
    done, found = run_rows(job_dir, "-i", "runs/job/failed.jsonl", "--name", "rest")
    assert done.code == 0, done.err
    assert sorted(found) == ["r2", "r3"]
