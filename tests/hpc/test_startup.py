"""Waiting for engines ends as soon as waiting makes no sense; late ones are taken in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bagent.hpc.engines import EngineState, write_state
from bagent.hpc.startup import (
    await_engines,
    cannot_reach_minimum,
    is_alive,
    late_step,
    report,
    still_missing,
    tail,
    wait_step,
)


@pytest.mark.parametrize(
    ("hosts", "failed", "fraction", "lost"),
    [
        (10, 1, 0.9, False),
        (10, 2, 0.9, True),
        (4, 1, 1.0, True),
        (3, 2, 0.1, False),
        (3, 3, 0, True),
    ],
)
def test_it_is_hopeless_once_too_many_failed(hosts, failed, fraction, lost):
    assert cannot_reach_minimum(hosts, failed, fraction) is lost


def test_a_child_that_ended_and_was_not_fetched_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid)
    child.wait()
    assert is_alive(os.getpid())
    assert not is_alive(2**22 + 1)


def test_the_code_of_the_waiting_command_is_kept():
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    assert await_engines(child, lambda: "", 0.05) == 75


def test_waiting_ends_with_76_for_a_reason(capsys):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert await_engines(child, lambda: "5 engines failed", 0.05) == 76
    assert child.returncode is not None
    assert "5 engines failed" in capsys.readouterr().err


def test_engines_that_failed_are_not_missed():
    hosts = [f"{n}.hsn\t{port}\trole=worker\tnode={n}" for n in ("n1", "n2") for port in (1, 2)]
    failed = [EngineState("n2", 1, 2, "failed")]
    assert still_missing(hosts, hosts[:1], failed) == hosts[1:3]
    assert still_missing(hosts, hosts, []) == []


def test_start_up_is_told_for_each_engine_and_for_all():
    states = [
        EngineState("n1", 0, 8000, "listening", 1, 100.0, 160.0, None),
        EngineState("n2", 0, 8000, "failed", 3, 300.0, None, 1),
    ]
    lines = list(report(states, {"n1": "12.5"}))
    assert lines[1].split() == ["n1.0", "8000", "listening", "1", "12.5", "60.0"]
    assert lines[2].split() == ["n2.0", "8000", "failed", "3"]
    assert lines[3].startswith("1 of 2 engines started, in 60.0 s")
    assert lines[4] == "2 restarts"


def test_the_end_of_a_file(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(9000)))
    assert tail(path, 2) == "line 8998\nline 8999"
    assert tail(tmp_path / "none") == ""


def wait(folder, launcher):
    words = [str(folder), "--min-fraction", "1", "--timeout", "60s"]
    return wait_step([*words, "--launcher", str(launcher)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "hosts.txt").write_text("127.0.0.1\t1999\tnode=n1\n")
    return tmp_path


@pytest.mark.process("signal")
def test_an_engine_that_cannot_start_ends_the_waiting_and_shows_its_log(folder, capsys):
    write_state(folder / "engines", EngineState("n1", 0, 9, "failed", 3, 1.0, None, 1))
    (folder / "engines" / "n1.0.log").write_text("loading\nCUDA out of memory\n")
    assert wait(folder, os.getpid()) == 76
    err = capsys.readouterr().err
    assert "1 of 1 engines failed" in err
    assert "CUDA out of memory" in err


@pytest.mark.process("signal")
def test_a_launcher_that_ended_ends_the_waiting(folder, capsys):
    (folder / "launcher.log").write_text("srun: error: no such program\n")
    assert wait(folder, 2**22 + 1) == 76
    assert "srun: error: no such program" in capsys.readouterr().err


@pytest.mark.process("workers")
def test_late_engines_are_added_to_the_ready_ones(fs, folder):
    port = fs.url.rpartition(":")[2].partition("/")[0]
    first, late = "127.0.0.1\t9\tnode=n1", f"127.0.0.1\t{port}\tnode=n2"
    (folder / "hosts.txt").write_text(f"{first}\n{late}\n")
    (folder / "ready.txt").write_text(f"{first}\n")
    assert late_step([str(folder)]) == 0
    assert (folder / "ready.txt").read_text() == f"{first}\n{late}\n"
