"""Input as people really have it: what other programs wrote, cut, joined or piped."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import Running, clean_env, run_bagent
from support.jobs import parquet, results_by_id, write_job
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows, statuses

ECHO = {"*": [echo()]}


@pytest.fixture
def rows_file(fs, job_dir):
    """Writes the bytes of rows.jsonl beside a job that has ``id`` alone in its prompt."""
    fs.set_script(ECHO)

    def write(data: bytes, name: str = "rows.jsonl", **keys):
        (job_dir / name).write_bytes(data)
        keys = {"prompt": {"user": "id={{ id }}"}, "results": NO_TABLES} | keys
        write_job(job_dir, fs.url, None, input=name, **keys)

    return write


def test_blank_lines_take_no_index_and_the_last_row_needs_no_newline(rows_file, job_dir):
    rows_file(b'{"id":1}\n\n   \n{"id":2}\n\n{"id":3}')
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert {name: (row["row"], row["line"]) for name, row in found.items()} == {
        1: (0, 1),
        2: (1, 4),
        3: (2, 6),
    }


def test_an_unreadable_row_names_its_physical_line_and_harms_no_other(rows_file, job_dir):
    rows_file(b'{"id":1}\n\n   \n{"id":2}\n\n{"id":3')
    done = run_bagent(RUN, job_dir)
    assert done.code == 1, done.err
    assert "rows.jsonl:6" in done.err
    found = [row for row in results_by_id(job_dir).values() if row["status"] != "ok"]
    assert [(row["status"], row["error_kind"], row["line"]) for row in found] == [
        ("bad_input", "bad_input", 6)
    ]


def test_only_line_feeds_part_rows(fs, job_dir):
    files = {
        "a": b'{"id":1}\n\n\n',
        "b": b'\n\n{"id":2}',
        "c": b'{"id":3}\n\t\n \r\n{"id":4}\r\n\r\n',
        "d": b'  {"id":5}  \n\t{"id":6}\t\n',
        "e": '{"id":7,"t":"a\u2028b\u0085c\\u000bd"}\n{"id":8}\n'.encode(),
    }
    fs.set_script(ECHO)
    for name, data in files.items():
        (job_dir / f"{name}.jsonl").write_bytes(data)
    prompt = {"user": "id={{ id }}"}
    write_job(job_dir, fs.url, None, input="*.jsonl", prompt=prompt, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert sorted(found) == list(range(1, 9))
    assert [found[name]["line"] for name in sorted(found)] == [1, 3, 1, 4, 1, 2, 1, 2]


def test_files_without_rows_are_0_with_a_warning(fs, job_dir):
    for name, data in {"a": b"", "b": b"\n\n  \n", "c": b"\xef\xbb\xbf"}.items():
        (job_dir / f"{name}.jsonl").write_bytes(data)
    write_job(job_dir, fs.url, None, input="*.jsonl", results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0
    assert found == {}
    assert "no rows" in done.err
    assert fs.requests == []


def test_lines_that_are_no_objects_are_bad_rows_and_no_more(rows_file, job_dir):
    lines = [b'{"id":1}', b'"text"', b"[1,2]", b"17", b"null", b"oops", b'{"id":2}']
    rows_file(b"\n".join(lines))
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert [row["line"] for row in found.values() if row["status"] == "bad_input"] == [
        2,
        3,
        4,
        5,
        6,
    ]
    assert statuses(found)[1] == statuses(found)[2] == "ok"
    assert len(found) == 7


def test_one_byte_of_another_encoding_spoils_one_row_only(rows_file, job_dir):
    rows_file(b'{"id":1}\n{"id":"caf\xe9"}\n{"id":3}\n')
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert sorted(statuses(found).values()) == ["bad_input", "ok", "ok"]
    (bad,) = [row for row in found.values() if row["status"] == "bad_input"]
    assert bad["line"] == 2
    assert "UTF-8" in bad["error"]


def test_unreadable_lines_are_kept_aside_as_they_were(rows_file, job_dir):
    rows_file(b'{"id":1}\n{"id":"caf\xe9"}\n{"id":3\n', results={})
    assert run_bagent(RUN, job_dir).code == 1
    kept = (job_dir / "runs/job/bad_lines.txt").read_bytes()
    assert b'{"id":"caf\xe9"}' in kept
    assert b'{"id":3' in kept


def test_a_byte_order_mark_and_crlf_are_no_part_of_an_id(rows_file, job_dir):
    rows_file(b'\xef\xbb\xbf{"id":"a"}\r\n{"id":"b"}\r\n')
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert list(found) == ["a", "b"]


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be"])
def test_utf_16_is_one_clear_error(fs, rows_file, job_dir, coding):
    rows_file('{"id":"a"}\r\n'.encode(coding))
    error = error_of(run_bagent(RUN, job_dir))
    assert "rows.jsonl: " in error
    assert "UTF-16" in error
    assert "UTF-8" in error
    assert fs.requests == []


def test_job_prompt_and_schema_files_may_come_from_windows(fs, job_dir):
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


def test_a_csv_from_a_spreadsheet_has_clean_names_and_whole_cells(fs, job_dir):
    fs.set_script(ECHO)
    for name, separator in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        cells = [
            ["id", "note"],
            [name[0] + "1", '"two\r\nlines, ""quoted"""'],
            [name[0] + "2", "x"],
        ]
        text = "".join(separator.join(row) + "\r\n" for row in cells)
        (job_dir / name).write_bytes(text.encode("utf-8-sig"))
    prompt = {"user": "id={{ id }} {{ note }}"}
    files = ["a.csv", "b.csv", "c.tsv"]
    write_job(job_dir, fs.url, None, input=files, prompt=prompt, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert sorted(found) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert all('lines, "quoted"' in found[name]["text"] for name in ("a1", "b1", "c1"))


def test_lone_surrogates_do_no_harm_and_can_be_read_back(fs, job_dir):
    fs.set_script(ECHO)
    lines = [
        '{"id":"r1","text":"plain"}',
        '{"id":"r2","text":"a\\ud800b"}',
        '{"id":"r3\\udc00","text":"\\udbff\\udbff"}',
        '{"id":"r4","text":"\\ud83d\\ude00"}',
    ]
    (job_dir / "rows.jsonl").write_text("\n".join(lines))
    write_job(job_dir, fs.url, None, where="length(text) > 0", results={})
    done, printed = run_rows(job_dir)
    assert done.code == 0, done.err
    assert printed["r2"]["input"]["text"] == "a\\ud800b"
    assert run_bagent(RUN, job_dir).code == 0
    assert len(fs.requests) == 4
    shown = run_bagent(["results", "--with-input"], job_dir)
    found = {row["id"]: row for row in shown.lines()}
    assert list(found) == ["r1", "r2", "r3\\udc00", "r4"]
    assert found["r2"]["text"] == "id=r2 a\ufffdb"
    assert found["r2"]["input"]["text"] == "a\\ud800b"
    assert found["r4"]["text"].endswith("\U0001f600")
    table = {row["id"]: row for row in parquet(job_dir / "runs/job")}
    assert len(table) == 4
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(job_dir / "runs/job/results.parquet").num_rows == 4


def test_numbers_and_names_that_json_readers_differ_on(rows_file, job_dir):
    lines = [
        '{"id":1}',
        '{"id":"1"}',
        '{"id":1.5}',
        '{"id":123456789012345678901234567890}',
        '{"id":"\\u0000"}',
        '{"id":"n","x":NaN,"y":Infinity}',
        '{"id":"d","id":"e"}',
    ]
    rows_file("\n".join(lines).encode(), results={})
    done = run_bagent(RUN, job_dir)
    assert "Traceback" not in done.err
    found = results_by_id(job_dir)
    assert len(found) == 7
    assert found[1]["line"] == 1
    assert found["1"]["line"] == 2
    assert found[123456789012345678901234567890]["status"] == "ok"
    assert found["n"]["status"] == "ok"
    assert len(parquet(job_dir / "runs/job")) == 7


def test_rows_with_one_id_are_two_rows_with_a_warning_that_names_both_lines(rows_file, job_dir):
    rows_file(b'{"id":"a","text":"x"}\n{"id":"b"}\n{"id":"a","text":"y"}\n')
    done = run_bagent([*RUN, "-o", "-"], job_dir)
    assert done.code == 0
    assert sorted(row["id"] for row in done.lines()) == ["a", "a", "b"]
    assert "rows.jsonl:3" in done.err
    assert "rows.jsonl:1" in done.err


def test_a_cut_off_archive_is_an_error_before_anything_is_sent(fs, rows_file, job_dir):
    rows_file(gzip.compress(b'{"id":1}\n' * 500)[:-20], "rows.jsonl.gz")
    assert "rows.jsonl.gz" in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []


def test_joined_archives_are_read_whole(rows_file, job_dir):
    rows_file(gzip.compress(b'{"id":1}\n') + gzip.compress(b'{"id":2}\n'), "rows.jsonl.gz")
    _, found = run_rows(job_dir)
    assert list(found) == [1, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("row.jsonl", "did you mean rows.jsonl"),
        (".", "folder"),
        ("rows.xlsx", "CSV"),
    ],
)
def test_an_input_that_is_not_there_says_how_to_mend_it(fs, job_dir, name, words):
    write_job(job_dir, fs.url, 2, input=name)
    (job_dir / "rows.xlsx").write_bytes(b"PK\x03\x04")
    assert words in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []
    assert not (job_dir / "runs").exists()


# --- pipes ----------------------------------------------------------------------------------------


def test_results_into_a_closed_pipe_end_quietly(fs, job_dir):
    fs.set_script({"*": [echo()]})
    rows = [{"id": f"r{n}", "text": "x" * 2000} for n in range(300)]
    write_job(job_dir, fs.url, rows, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0
    python = sys.executable
    shell = f"{python} -m bagent results | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=job_dir, env=clean_env(job_dir), capture_output=True, text=True
    )
    assert done.stderr == ""
    line, code = done.stdout.splitlines()
    assert json.loads(line)["status"] == "ok"
    assert code == "0"


@pytest.mark.process("pipe")
def test_rows_from_a_pipe_are_answered_as_they_come(fs, job_dir):
    fs.set_script(ECHO)
    write_job(job_dir, fs.url, None, input=None, results=NO_TABLES)
    with Running([*RUN, "-i", "-", "-o", "-"], job_dir) as running:
        running.write('{"id":"r1","text":"one"}\n')
        running.wait_for_out('"id":"r1"')
        running.write('{"id":"r2","text":"two"}\n{"id":"r3","text":"no newline"}')
        running.wait_for_out('"id":"r2"')
        done = running.finish()
    assert done.code == 0, done.err
    assert [row["id"] for row in done.lines()] == ["r1", "r2", "r3"]


def test_a_terminal_as_stdin_gets_a_hint_in_place_of_a_silent_wait(fs, job_dir):
    write_job(job_dir, fs.url, None, input="-", results=NO_TABLES)
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bagent", *RUN],
            cwd=job_dir,
            env=clean_env(job_dir),
            stdin=slave,
            capture_output=True,
            text=True,
            timeout=30,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "terminal" in done.stderr


@pytest.mark.parametrize("redirect", ["</dev/null", "<&-"])
def test_an_empty_or_closed_stdin_is_no_rows(fs, job_dir, redirect):
    write_job(job_dir, fs.url, None, input="-", results=NO_TABLES)
    shell = f"{sys.executable} -m bagent {' '.join(RUN)} {redirect}"
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=job_dir,
        env=clean_env(job_dir),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert "rows" in done.stderr or "stdin" in done.stderr


def test_a_run_whose_stdout_is_closed_from_the_start_saves_what_it_sent(fs, job_dir):
    fs.set_script(ECHO)
    write_job(job_dir, fs.url, 50, limits={"concurrency": 2}, results=NO_TABLES)
    shell = f"{sys.executable} -m bagent {' '.join(RUN)} -o - >&-"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=job_dir, env=clean_env(job_dir), capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 75
    assert len(results_by_id(job_dir)) == len(fs.requests)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_room_behind_stdout_is_told_and_costs_no_row(fs, job_dir):
    fs.set_script(ECHO)
    write_job(job_dir, fs.url, 3, results=NO_TABLES)
    line = f"{sys.executable} -m bagent {' '.join(RUN)} -o - > /dev/full"
    done = subprocess.run(
        ["bash", "-c", line], cwd=job_dir, env=clean_env(job_dir), capture_output=True, text=True
    )
    assert done.returncode == 74, done.stderr
    assert "cannot write to stdout: No space left on device" in done.stderr
    assert "first       make room where stdout goes to" in done.stderr
    assert len(results_by_id(job_dir)) == len(fs.requests) == 3


def test_every_row_of_a_csv_piped_by_a_query_is_there(fs, job_dir):
    """Rows that DuckDB reads: what a where condition and a query leave."""
    fs.set_script(ECHO)
    write_job(
        job_dir,
        fs.url,
        6,
        input={"sql": "select * from read_json('rows.jsonl')"},
        where="id <> 'r2'",
        results=NO_TABLES,
    )
    done, found = run_rows(job_dir, "--limit", "3")
    assert done.code == 0, done.err
    assert sorted(found) == ["r1", "r3", "r4"]
