"""A run directory may come from somebody else: looking at it runs, reads and writes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from bagent.rows import RowsConfig
from support.jobs import write_job
from support.stored_runs import make_run, stored

SECRET = "s3cret words"
READING = (
    ["query", "evil", "select * from results"],
    ["results", "evil", "--format", "table"],
    ["results", "evil", "--with-input"],
    ["compare", "evil", "good"],
    ["report", "evil"],
    ["status", "evil"],
)


@pytest.fixture
def evil(job_dir: Path) -> Callable[..., Path]:
    """Make two equal runs of two rows, and change the ``run.json`` of one."""

    def make(**changes: Any) -> Path:
        outcomes = [
            stored(n, output=msgspec.Raw(b'{"x":1}'), key=f"{n:016x}", id=f"r{n}") for n in range(2)
        ]
        for name in ("good", "evil"):
            shutil.rmtree(job_dir / "runs" / name, ignore_errors=True)
            make_run(job_dir / "runs" / name, outcomes, answer_columns=[("x", "BIGINT")])
        path = job_dir / "runs" / "evil" / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path.parent

    return make


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files under a folder by path, those of runs apart."""
    result = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in result if path.parent.parent.name != "runs"}


def test_modules_in_the_current_folder_are_not_imported(evil, fs, job_dir):
    evil()
    for name in ("duckdb", "msgspec", "bagent"):
        (job_dir / f"{name}.py").write_text("open('owned', 'w').close()\n")
    write_job(job_dir, fs.url, 1)
    for words in (["query", "evil", "select 1"], ["run", "job.yaml"]):
        command = [sys.executable, "-P", "-m", "bagent", *words]
        subprocess.run(command, cwd=job_dir, check=True, capture_output=True)
        assert not (job_dir / "owned").exists()


COPY = "COPY (SELECT 'echo owned') TO 'owned.sh' (FORMAT csv, HEADER false)"


@pytest.mark.parametrize(
    "rows",
    [
        {
            "inputs": [
                {"sql": f"{COPY}; SELECT 'r0' AS id"},
                {"sql": f"WITH x AS ({COPY}) SELECT 1"},
            ]
        },
        {"inputs": ["rows.jsonl"], "where": f"(WITH x AS ({COPY}) SELECT 1)"},
    ],
    ids=["inputs", "where"],
)
def test_sql_of_a_run_directory_is_never_run(bagent, job_dir, evil, rows):
    evil(
        rows={"base": str(job_dir), **rows},
        answer_columns=[
            ["x", f"VARCHAR) FROM (SELECT 1)) TO '/dev/null'; {COPY}; SELECT (1"],
            ['y" FROM (SELECT 1); --', "STRUCT(a VARCHAR, b INTEGER)"],
            ["'] || chr(1) --", "DECIMAL(38,2)"],
            ["", "x'y"],
            ["z", 'STRUCT("a"") ; COPY" VARCHAR)'],
            [None, "JSON"],
        ],
        stages=["main'; " + COPY, 'a" b'],
        job={"stages": [{"name": "main", "kind": "sql", "query": COPY}]},
    )
    before = files_of(job_dir)
    for command in READING:
        done = bagent(command)
        assert done.code == 0, done.err
    assert files_of(job_dir) == before
    described = bagent(["query", "evil", "describe answers", "--format", "jsonl"]).lines()
    types = [row["column_type"] for row in described[3:]]
    struct = 'STRUCT("a"") ; COPY" VARCHAR)'
    assert types == ["JSON", "JSON", "DECIMAL(38,2)", "JSON", struct, "JSON"]


def test_files_that_a_foreign_run_names_are_not_read(bagent, job_dir, evil):
    (job_dir / "notes.txt").write_text(SECRET)
    (job_dir / "rows.jsonl").write_text(json.dumps({"id": "r0", "t": SECRET}) + "\n")
    config = RowsConfig(({"files": "notes.txt"}, "rows.jsonl"), job_dir, fields=())
    prompt = {"prompt": {"user": {"file": str(job_dir / "notes.txt")}}}
    run = evil(rows=json.loads(config.to_json()), job=prompt)
    for command in READING:
        done = bagent(command)
        assert done.code == 0, done.err
        assert SECRET not in done.out + done.err
    assert not any(SECRET.encode() in path.read_bytes() for path in run.iterdir() if path.is_file())


@pytest.mark.parametrize("name", ["journal", "journal/rows-all-000001.jsonl", "run.json"])
def test_links_out_of_a_run_directory_are_not_followed(bagent, job_dir, evil, name):
    run = evil()
    elsewhere = job_dir / "elsewhere"
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    before = files_of(elsewhere)
    for command in READING:
        done = bagent(command)
        assert "is a link" in done.err
        assert (done.code == 2) is (name != "run.json")
    assert files_of(elsewhere) == before


def test_links_in_the_place_of_tables_are_replaced(bagent, job_dir, evil):
    run = evil()
    victim = job_dir / "victim"
    victim.write_text(SECRET)
    assert bagent(["query", "evil", "select 1"]).code == 0
    for name in ("results.parquet", "report.html"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    for command in READING:
        assert bagent(command).code == 0
    assert victim.read_text() == SECRET


def test_tables_of_other_columns_are_made_anew(bagent, job_dir, evil):
    run = evil()
    bagent(["query", "evil", "select 1"])
    with duckdb.connect() as connection:
        connection.execute(f"copy (select 'lie' as id, 1 as x) to '{run}/results.parquet'")
    (run / "answers.parquet").write_bytes(b"PAR1 and nothing else")
    assert "r1" in bagent(["query", "evil", "select id, status from results"]).out
    assert bagent(["query", "evil", "select sum(x) from answers", "--format", "csv"]).code == 0


@pytest.mark.database
def test_the_database_of_a_run_directory_is_not_opened(bagent, job_dir, evil):
    run = evil()
    bagent(["query", "evil", "select 1"])
    with duckdb.connect(run / "run.duckdb") as connection:
        connection.execute("drop table results")
        connection.execute("create view results as select 'lie' as id, getvariable('x') as status")
    for command in READING:
        assert "lie" not in bagent(command).out


def test_what_this_user_ran_is_read_again_where_it_is(bagent, job_dir):
    (job_dir / "rows.jsonl").write_text('{"id": "a", "t": "x"}\n{"id": "b", "t": "y"}\n')
    (job_dir / "job.yaml").write_text("backend: sim\ninput: rows.jsonl\nprompt: '{{ t }}'\n")
    assert bagent(["run", "job.yaml", "--name", "own"]).code == 0
    run = job_dir / "runs" / "own"
    for path in run.glob("*.parquet"):
        path.unlink()
    requested = ["results", "own", "--with-input", "--columns", "input"]
    complete = [{"input": {"id": "a", "t": "x"}}, {"input": {"id": "b", "t": "y"}}]
    assert bagent(requested).lines() == complete
    assert '"x"' in bagent(["query", "own", "select input from results"]).out
    moved = run.rename(run.with_name("moved"))
    (job_dir / "rows.jsonl").unlink()
    assert bagent(["results", "moved", "--with-input", "--columns", "input"]).lines() == complete
    (moved / "results.parquet").unlink()
    done = bagent(["results", "moved", "--with-input", "--columns", "input"])
    assert done.lines() == [{"input": None}, {"input": None}]
    assert "the input is left out: you did not run" in done.err


@pytest.mark.database
def test_a_run_directory_is_never_taken_for_another_one(bagent, job_dir):
    name = "it's[1]"
    for folder, count in ((name, 2), ("it's1", 3), ("its[1]", 3), ("its1", 3)):
        make_run(job_dir / "runs" / folder, [stored(n) for n in range(count)])
    run = f"runs/{name}"
    counts = "select (select count(*) from results) + (select count(*) from answers) as n"
    assert bagent(["query", run, counts, "--format", "jsonl"]).lines() == [{"n": 4}]
    for more in ([], ["--where", "true"]):
        rows = bagent(["results", run, "--columns", "id", *more]).lines()
        assert [row["id"] for row in rows] == ["r0", "r1"]
    compared = json.loads(bagent(["compare", run, "runs/its1", "--format", "json"]).out)
    assert compared["numbers"]["rows_a"] == 2
    with duckdb.connect(job_dir / "runs" / name / "run.duckdb", read_only=True) as connection:
        assert connection.execute(counts).fetchall() == [(4,)]


@pytest.mark.parametrize("ending", ["gz", "old"])
def test_a_packed_segment_is_named_and_its_rows_are_not_sent_again(bagent, job_dir, fs, ending):
    write_job(job_dir, fs.url, 3)
    assert bagent(["run", "job.yaml"]).code == 0
    segment = job_dir / "runs" / "job" / "journal" / "rows-all-000001.jsonl"
    segment.rename(f"{segment}.{ending}")
    for command in (["run", "job.yaml"], ["results"], ["query", "select 1"], ["status"]):
        done = bagent(command)
        assert done.code == 2 or command == ["status"]
        assert f"{segment.name}.{ending}: the journal is read from .jsonl files only" in done.err
        assert f"unpack or rename it to {segment.name}" in done.err
    assert len(fs.requests) == 3


@pytest.mark.parametrize("name", ["run.log", "input.jsonl", "journal"])
def test_a_run_writes_through_no_link(bagent, job_dir, fs, name):
    write_job(job_dir, fs.url, 1)
    run = job_dir / "runs" / "job"
    run.mkdir(parents=True)
    victim = job_dir / "victim"
    victim.mkdir() if name == "journal" else victim.write_text(SECRET)
    (run / name).symlink_to(victim)
    done = bagent(["run", "job.yaml"])
    assert done.code == 2
    assert f"{name} is a link" in done.err
    assert fs.requests == []
    assert list(victim.iterdir()) == [] if name == "journal" else victim.read_text() == SECRET
