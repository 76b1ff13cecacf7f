"""Few file handles, many connections, and servers whose errors are long, odd or all different."""

from __future__ import annotations

import re
import sys

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import at_barrier, echo, error_body, raw, slow, status
from support.run_outcomes import NO_TABLES, RUN, run_rows, shell

pytestmark = pytest.mark.slow
BAGENT = f"{sys.executable} -m bagent {' '.join(RUN)}"


def test_one_endpoint_of_a_fleet_may_have_more_than_a_hundred_connections(fs, job_dir):
    fs.set_script({"*": [at_barrier(120, slow(0.3, echo()))]})
    with FakeServer({"*": [at_barrier(120, slow(0.3, echo()))]}) as other:
        (job_dir / "hosts.txt").write_text(f"{fs.url}\n{other.url}\n")
        limits = {"concurrency": 250, "per_endpoint": 125, "timeout": "20s", "retries": 0}
        write_job(
            job_dir,
            fs.url,
            250,
            backend=None,
            hostfile="hosts.txt",
            limits=limits,
            results=NO_TABLES,
        )
        done = run_bagent(RUN, job_dir)
        assert done.code == 0, done.err
        assert min(fs.peak_in_flight, other.peak_in_flight) >= 120
        assert len(fs.requests) + len(other.requests) == 250


def test_very_few_open_files_are_enough_for_a_slow_run(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 60, limits={"concurrency": 200, "retries": 0})
    done = shell(f"ulimit -n 64; {BAGENT}; echo $?", job_dir)
    assert done.stdout.strip() == "0", done.stderr
    assert len([line for line in done.stderr.splitlines() if "ulimit" in line]) == 1, done.stderr
    assert len(fs.requests) == 60


def test_errors_that_differ_in_numbers_alone_are_one_group(fs, job_dir):
    names = [f"r{n}" for n in range(1, 7)]
    fs.set_script(
        {
            name: [
                status(400, error_body(400, f"Request req_{n}f{n}a77{n}: {n * 977} is too many."))
            ]
            for n, name in enumerate(names, 1)
        }
        | {"*": [echo()]}
    )
    write_job(job_dir, fs.url, 8, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert "6 x rejected, HTTP 400" in done.err
    for n, name in enumerate(names, 1):
        assert f"{n * 977} is too many" in found[name]["error"]


def test_long_and_odd_error_bodies_are_told_in_short(fs, job_dir):
    fs.set_script(
        {
            "r1": [status(400, error_body(400, "long words " * 20_000))],
            "r2": [raw("<html>" + "<p>page</p>" * 9000, "text/html", 400)],
            "r3": [raw(b"", "text/plain", 400)],
            "r4": [status(400, {"detail": [{"loc": ["body", "model"], "msg": "field required"}]})],
            "r5": [status(400, {"message": "plain form"})],
            "r6": [status(400, {"error": "just text"})],
            "*": [echo()],
        }
    )
    write_job(job_dir, fs.url, 7, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert max(map(len, done.err.splitlines())) < 700
    for n in range(1, 7):
        error = found[f"r{n}"]["error"]
        assert "HTTP 400" in error
        assert len(error) < 1500
    assert "field required" in found["r4"]["error"]
    assert "plain form" in found["r5"]["error"]
    assert "just text" in found["r6"]["error"]


def test_a_log_gets_a_line_now_and_then_while_rows_wait(fs, job_dir):
    fs.set_script({"r1": [slow(6.5, echo())], "*": [echo()]})
    write_job(job_dir, fs.url, 4, results=NO_TABLES)
    done = shell(f"{BAGENT} 2> log; echo $?", job_dir)
    assert done.stdout.strip() == "0"
    log = (job_dir / "log").read_text()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", log)
    assert any("3/4" in line or "in flight" in line for line in log.splitlines()), log


def test_the_cause_is_kept_when_a_row_gives_up_after_other_causes(fs, job_dir):
    script = {"r1": [status(503), status(500), status(400, error_body(400, "the last word"))]}
    fs.set_script({**script, "*": [echo()]})
    write_job(job_dir, fs.url, 2)
    done = run_bagent(RUN, job_dir)
    assert done.code == 1
    assert "the last word" in done.err
    query = 'select status_code from attempts where "row" = 0 order by "try"'
    asked = run_bagent(["query", "--format", "csv", query], job_dir)
    assert asked.out.split()[1:] == ["503", "500", "400"], asked.err


def test_a_current_folder_that_is_gone_is_one_clear_line(tmp_path):
    write_job(tmp_path, "sim", 1)
    gone = "mkdir gone; cd gone; rmdir ../gone; "
    done = shell(f"{gone}{sys.executable} -m bagent run ../job.yaml", tmp_path)
    assert done.returncode == 2
    assert done.stderr == ("bagent: error: the current folder is gone (cd to one that is there)\n")
