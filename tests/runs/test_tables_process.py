"""The tables' process is started ahead, and does nothing until it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagent.runs.ending import TablesChild
from support.cli import Running
from support.jobs import write_job
from support.replies import echo, gated
from support.stored_runs import make_run, stored


def test_a_child_that_waits_makes_the_tables_of_what_was_written_meanwhile(tmp_path: Path) -> None:
    child = TablesChild(tmp_path / "run")
    child.start()
    make_run(tmp_path / "run", map(stored, range(3)))
    assert child.make() == (0, "")
    assert (tmp_path / "run" / "results.parquet").is_file()


def test_a_child_that_was_killed_while_it_waited_is_replaced(tmp_path: Path) -> None:
    make_run(tmp_path / "run", map(stored, range(3)))
    child, others = TablesChild(tmp_path / "run"), _children()
    child.start()
    (waiting,) = _children() - others
    os.kill(waiting, signal.SIGKILL)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    assert child.make() == (0, "")
    assert (tmp_path / "run" / "results.parquet").is_file()


def test_a_closed_child_is_gone_and_has_made_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run", map(stored, range(3)))
    child, others = TablesChild(tmp_path / "run"), _children()
    child.start()
    assert len(_children() - others) == 1
    child.close()
    child.close()
    assert _children() <= others
    assert not (tmp_path / "run" / "results.parquet").exists()


@pytest.mark.process("pipe")
def test_a_child_whose_parent_died_makes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run", map(stored, range(3)))
    command = [sys.executable, "-m", "bagent.store.tables.build", str(tmp_path / "run"), "--wait"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not (tmp_path / "run" / "results.parquet").exists()


@pytest.mark.process("signal")
def test_a_run_that_stops_early_makes_no_tables_and_waits_for_none(fs, job_dir):
    fs.set_script({"r2": [gated(echo())], "*": [echo()]})
    write_job(job_dir, fs.url, 3)
    with Running(["run", "job.yaml", "--progress", "plain"], job_dir) as run:
        fs.wait_for(3)
        run.send_to_group(signal.SIGINT)
        run.wait_for_err("waiting up to")
        fs.release()
        assert run.finish().code == 75
        members = subprocess.run(
            ["pgrep", "-s", str(run.process.pid)], capture_output=True, text=True, check=False
        )
        assert members.stdout == ""
    assert list((job_dir / "runs/job").glob("*.parquet")) == []


def _children() -> set[int]:
    """The processes that this one started and that are not waited for yet.

    Other tests of this process may have left some, such as multiprocessing's resource tracker.
    """
    found = Path(f"/proc/self/task/{os.getpid()}/children")
    if not found.exists():
        pytest.skip("the system does not list the children of a process")
    return {int(pid) for pid in found.read_text().split()}
