from __future__ import annotations

import json
import subprocess
import time
from hashlib import blake2b
from pathlib import Path

import duckdb
import msgspec
import pytest

from bagent.store.journal.journal import Journal
from bagent.types import ToolRecord
from support.stored_runs import attempt_of, make_run, stored


@pytest.fixture
def run(job_dir: Path) -> Path:
    outcomes = [stored(n) for n in range(3)]
    outcomes.append(stored(3, status="failed", error_kind="timeout"))
    return make_run(job_dir / "runs" / "review", outcomes).path


@pytest.fixture
def ask(bagent):
    """``ask(RUN, SQL)`` returns the rows that ``bagent query`` prints."""
    return lambda run, sql: bagent(["query", run, sql, "--format", "jsonl"]).lines()


COUNT = "select count(*) as n from results"


def test_json_columns_come_as_json(ask, run):
    sql = "select id, output, 1.5::decimal(4,2) as d, date '2026-01-02' as day from results limit 1"
    (row,) = ask(run, sql)
    assert row == {"id": "r0", "output": {"score": 0}, "d": "1.50", "day": "2026-01-02"}


def test_wrong_sql_is_told_in_one_line(bagent, run):
    done = bagent(["query", "select nothing from results"])
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("bagent: error: SQL: ")
    assert len(done.err.splitlines()) == 1
    assert bagent(["query", "review", " ; "]).code == 2
    script = bagent(["query", "review"], stdin="select nothing;\nselect 1;\n")
    assert (script.code, script.out) == (2, ""), "a script ends at its first wrong statement"


def test_new_rows_are_seen_while_a_run_goes_on(ask, run):
    assert ask(run, COUNT) == [{"n": 4}]
    make_run(run, [stored(7)])
    with (run / "journal" / "rows-all-000001.jsonl").open("ab") as file:
        file.write(b'{"key":"half')
    assert ask(run, COUNT) == [{"n": 5}]


def test_a_folder_called_as_a_column_changes_no_column(bagent, ask, job_dir):
    run = make_run(job_dir / "model=x" / "status=y" / "run", [stored(0)]).path
    columns = ["id", "status", "model"]
    (row,) = ask(run, f"select {', '.join(columns)} from results")
    assert row == {name: getattr(stored(0), name) for name in columns}
    assert bagent(["results", str(run), "--format", "jsonl"]).lines()[0]["status"] == "ok"


def test_a_run_that_keeps_no_tables_can_be_asked(ask, job_dir):
    run = make_run(job_dir / "runs" / "bare", [stored(0)], parquet=False, duckdb=False)
    assert ask("bare", COUNT) == [{"n": 1}]
    assert not (run.path / "results.parquet").exists()


@pytest.fixture
def read_only(job_dir: Path):
    folder = job_dir / "frozen"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    make_run(folder / "run", [stored(n) for n in range(5)])
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    yield folder / "run"
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_on_a_read_only_file_system_can_be_read(bagent, ask, read_only):
    assert ask(read_only, COUNT) == [{"n": 5}]
    assert len(bagent(["results", read_only]).lines()) == 5
    assert json.loads(bagent(["status", read_only, "--json"]).out)["ok"] == 5


def test_without_sql_a_shell_takes_statements_from_stdin(bagent, run):
    script = (
        ".tables\n.format jsonl\nselect count(*) as n\nfrom results;\n"
        "select max(row) as m from results"
    )
    done = bagent(["query", "review"], stdin=script)
    assert done.code == 0, done.err
    tables, asked = done.out.split("turns\n")
    assert "by_endpoint" in tables
    assert [json.loads(line) for line in asked.splitlines()] == [{"n": 4}, {"m": 3}]
    assert bagent(["query"], stdin="from latency;").code == 0


def test_the_views_answer_common_questions(ask, job_dir):
    full = {"status": "failed", "error_kind": "overloaded", "text": None}
    outcomes = [
        stored(0, latency_ms=100.0, ttft_ms=7.0, endpoint="b"),
        stored(1, latency_ms=300.0, ttft_ms=9.0, endpoint="b"),
        stored(2, error="HTTP 503: queue of 17", endpoint="http://a", **full),
        stored(3, error="HTTP 503: queue of 18", endpoint="http://b", **full),
    ]
    directory = make_run(job_dir / "runs" / "v", outcomes)
    journal = Journal.open(directory.path, "all", clock=time.monotonic, report=print)
    for row, endpoint, kind in ((0, "http://a", None), (0, "http://a", "timeout"), (1, "b", None)):
        one = attempt_of(stored(row, endpoint=endpoint, error_kind=kind, latency_ms=1000.0))
        journal.write_attempts([msgspec.structs.replace(one, group=f"g{row}{kind}")])
    journal.close()

    (error,) = ask("v", "from errors")
    assert (error["rows"], error["endpoints"], error["percent"]) == (2, 2, 50.0)
    assert error["pattern"] == "HTTP #: queue of #"
    assert error["first_id"] == "r2"
    (latency,) = ask("v", "from latency")
    assert (latency["answers"], latency["latency_p50"], latency["latency_max"]) == (2, 100.0, 300.0)
    first, second = ask("v", "from by_endpoint")
    assert (first["endpoint"], first["tries"], first["failed"]) == ("b", 1, 0)
    assert first["first_token_p50"] == latency["ttft_p50"] == 7.0
    assert second["first_token_p50"] is None
    assert (second["tries"], second["failed"], second["most_error"]) == (2, 1, "timeout")
    assert second["ms_p50"] == 1000.0
    turns = ask("v", "from turns")
    assert [(t["row"], t["tries"], t["tool_calls"]) for t in turns] == [(0, 2, 0), (1, 1, 0)]


def test_rows_that_a_stage_made_of_one_input_row_have_turns_of_their_own(ask, job_dir):
    ids = ["r0/0", "r0/1"]
    outcomes = [stored(0, key=f"{n:016x}", id=one, stage="part") for n, one in enumerate(ids)]
    directory = make_run(job_dir / "runs" / "v", outcomes)
    journal = Journal.open(directory.path, "all", clock=time.monotonic, report=print)
    for number, outcome in enumerate(outcomes):
        journal.write_attempts([attempt_of(outcome)] * (number + 1))
        unit = {"key": outcome.key, "row": 0, "stage": "part", "answer": 0}
        call = {"turn": 1, "name": f"tool{number}", "arguments": "{}", "started": 2.0}
        journal.write_tool(ToolRecord(**unit, **call, id=outcome.id))
    journal.close()
    seen = [(turn["id"], turn["tries"], turn["tools"]) for turn in ask("v", "from turns")]
    assert seen == [("r0/0", 1, "tool0"), ("r0/1", 2, "tool1")]


def test_tables_that_lack_a_column_of_this_version_are_made_anew(ask, run):
    ask(run, "from turns")
    made = json.loads((run / "tables.json").read_bytes())
    # As a version before left them: without the column, of the same files by their sizes.
    attempts = run / "attempts.parquet"
    with duckdb.connect() as connection:
        rows = f"select * exclude (id) from read_parquet('{attempts}')"
        connection.execute(f"copy ({rows}) to '{attempts}' (format parquet)")
    sizes = [(file.name, file.stat().st_size) for file in (run / "journal").glob("attempts-*")]
    before = blake2b(msgspec.json.encode((1, sizes, ())), digest_size=8).hexdigest()
    made["tables"]["attempts"] = before
    (run / "tables.json").write_text(json.dumps(made))
    assert ask(run, "select count(id) as n from attempts") == [{"n": 0}]
