"""Batch systems that end jobs, and file systems that do less than others."""

from __future__ import annotations

import signal
import sys

import pytest

from support.cli import Running, no_locks_env, run_bagent
from support.jobs import results_by_id, write_job
from support.replies import echo, gated, slow
from support.run_outcomes import NO_TABLES, RUN, error_of, run_rows, shell

pytestmark = pytest.mark.slow  # time limits and locks take their real time

BAGENT = f"{sys.executable} -m bagent {' '.join(RUN)}"


def test_a_terminal_that_goes_away_ends_a_run_in_good_order(fs, job_dir):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 40, limits={"concurrency": 4}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(4)
        running.send(signal.SIGHUP)
        running.wait_for_err("waiting up to")
        fs.release()
        done = running.finish()
    assert done.code == 75, done.err
    assert "SIGHUP" in done.err
    assert len(results_by_id(job_dir)) == len(fs.requests)


def test_a_run_under_nohup_goes_on(fs, job_dir):
    fs.set_script({"*": [slow(0.2, echo())]})
    write_job(job_dir, fs.url, 8, limits={"concurrency": 4}, results=NO_TABLES)
    line = f"trap '' HUP; {BAGENT} & sleep 1; kill -HUP $!; sleep 0.1; kill -HUP $!; wait $!"
    done = shell(line, job_dir)
    assert done.returncode == 0, done.stderr
    assert len(results_by_id(job_dir)) == 8


def test_a_signal_before_the_first_request_ends_at_once(job_dir):
    write_job(job_dir, "http://127.0.0.1:9/v1", 4, results=NO_TABLES)
    with Running([*RUN, "--wait-hosts", "60s"], job_dir) as running:
        running.wait_for_err("waiting for an endpoint")
        running.send(signal.SIGTERM)
        done = running.finish(10)
    assert done.code == 75
    assert "Traceback" not in done.err


@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EIO"])
def test_a_file_system_without_locks_is_enough(fs, job_dir, tmp_path, error):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 6)
    env = no_locks_env(tmp_path / "site", error)
    done = run_bagent([*RUN, "--limit", "3"], job_dir, env=env)
    assert done.code == 0, done.err
    done, found = run_rows(job_dir, env=env)
    assert done.code == 0, done.err
    assert len(found) == len(fs.requests) == 6
    assert "could not" not in done.err


def test_without_locks_two_runs_of_one_name_still_do_not_mix(fs, job_dir, tmp_path):
    fs.set_script({"*": [gated(echo())]})
    write_job(job_dir, fs.url, 3, results=NO_TABLES)
    env = no_locks_env(tmp_path / "site")
    with Running(RUN, job_dir, env) as first:
        fs.wait_for(3)
        error = error_of(run_bagent(RUN, job_dir, env=env))
        assert str(first.process.pid) in error
        fs.release()
        assert first.finish().code == 0
    assert len(fs.requests) == 3


@pytest.mark.parametrize("home", ["HOME=/dev/null", "-u HOME"])
def test_a_home_that_cannot_be_written_is_no_trouble(fs, job_dir, home):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    done = shell(f"env {home} {BAGENT} && env {home} {sys.executable} -m bagent status", job_dir)
    assert done.returncode == 0, done.stderr
    assert "could not" not in done.stderr


def test_blanks_and_quotes_in_paths_are_no_trouble(fs, tmp_path):
    folder = tmp_path / "my 'odd' folder\u00fc"
    folder.mkdir()
    fs.set_script({"*": [echo()]})
    write_job(folder, fs.url, 3)
    done = run_bagent([*RUN, "--name", "a run's name"], folder)
    assert done.code == 0, done.err
    last = done.err.splitlines()[-1].removeprefix("next").strip()
    shown = shell(f"{sys.executable} -m {last}", folder)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 3
    asked = run_bagent(["query", "a run's name", "select count(*) from results"], folder)
    assert asked.code == 0, asked.err


def test_a_job_may_be_run_from_any_folder(fs, job_dir, tmp_path):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3, results=NO_TABLES)
    elsewhere = tmp_path / "scratch"
    elsewhere.mkdir()
    done = run_bagent(["run", job_dir / "job.yaml", "--progress", "plain"], elsewhere)
    assert done.code == 0, done.err
    assert (elsewhere / "runs/job/run.json").exists()
    assert not (job_dir / "runs").exists()
