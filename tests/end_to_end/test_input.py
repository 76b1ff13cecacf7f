"""Input as people really have it: what other programs wrote, cut, joined or piped."""

from __future__ import annotations

import gzip
import os
import pty
import subprocess
import sys

import pytest

from support.cli import Running, clean_env, run_bagent
from support.jobs import parquet, results_by_id, sql, write_job
from support.replies import canned, echo
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows

BAGENT = f"{sys.executable} -m bagent {' '.join(RUN)}"


@pytest.fixture(autouse=True)
def echo_every_prompt(fs):
    """Let the server repeat each prompt."""
    fs.set_script({"*": [echo()]})


@pytest.fixture
def rows_file(fs, job_dir):
    """Writes the bytes of rows.jsonl beside a job that has ``id`` alone in its prompt."""

    def write(data: bytes, name: str = "rows.jsonl", **keys):
        (job_dir / name).write_bytes(data)
        keys = {"prompt": {"user": "id={{ id }}"}, "results": NO_TABLES} | keys
        write_job(job_dir, fs.url, None, input=name, **keys)

    return write


@pytest.mark.parametrize("piped", [False, True])
def test_rows_have_their_index_and_physical_line(rows_file, job_dir, piped):
    data = b'\xef\xbb\xbf{"id":"a"}\r\n\r\n   \n{"id":"b\xe2\x80\xa8"}\n\n{"id":"c"\n{"id":"d"}'
    rows_file(data)
    done, found = run_rows(job_dir, "-i", "-", stdin=data) if piped else run_rows(job_dir)
    assert done.code == 1, done.err
    lines = sorted((row["row"], row["line"]) for row in found.values())
    assert lines == [(0, 1), (1, 4), (2, 6), (3, 7)]
    assert {"a", "b\u2028", "d"} < set(found)
    assert "stdin:6" in done.err or "rows.jsonl:6" in done.err


@pytest.mark.tables
def test_unreadable_lines_fail_alone_and_are_kept_aside_as_they_were(rows_file, job_dir):
    bad = [b'"text"', b"[1,2]", b"17", b"null", b"oops", b'{"id":"caf\xe9"}', b'{"id":3']
    rows_file(b"\n".join([b'{"id":1}', *bad, b'{"id":2}']), results={"duckdb": False})
    done = run_bagent(RUN, job_dir)
    assert done.code == 1
    found = results_by_id(job_dir)
    assert found[1]["status"] == found[2]["status"] == "ok"
    failed = [row for row in found.values() if row["status"] == "bad_input"]
    assert [row["line"] for row in failed] == [2, 3, 4, 5, 6, 7, 8]
    assert "UTF-8" in failed[5]["error"]
    kept = (job_dir / "runs/job/bad_lines.txt").read_bytes()
    assert all(line in kept for line in bad)


def test_job_prompt_and_schema_files_may_come_from_windows(fs, job_dir):
    fs.set_script({"*": [canned()]})
    write_job(job_dir, fs.url, 1, prompt={"user": {"file": "p.md"}}, results=NO_TABLES)
    schema = '{"type": "object", "properties": {"a": {"enum": ["x"]}}}'
    (job_dir / "p.md").write_bytes('id={{ id }}\r\n"{{ text }}"\r\n'.encode("utf-8-sig"))
    (job_dir / "s.json").write_bytes(schema.replace(" ", "\r\n").encode("utf-8-sig"))
    text = (job_dir / "job.yaml").read_text() + "output: {schema: s.json, retries: 0}\n"
    (job_dir / "job.yaml").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    done, found = run_rows(job_dir)
    assert "\ufeff" not in str(fs.requests[0].body)
    assert "\r" not in fs.requests[0].prompts[0]
    assert found["r1"]["status"] == "ok", done.err


@pytest.mark.tables
def test_lone_surrogates_leave_valid_utf_8_in_every_file_of_the_run(fs, job_dir):
    lines = [
        '{"id":"r1\\udc00","text":"a\\ud800b","k\\udfff":1}',
        '{"id":"r2","text":"\\ud83d\\ude00"}',
        '{"id":"r3","text":"x"',
        '{"id":"r4","text":"fails"}',
    ]
    (job_dir / "rows.jsonl").write_text("\n".join(lines))
    prompt = "id={{ id }} {{ text }}{% if id == 'r4' %}{{ 1 // 0 }}{% endif %}"
    write_job(job_dir, fs.url, None, prompt={"user": prompt}, where="length(text) > 0")
    done, printed = run_rows(job_dir)
    assert done.code == 1, done.err
    assert printed["r1\\udc00"]["input"]["text"] == "a\\ud800b"
    run = job_dir / "runs/job"
    texts = [path for path in run.rglob("*") if path.suffix in {".json", ".jsonl", ".log", ".txt"}]
    assert {"run.json", "failed.jsonl", "bad_lines.txt"} <= {path.name for path in texts}
    for path in texts:
        path.read_bytes().decode("utf-8")
    shown = run_bagent(["results", "--with-input"], job_dir)
    found = {row["id"]: row for row in shown.lines()}
    assert found["r1\\udc00"]["text"] == "id=r1\ufffd a\ufffdb"
    assert found["r1\\udc00"]["input"]["text"] == "a\\ud800b"
    assert found["r2"]["text"].endswith("\U0001f600")
    assert {row["id"] for row in parquet(run)} >= {"r1\\udc00", "r2"}
    (job_dir / "printed.jsonl").write_text(shown.out, encoding="utf-8")
    assert len(sql(f"select id from read_json('{job_dir}/printed.jsonl')")) == 4


def test_ids_that_json_readers_differ_on_are_ids_of_their_own(rows_file, job_dir):
    ids = ["1", '"1"', "1.5", "123456789012345678901234567890", '"\\u0000"', '"d","id":"e"']
    rows_file("\n".join(f'{{"id":{text},"x":NaN}}' for text in ids).encode(), results={})
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    found = results_by_id(job_dir)
    assert (found[1]["line"], found["1"]["line"]) == (1, 2)
    assert {1.5, 123456789012345678901234567890, "\0", "e"} < set(found)
    assert len(found) == len(parquet(job_dir / "runs/job")) == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("row.jsonl", "did you mean rows.jsonl"),
        (".", "folder"),
        ("rows.xlsx", "CSV"),
        ("cut.jsonl.gz", "cut.jsonl.gz"),
    ],
)
def test_an_input_that_cannot_be_read_says_how_to_mend_it(fs, job_dir, name, words):
    write_job(job_dir, fs.url, 2, input=name)
    (job_dir / "rows.xlsx").write_bytes(b"PK\x03\x04")
    (job_dir / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"id":1}\n' * 500)[:-20])
    assert words in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []
    assert not (job_dir / "runs").exists()


def test_a_limit_counts_the_rows_of_a_query_that_a_condition_leaves(fs, job_dir):
    query = {"sql": "select * from read_json('rows.jsonl')"}
    write_job(job_dir, fs.url, 6, input=query, where="id <> 'r2'", results=NO_TABLES)
    done, found = run_rows(job_dir, "--limit", "3")
    assert done.code == 0, done.err
    assert sorted(found) == ["r1", "r3", "r4"]


# --- pipes ----------------------------------------------------------------------------------------


@pytest.mark.process("pipe")
def test_rows_from_a_pipe_are_answered_as_they_come(fs, job_dir):
    write_job(job_dir, fs.url, None, input=None, results=NO_TABLES)
    with Running([*RUN, "-i", "-", "-o", "-"], job_dir) as running:
        running.write('{"id":"r1","text":"one"}\n')
        running.wait_for_out('"id":"r1"')
        running.write('{"id":"r2","text":"two"}\n{"id":"r3","text":"no newline"}')
        running.wait_for_out('"id":"r2"')
        done = running.finish()
    assert done.code == 0, done.err
    assert [row["id"] for row in done.lines()] == ["r1", "r2", "r3"]


@pytest.mark.process("pipe")
@pytest.mark.parametrize(
    ("stdin", "code", "words"), [("terminal", 2, "terminal"), ("closed", 0, "no rows")]
)
def test_a_stdin_that_gives_no_rows_does_not_wait(fs, job_dir, stdin, code, words):
    write_job(job_dir, fs.url, None, input="-", results=NO_TABLES)
    master, slave = pty.openpty()
    try:
        line = f"{BAGENT} <&-" if stdin == "closed" else BAGENT
        done = subprocess.run(
            ["bash", "-c", line], cwd=job_dir, env=clean_env(job_dir), stdin=slave,
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
