"""Whole runs over rows in a bucket: resumed, sampled, shown, and what is wrong said in words."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter

import duckdb
import pytest

from bagent.remote import storage
from support.cli import run_bagent
from support.jobs import results, write_job
from support.remote_files import file_server
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN, error_of

pytestmark = pytest.mark.tables  # runs publish them at their end

LINES = b"".join(b'{"id": "r%04d", "text": "row %d", "other": %d}\n' % (n, n, n) for n in range(60))


@pytest.fixture
def site(monkeypatch):
    with file_server() as server:
        monkeypatch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))
        storage.storage_of.cache_clear()
        server.files["b/rows/a.jsonl"] = LINES
        yield server
        storage.storage_of.cache_clear()


@pytest.fixture
def job(fs, job_dir, site):
    """Writes a job whose rows are in the bucket."""
    fs.set_script({"*": [echo()]})

    def write(source="s3://b/rows/*.jsonl", **keys):
        keys = {"prompt": {"user": "id={{ id }} {{ text }}"}, "results": NO_TABLES} | keys
        write_job(job_dir, fs.url, None, input=source, **keys)

    return write


def test_a_run_over_a_bucket_samples_filters_goes_on_and_shows_its_input(fs, site, job, job_dir):
    job(where="other < 50")
    done = run_bagent([*RUN, "--limit", "5"], job_dir, env=site.env)
    assert done.code == 0, done.err
    assert len(fs.requests) == 5
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    assert len(fs.requests) == 50
    shown = run_bagent(["results", "--with-input"], job_dir, env=site.env)
    rows = {row["id"]: row for row in shown.lines()}
    assert {row["input"]["other"] for row in rows.values()} == set(range(50))
    assert rows["r0007"]["source"] == "s3://b/rows/a.jsonl"
    assert rows["r0007"]["line"] == 8


def test_rows_edited_between_two_starts_are_sent_as_from_a_local_file(fs, site, job, job_dir):
    job("s3://b/rows/a.jsonl")
    assert run_bagent(RUN, job_dir, env=site.env).code == 0
    edited = LINES.replace(b'"row 7"', b'"edited"') + b'{"id": "r0060", "text": "new"}\n'
    site.files["b/rows/a.jsonl"] = edited
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    sent = [json.dumps(request.body) for request in fs.requests[60:]]
    assert len(sent) == 2
    assert any("edited" in text for text in sent)
    assert any("new" in text for text in sent)
    assert "61 rows: 61 ok, 0 failed" in done.err


def test_a_run_reads_the_columns_that_it_uses_and_its_tables_keep_whole_rows(
    fs, site, job, job_dir
):
    query = "select 'r' || range as id, 'row ' || range as text, range as other from range(20)"
    duckdb.sql(f"COPY ({query}) TO '{job_dir}/a.parquet' (FORMAT parquet)")
    site.files["b/a.parquet"] = (job_dir / "a.parquet").read_bytes()
    job("s3://b/a.parquet", where="other < 15")
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    assert len(fs.requests) == 15
    shown = run_bagent(["results", "--with-input"], job_dir, env=site.env)
    assert {row["input"]["other"] for row in shown.lines()} == set(range(15))
    job("s3://b/a.parquet", prompt={"user": "{{ id }} {{ txet }}"}, name="typo")
    assert "did you mean text?" in error_of(run_bagent(["run", "job.yaml"], job_dir, env=site.env))


def test_check_and_init_read_a_bucket(fs, site, job, job_dir):
    job()
    done = run_bagent(["check", "job.yaml", "--prompts", "1"], job_dir, env=site.env)
    assert done.code == 0, done.err
    assert "s3://b/rows/*.jsonl" in done.out
    assert "id=r0000" in done.out
    site.files["b/t.csv"] = b"nr,story\n1,long text one\n2,long text two\n"
    done = run_bagent(["init", "made", "--from", "s3://b/t.csv"], job_dir, env=site.env)
    assert done.code == 0, done.err
    done = run_bagent(["run", "made/job.yaml", "--progress", "none"], job_dir, env=site.env)
    assert done.code == 0, done.err


def test_a_bucket_that_refuses_is_one_line_and_sends_nothing(fs, site, job, job_dir):
    job("s3://b/rows/a.jsonl")
    site.faults = [403]
    message = error_of(run_bagent(RUN, job_dir, env=site.env))
    assert "s3://b/rows/a.jsonl: cannot be read: the bucket refuses it (403" in message
    assert fs.requests == []


def test_tools_and_keys_of_the_job_take_no_remote_files(site, job, job_dir):
    job("https://user:secret@host.example/a.jsonl")
    message = error_of(run_bagent(RUN, job_dir))
    assert "may not hold a user or a password" in message
    assert ":secret@" not in message


@pytest.mark.process("kills a run")
def test_a_killed_run_over_a_bucket_does_nothing_twice_and_loses_nothing(fs, site, job, job_dir):
    job(limits={"concurrency": 4})
    fs.set_script({"*": [echo(delay=0.05)]})
    run_bagent(RUN, job_dir, env=site.env, kill_at=lambda: fs.wait_for(15, "finished", 60))
    finished = {row["id"] for row in results(job_dir)}
    before = len(fs.requests)
    site.faults = ["ok", "cut", 503]
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    rows = results(job_dir)
    assert sorted(row["id"] for row in rows) == [f"r{n:04d}" for n in range(60)]
    sent_again = [json.dumps(r.body) for r in fs.requests[before:]]
    assert not any(f"id={name} " in text for name in finished for text in sent_again)


def test_images_in_a_bucket_are_sent_and_a_passing_failure_is_tried_again(fs, site, job, job_dir):
    png = b"\x89PNG\r\n\x1a\n...."
    site.files |= {f"b/photos/{n}.png": png + b"%d" % n for n in range(20)}
    rows = [{"id": f"p{n}", "photo": f"s3://b/photos/{n}.png"} for n in range(20)]
    rows[7]["photo"] = "s3://b/rows/a.jsonl"
    (job_dir / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content = [{"image": "{{ photo }}"}, {"text": "id={{ id }}"}]
    folders = {"image_folders": ["s3://b/photos"]}
    job(
        "rows.jsonl",
        prompt={"messages": [{"role": "user", "content": content}], **folders},
        limits={"concurrency": 3},
    )
    site.faulty = {f"b/photos/{n}.png": 503 for n in range(16) if n != 7}
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 1, done.err
    kinds = [row["error_kind"] for row in results(job_dir)]
    assert Counter(kinds) == {None: 4, "connect": 15, "template": 1}
    assert "in no folder of a bucket that the job names" in done.err
    site.faulty = {}
    assert run_bagent(RUN, job_dir, env=site.env).code == 1
    sent = [
        request.body["messages"][0]["content"][0]["image_url"]["url"] for request in fs.requests
    ]
    assert sorted(sent) == sorted(
        f"data:image/png;base64,{base64.b64encode(png + b'%d' % n).decode()}"
        for n in range(20)
        if n != 7
    )


def test_a_run_publishes_at_its_end_and_again_by_command(fs, site, job, job_dir):
    job(results={"publish": "s3://b/out", "duckdb": False})
    site.faults = ["ok"] * 6 + [403] * 9
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 74, done.err
    assert "cannot publish to s3://b/out" in done.err
    site.faults = []
    done = run_bagent(["publish"], job_dir, env=site.env)
    assert done.code == 0, done.err
    manifest = json.loads(site.files["b/out/manifest.json"])
    assert {"results", "answers", "attempts"} <= set(manifest["tables"])
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    assert len(fs.requests) == 60
    done = run_bagent(["publish", "job", "copy"], job_dir)
    assert done.code == 0, done.err
    assert (job_dir / "copy" / "manifest.json").is_file()


@pytest.mark.process("kills a run")
@pytest.mark.parametrize(
    "puts", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 6))]
)
def test_a_run_killed_while_it_publishes_publishes_whole_tables_later(fs, site, job, job_dir, puts):
    job(results={"publish": "s3://b/out", "duckdb": False})
    site.notify_at = puts

    def kill_at():
        assert site.reached.wait(60)

    run_bagent(RUN, job_dir, env=site.env, kill_at=kill_at)
    if "b/out/manifest.json" in site.files:
        assert_whole(site)
    done = run_bagent(RUN, job_dir, env=site.env)
    assert done.code == 0, done.err
    assert len(fs.requests) == 60
    tables = assert_whole(site)
    read = duckdb.from_parquet(str(write_file(job_dir / "read.parquet", tables["results"])))
    assert read.aggregate("count(*), count(DISTINCT id)").fetchall() == [(60, 60)]


def assert_whole(site):
    """See that all tables of the manifest are there as it says; return them."""
    manifest = json.loads(site.files["b/out/manifest.json"])
    tables = {
        name: site.files[f"b/out/{file['file']}"] for name, file in manifest["tables"].items()
    }
    for name, file in manifest["tables"].items():
        assert hashlib.sha256(tables[name]).hexdigest() == file["sha256"]
    return tables


def write_file(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("target", ["https://host.example/x", "ftp://x/y", "s3://b/*"])
def test_places_that_nothing_can_be_published_to_are_refused(fs, site, job, job_dir, target):
    job(results={"publish": target})
    assert "publish" in error_of(run_bagent(RUN, job_dir))
    assert fs.requests == []
