"""Rows that come through a pipe or from other systems, and files in the wrong encoding."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.jobs import sql, write_job
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def piped(fs, job_dir):
    """Runs a job over the bytes of stdin; returns the end and the result rows by id."""
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, None, input="-", prompt={"user": "id={{ id }}"}, results=NO_TABLES)
    return lambda data: run_rows(job_dir, stdin=data)


def test_a_pipe_may_have_a_mark_crlf_blank_lines_and_no_last_newline(piped):
    done, found = piped(b'\xef\xbb\xbf{"id":"a"}\r\n\r\n  \r\n{"id":"b"}\r\n\n{"id":"c"}')
    assert done.code == 0, done.err
    places = {name: (row["row"], row["line"]) for name, row in found.items()}
    assert places == {"a": (0, 1), "b": (1, 4), "c": (2, 6)}


def test_a_broken_line_of_a_pipe_names_its_physical_line(piped):
    done, found = piped(b'{"id":"a"}\n\n\n{"id":"b"\n{"id":"c"}\n')
    assert done.code == 1
    assert [row["line"] for row in found.values() if row["status"] == "bad_input"] == [4]
    assert found["a"]["status"] == found["c"]["status"] == "ok"


def test_a_mark_inside_a_file_stays_a_part_of_its_value(fs, job_dir):
    fs.set_script({"*": [echo()]})
    (job_dir / "rows.jsonl").write_bytes('{"id":"\ufeffa"}\n'.encode())
    write_job(job_dir, fs.url, None, prompt={"user": "id={{ id }}"}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert list(found) == ["\ufeffa"]


@pytest.mark.parametrize("name", ["job.yaml", "s.json", "p.md"])
def test_a_job_prompt_or_schema_in_utf_16_is_one_clear_error(fs, job_dir, name):
    (job_dir / "s.json").write_text('{"type": "object"}')
    (job_dir / "p.md").write_text("id={{ id }}")
    prompt = {"user": {"file": "p.md"}}
    write_job(job_dir, fs.url, 1, output={"schema": "s.json"}, prompt=prompt)
    path = job_dir / name
    path.write_bytes(path.read_text().encode("utf-16"))
    error = error_of(run_bagent(RUN, job_dir))
    assert name in error
    assert "UTF-" in error
    assert fs.requests == []


def test_lone_surrogates_leave_valid_utf_8_in_every_file_of_the_run(fs, job_dir):
    fs.set_script({"*": [echo()]})
    lines = ['{"id":"r1\\udc00","text":"a\\ud800b","k\\udfff":1}', '{"id":"r2","text":"x"', "{}"]
    (job_dir / "rows.jsonl").write_text("\n".join(lines))
    write_job(job_dir, fs.url, None, prompt={"user": "id={{ id }} {{ row }}"})
    done = run_bagent(RUN, job_dir)
    assert done.code == 1, done.err
    run = job_dir / "runs/job"
    texts = [path for path in run.rglob("*") if path.suffix in {".json", ".jsonl", ".log", ".txt"}]
    assert {"run.json", "failed.jsonl", "bad_lines.txt"} <= {path.name for path in texts}
    for path in texts:
        path.read_bytes().decode("utf-8")
    printed = run_bagent(["results", "--with-input"], job_dir)
    (job_dir / "printed.jsonl").write_text(printed.out, encoding="utf-8")
    read = sql(f"select id, status from read_json('{job_dir}/printed.jsonl')")
    assert len(read) == 3
    assert [row["status"] for row in read].count("ok") == 1
