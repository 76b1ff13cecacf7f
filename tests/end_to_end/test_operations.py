"""How runs look to scripts, schedulers and the people who read their logs."""

from __future__ import annotations

import sys

import pytest

from support.cli import run_bagent
from support.in_process import meanwhile
from support.jobs import results_by_id, wait_until, write_job
from support.replies import close, echo, error_body, gated, hang, raw, slow, status
from support.run_outcomes import NO_TABLES, RUN, shell

BAGENT = f"{sys.executable} -m bagent"


def test_allowed_failures_count_over_all_starts(fs, job_dir):
    fs.set_script({"r1": [status(400)], "r2": [status(400)], "*": [echo()]})
    write_job(job_dir, fs.url, 10, results=NO_TABLES)
    assert run_bagent([*RUN, "--allow-failures", "10%"], job_dir).code == 1
    assert run_bagent([*RUN, "--allow-failures", "2", "--skip-failed"], job_dir).code == 0
    assert run_bagent([*RUN, "--allow-failures", "20%", "--skip-failed"], job_dir).code == 0
    assert run_bagent([*RUN, "--skip-failed"], job_dir).code == 1


def test_results_that_cannot_be_written_are_found_before_anything_is_sent(fs, job_dir):
    write_job(job_dir, fs.url, 3)
    (job_dir / "runs").write_text("a file, not a folder")
    done = run_bagent(RUN, job_dir)
    assert done.code in (2, 74)
    assert done.err.startswith("bagent: error: ")
    assert done.err.count("\n") == 1
    assert fs.requests == []


@pytest.mark.process("environment")
def test_a_current_folder_that_is_gone_is_one_clear_line(tmp_path):
    write_job(tmp_path, "sim", 1)
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; {BAGENT} run ../job.yaml", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "bagent: error: the current folder is gone (cd to one that is there)\n"


# --- many at once ---------------------------------------------------------------------------------


def release_at(fs, count):
    """Let answers go once so many requests are in flight at the same time."""
    fs.wait_for(count, "in_flight")
    fs.release()


def test_as_many_requests_are_in_flight_as_were_asked_for(fs, job_dir):
    fs.set_script({"*": [gated(echo())]})
    limits = {"concurrency": 150, "timeout": "20s"}
    write_job(job_dir, fs.url, 150, limits=limits, results=NO_TABLES)
    with meanwhile(lambda: release_at(fs, 120)):
        done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert len(fs.requests) == 150


def test_waiting_for_a_slot_is_no_part_of_a_requests_time_limit(fs, job_dir, run_clock):
    fs.set_script({f"r{n}": [gated(echo(), f"pair {(n - 1) // 2}")] for n in range(1, 7)})
    limits = {"concurrency": 2, "timeout": "60s", "retries": 0}
    write_job(job_dir, fs.url, 6, limits=limits, results=NO_TABLES)

    def answer_late():
        for pair in range(3):
            fs.wait_for(2 * pair + 2)
            run_clock.skip(40)
            fs.release(f"pair {pair}")

    with meanwhile(answer_late):
        done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert fs.peak_in_flight <= 2


@pytest.mark.process("environment")
@pytest.mark.parametrize(
    ("limit", "least", "most", "warnings"), [("-n 256", 50, 255, 1), ("-Sn 128", 150, 200, 0)]
)
def test_a_low_limit_of_open_files_costs_no_row(fs, job_dir, limit, least, most, warnings):
    """A hard limit costs one warning, a soft one is raised without a word."""
    fs.set_script({"*": [slow(0.3, gated(echo()))]})
    write_job(job_dir, fs.url, 200 if warnings == 0 else 300, limits={"concurrency": 300},
              results=NO_TABLES)  # fmt: skip
    with meanwhile(lambda: release_at(fs, least)):
        done = shell(f"ulimit {limit}; {BAGENT} {' '.join(RUN)}; echo $?", job_dir)
    assert done.stdout.strip() == "0", done.stderr
    lines = [line for line in done.stderr.splitlines() if "ulimit" in line]
    assert len(lines) == warnings, done.stderr
    assert fs.peak_in_flight <= most


# --- causes ---------------------------------------------------------------------------------------


def test_each_failed_row_and_the_summary_tell_the_real_cause(fs, job_dir, run_clock):
    script = {
        "r1": [status(400, error_body(400, "first cause"))],
        "r2": [status(400, error_body(400, "first cause"))],
        "r3": [status(503), status(500, error_body(500, "second cause"))],
        "r4": [hang()],
        "r5": [close()],
        "*": [echo()],
    }
    fs.set_script(script)
    limits = {"retries": 1, "timeout": "60s"}
    write_job(job_dir, fs.url, 8, limits=limits)

    def attempts():
        files = job_dir.glob("runs/job/journal/attempts-*.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)

    def skip_limits():
        for attempt in (1, 2):
            fs.wait_until(lambda number=attempt: fs.count("r4") == number)
            wait_until(lambda: attempts() == len(fs.requests) - 1)
            run_clock.skip(61)

    with meanwhile(skip_limits):
        done = run_bagent(RUN, job_dir)
    assert done.code == 1
    found = results_by_id(job_dir)
    kinds = {name: found[name]["error_kind"] for name in ("r1", "r3", "r4", "r5")}
    assert kinds == {"r1": "rejected", "r3": "overloaded", "r4": "timeout", "r5": "connect"}
    assert "HTTP 400" in found["r1"]["error"]
    assert "first cause" in found["r1"]["error"]
    assert "HTTP 500" in found["r3"]["error"]
    assert [found[name]["attempts"] for name in ("r1", "r4")] == [1, 2]
    assert all(found[name]["endpoint"] == fs.address for name in kinds)
    for group in ("2 x rejected, HTTP 400", "1 x overloaded, HTTP 500", "1 x timeout", "1 x conn"):
        assert group in done.err
    assert done.err.count("first cause") == 1
    assert "rows.jsonl:1" in done.err
    query = "select count(*) from attempts where error_kind = 'timeout'"
    assert run_bagent(["query", "--format", "csv", query], job_dir).out.split()[-1] == "2"


def test_without_progress_the_summary_and_the_next_command_are_all_that_is_printed(fs, job_dir):
    silent = ["run", "job.yaml", "--progress", "none"]
    fs.set_script({"r2": [status(400)], "*": [echo()]})
    write_job(job_dir, fs.url, 5, results=NO_TABLES)
    done = run_bagent(silent, job_dir)
    assert (done.code, done.out) == (1, "")
    first, *_, last = done.err.splitlines()
    assert first == "rows        5 rows: 4 ok, 1 failed"
    assert (
        last
        == "next        bagent run job.yaml --progress none --on-change continue --retry rejected"
    )
    assert "by kind: rejected 1" in done.err
    fs.set_script({"*": [echo()]})
    done = run_bagent([*silent, "--retry", "rejected"], job_dir)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("rows        5 rows: 5 ok, 0 failed; this start: 1 sent\n")
    assert done.err.endswith("\nnext        bagent results runs/job | head\n")


def test_what_a_server_writes_cannot_play_with_the_terminal(fs, job_dir):
    nasty = "\x1b[2J\x1b]0;title\x07bad\r\nline two\u202eevil"
    fs.set_script({"r1": [status(400, error_body(400, nasty))], "r2": [raw(f"<p>{nasty}")]})
    write_job(job_dir, fs.url, 2, limits={"retries": 0}, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 1
    assert not set("\x1b\x07\u202e") & set(done.err)
    assert "bad" in done.err


def test_a_key_that_a_server_repeats_is_not_shown(fs, job_dir):
    secret = "sk-secret-1234567890"
    refusal = error_body(401, f"Incorrect API key provided: {secret}.")
    fs.set_script({"*": [status(401, refusal)]})
    backend = {"url": fs.url, "api_key_env": "MY_KEY"}
    write_job(job_dir, fs.url, 2, backend=backend, results=NO_TABLES)
    done = run_bagent(RUN, job_dir, env={"MY_KEY": secret})
    assert done.code == 76
    assert "Incorrect API key provided" in done.err
    assert secret not in done.err
    files = [path for path in (job_dir / "runs").rglob("*") if path.is_file()]
    assert not any(secret.encode() in path.read_bytes() for path in files)


@pytest.mark.process("pipe")
def test_a_reader_of_stderr_that_goes_away_costs_no_row(fs, job_dir):
    fs.set_script({"*": [slow(0.02, echo())]})
    write_job(job_dir, fs.url, 20, limits={"concurrency": 2}, results=NO_TABLES)
    done = shell(f"{BAGENT} {' '.join(RUN)} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}", job_dir)
    assert done.stdout.split()[-1] == "0"
    assert len(results_by_id(job_dir)) == 20
