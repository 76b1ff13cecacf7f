"""Rows that break in their own ways, and journals cut at any place."""

from __future__ import annotations

import shutil

import pytest

from support.cli import run_bagent
from support.jobs import parquet, results_by_id, rows, sql, write_job
from support.replies import echo, error_body, ok, raw, status
from support.run_outcomes import NO_TABLES, RUN, run_rows, statuses

pytestmark = pytest.mark.slow


def test_each_kind_of_bad_row_fails_alone_and_is_counted(fs, job_dir):
    fs.set_script(
        {
            "r2": [status(413, error_body(413, "too large"))],
            "r3": [status(422, error_body(422, "no"))],
            "r4": [raw(b"\xff\xfe\x00", "application/octet-stream", 400)],
            "*": [echo()],
        }
    )
    values = [{**row, "n": 4, "d": 2} for row in rows(7)]
    values[5]["d"] = 0
    del values[6]["n"]
    prompt = {"user": "id={{ id }} {{ text }} {{ n / d }}"}
    write_job(job_dir, fs.url, values, prompt=prompt, results=NO_TABLES)
    with (job_dir / "rows.jsonl").open("ab") as file:
        file.write(b'{"id": "torn", "te\n{"id": "r9", "text": "last", "n": 1, "d": 1}\n')
    done, found = run_rows(job_dir)
    assert done.code == 1, done.err
    kinds = [row["error_kind"] for _, row in sorted(found.items(), key=lambda one: one[1]["row"])]
    assert [kinds[0], *kinds[2:]] == [
        None,
        "rejected",
        "rejected",
        None,
        "template",
        "template",
        "bad_input",
        None,
    ]
    assert kinds[1] in ("rejected", "context_overflow")
    assert found["r9"]["status"] == "ok"
    assert all(fs.count(f"r{n}") == 1 for n in (1, 2, 3, 4, 5, 9))
    assert done.err.count("1 x template") == 2


@pytest.mark.parametrize("name", ["rows", "attempts"])
def test_a_journal_cut_at_any_byte_of_its_end_goes_on(fs, job_dir, tmp_path, name):
    fs.set_script({"*": [ok("schön \u2028 \U0001f33f")]})
    write_job(job_dir, fs.url, 4, results=NO_TABLES, limits={"concurrency": 1})
    assert run_bagent(RUN, job_dir).code == 0
    paths = [path for path in (job_dir / "runs/job/journal").iterdir() if name in path.name]
    (path,) = [path for path in paths if path.suffix == ".jsonl"]
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    for at in (last + 1, last + (len(data) - last) // 3, len(data) - 2):
        folder = tmp_path / str(at)
        shutil.copytree(job_dir, folder)
        (folder / path.relative_to(job_dir)).write_bytes(data[:at])
        before = len(fs.requests)
        done, found = run_rows(folder)
        assert done.code == 0, done.err
        assert len(found) == 4
        assert len(fs.requests) - before == (1 if name == "rows" else 0)


def test_tables_after_a_cut_journal_hold_each_row_once(fs, job_dir):
    fs.set_script({"*": [ok("fine")]})
    write_job(job_dir, fs.url, 6, limits={"concurrency": 1})
    assert run_bagent(RUN, job_dir).code == 0
    (path,) = (job_dir / "runs/job/journal").glob("rows-*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    torn = run_bagent(["results"], job_dir)
    assert torn.code == 0, torn.err
    assert len(torn.lines()) == 5
    assert run_bagent(RUN, job_dir).code == 0
    names = [row["id"] for row in parquet(job_dir / "runs/job")]
    assert names == [f"r{n}" for n in range(1, 7)]


def test_a_row_that_fails_again_and_again_is_one_current_row(fs, job_dir):
    fs.set_script({"r2": [status(500), status(500), status(400), ok("at last")], "*": [echo()]})
    write_job(job_dir, fs.url, 3, limits={"retries": 0})
    codes, seen = [], []
    for _ in range(4):
        codes.append(run_bagent(RUN, job_dir).code)
        seen.append(results_by_id(job_dir)["r2"]["error_kind"])
    assert codes == [1, 1, 1, 0]
    assert seen == ["overloaded", "overloaded", "rejected", None]
    run = job_dir / "runs/job"
    assert len(parquet(run)) == 3
    assert len(parquet(run, "attempts")) == len(fs.requests)
    failed = run / "failed.jsonl"
    assert not failed.exists() or failed.read_bytes() == b""


def test_truncated_invalid_and_empty_answers_are_gaps_too(fs, job_dir):
    schema = {"type": "object", "required": ["a"]}
    fs.set_script(
        {
            "r1": [ok('{"a": 1, "b": [', finish_reason="length")],
            "r2": [ok('{"b": 1}')],
            "r3": [ok(None)],
            "*": [ok('{"a": 1}')],
        }
    )
    output = {"schema": schema, "retries": 0}
    write_job(job_dir, fs.url, 5, output=output, limits={"retries": 0}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert statuses(found) == {
        "r1": "truncated",
        "r2": "invalid",
        "r3": "failed",
        "r4": "ok",
        "r5": "ok",
    }
    fs.set_script({"*": [ok('{"a": 2}')]})
    before = len(fs.requests)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert sorted(seen.row_id for seen in fs.requests[before:]) == ["r1", "r2", "r3"]
    assert {row["output"]["a"] for row in found.values()} == {1, 2}


def test_rows_of_a_stopped_server_are_no_failures(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 5)
    assert run_bagent([*RUN, "--limit", "2"], job_dir).code == 0
    fs.stop()
    assert run_bagent([*RUN, "--wait-hosts", "1s"], job_dir).code == 75
    fs.restart()
    assert run_bagent(RUN, job_dir).code == 0
    count = sql(f"select count(*) n from '{job_dir}/runs/job/results.parquet' where status='ok'")
    assert count == [{"n": 5}]
