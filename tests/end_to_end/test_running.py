"""Runs that meet bad rows, are killed, and go on."""

from __future__ import annotations

import pytest

from support.cli import Running, run_bagent
from support.jobs import journal_files, results_by_id, rows, run_json, write_job, write_rows
from support.replies import echo, error_body, gated, ok, status
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows, statuses


@pytest.mark.process("kill")
def test_before_its_end_a_run_takes_up_passing_failures_only(fs, job_dir):
    script = {
        "r1": [status(400, error_body(400, "never"))],
        "r2": [gated(status(503, error_body(503)), "busy")],
        "*": [gated(echo())],
    }
    fs.set_script(script)
    write_job(job_dir, fs.url, 4, limits={"retries": 0, "concurrency": 3}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(4)  # before the refusal, which lowers how many requests are sent at once
        fs.release("busy")
        fs.wait_for(2, "finished")
        running.kill()
    fs.release()
    fs.set_script({"*": [echo()]})
    before = len(fs.requests)
    done, found = run_rows(job_dir)
    assert done.code == 1, done.err
    assert sorted(seen.row_id for seen in fs.requests[before:]) == ["r2", "r3", "r4"]
    assert statuses(found)["r1"] == "failed"
    done, _ = run_rows(job_dir)
    assert done.code == 1, done.err
    assert fs.count("r1") == 1


def test_which_failures_are_sent_again_can_be_chosen(fs, job_dir):
    script = {
        "r1": [status(400, error_body(400, "never"))],
        "r2": [status(500)],
        "r3": [ok("")],
        "*": [echo()],
    }
    fs.set_script(script)
    write_job(job_dir, fs.url, 5, limits={"retries": 0}, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 1
    sent = []
    for option in (["--skip-failed"], ["--retry", "overloaded"], ["--retry", "empty,rejected"]):
        before = len(fs.requests)
        assert run_bagent([*RUN, *option], job_dir).code == 1
        sent.append(sorted(seen.row_id for seen in fs.requests[before:]))
    assert sent == [[], ["r2"], ["r1", "r3"]]


# --- what may change between two starts ----------------------------------------------------------


def test_only_new_and_changed_rows_are_sent_when_the_input_grows(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 5, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0
    changed = [{**row, "other": 1} for row in reversed(rows(7))]
    changed[-1]["text"] = "another text"
    write_rows(job_dir / "rows.jsonl", changed)
    before = len(fs.requests)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert sorted(seen.row_id for seen in fs.requests[before:]) == ["r1", "r6", "r7"]


def test_a_changed_prompt_is_refused_with_the_ways_on(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0
    write_job(job_dir, fs.url, 3, results=NO_TABLES, prompt={"user": "id={{ id }} new {{ text }}"})
    error = error_of(run_bagent(RUN, job_dir))
    assert "prompt" in error
    assert all(option in error for option in ("--on-change", "--fresh", "--name"))
    assert len(fs.requests) == 3
    done, found = run_rows(job_dir, "--fresh")
    assert done.code == 0, done.err
    assert len(fs.requests) == 6
    assert "new" in found["r1"]["text"]
    kept = [path for path in (job_dir / "runs").iterdir() if path.name != "job"]
    assert len(kept) == 1
    assert len(results_by_id(job_dir, str(kept[0].relative_to(job_dir)))) == 3


@pytest.mark.process("kill")
def test_a_killed_run_over_a_pipe_goes_on_with_the_pipe_or_without(fs, job_dir):
    fs.set_script({"r5": [gated(echo())], "*": [echo()]})
    limits = {"concurrency": 1}
    write_job(job_dir, fs.url, None, input="-", limits=limits, results=NO_TABLES)
    data = "".join(f'{{"id":"{row["id"]}","text":"{row["text"]}"}}\n' for row in rows(8))
    run_bagent(RUN, job_dir, stdin=data, kill_at=lambda: fs.wait_for(5))
    fs.release()
    done, found = run_rows(job_dir, "--limit", "6", stdin="")
    assert done.code == 0, done.err
    assert len(found) == 6
    done, found = run_rows(job_dir, stdin=data)
    assert done.code == 0, done.err
    assert sorted(found) == [f"r{n}" for n in range(1, 9)]
    assert all(fs.count(f"r{n}") == (2 if n == 5 else 1) for n in range(1, 9))


HARMS = {
    "torn at the end": lambda data: data[:-9],
    "zeros at the end": lambda data: data + b"\0" * 4096,
    "a broken line": lambda data: data.replace(b'"id":"r3"', b"gar\x00bage", 1),
}


@pytest.mark.parametrize(
    ("harm", "lost"), [("torn at the end", 1), ("zeros at the end", 0), ("a broken line", 1)]
)
def test_a_run_directory_that_a_crash_damaged_resumes(fs, job_dir, harm, lost):
    fs.set_script({"*": [ok("schön grün")]})
    write_job(job_dir, fs.url, 6, results=NO_TABLES, limits={"concurrency": 1})
    assert run_bagent([*RUN, "--limit", "4"], job_dir).code == 0
    paths = journal_files(job_dir / "runs/job")
    (path,) = [path for path in paths if path.name.startswith("rows")]
    path.write_bytes(HARMS[harm](path.read_bytes()))
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert len(found) == 6
    assert len(fs.requests) == 6 + lost
    assert ("rows-all-000001.jsonl:3" in done.err) == (harm == "a broken line")


def test_a_run_may_move_grow_and_change_its_limits_backend_and_batching(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 12, results=NO_TABLES)
    for options in (["--limit", "2"], ["--sample", "5"]):
        assert run_bagent([*RUN, *options], job_dir).code == 0
    (job_dir / "runs/job").rename(job_dir / "moved run")
    url = fs.url.replace("127.0.0.1", "localhost")
    limits = {"concurrency": 1, "retries": 9, "timeout": "20s"}
    write_job(job_dir, url, 12, results=NO_TABLES, limits=limits, batching={"mode": "single"})
    done = run_bagent([*RUN, "-o", "moved run"], job_dir)
    assert done.code == 0, done.err
    assert len(results_by_id(job_dir, "moved run")) == len(fs.requests) == 12
    assert run_json(job_dir / "moved run")["starts"][-1]["exit_code"] == 0
