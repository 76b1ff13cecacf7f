"""Waiting: for engines, as long as that makes sense, and for the owner of a run on a lost node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import msgspec
import pytest

from bagent.hpc import startup
from bagent.hpc.__main__ import main
from bagent.hpc.engines import EngineState, write_state
from bagent.hpc.startup import (
    await_engines,
    cannot_reach_minimum,
    late_step,
    report,
    wait_step,
    wait_until_vacant,
)
from bagent.store.lock import LockRecord, RunLock, owner_path


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


def test_the_code_of_the_waiting_command_is_kept():
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    assert await_engines(child, lambda: "", 0.05) == 75


def test_waiting_ends_with_76_for_a_reason(capsys):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert await_engines(child, lambda: "5 engines failed", 0.05) == 76
    assert child.returncode is not None
    assert "5 engines failed" in capsys.readouterr().err


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


def wait(folder, launcher, monkeypatch):
    monkeypatch.setattr(startup, "await_engines", partial(startup.await_engines, pause=0.05))
    words = [str(folder), "--min-fraction", "1", "--timeout", "60s"]
    return wait_step([*words, "--launcher", str(launcher)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "hosts.txt").write_text("127.0.0.1\t1999\tnode=n1\n")
    return tmp_path


@pytest.mark.process("signal")
def test_an_engine_that_cannot_start_ends_the_waiting_and_shows_its_log(
    folder, capsys, monkeypatch
):
    write_state(folder / "engines", EngineState("n1", 0, 9, "failed", 3, 1.0, None, 1))
    (folder / "engines" / "n1.0.log").write_text("loading\nCUDA out of memory\n")
    assert wait(folder, os.getpid(), monkeypatch) == 76
    err = capsys.readouterr().err
    assert "1 of 1 engines failed" in err
    assert "CUDA out of memory" in err


@pytest.mark.process("signal")
def test_a_launcher_that_ended_ends_the_waiting(folder, capsys, monkeypatch):
    (folder / "launcher.log").write_text("srun: error: no such program\n")
    assert wait(folder, 2**22 + 1, monkeypatch) == 76
    assert "srun: error: no such program" in capsys.readouterr().err


@pytest.mark.process("signal")
def test_a_stop_signal_ends_the_waiting_command_also_while_it_starts(folder, monkeypatch):
    start, started = subprocess.Popen, []

    def start_and_signal(command, **options):
        started.append(start(["sleep", "600"]))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    with pytest.raises(SystemExit) as ended:
        wait(folder, os.getpid(), monkeypatch)
    assert ended.value.code == 75
    assert started[0].wait(20) == -signal.SIGTERM


@pytest.mark.process("workers")
def test_late_engines_are_added_to_the_ready_ones(fs, folder):
    port = fs.url.rpartition(":")[2].partition("/")[0]
    first, late = "127.0.0.1\t9\tnode=n1", f"127.0.0.1\t{port}\tnode=n2"
    (folder / "hosts.txt").write_text(f"{first}\n{late}\n")
    (folder / "ready.txt").write_text(f"{first}\n")
    assert late_step([str(folder)]) == 0
    assert (folder / "ready.txt").read_text() == f"{first}\n{late}\n"


def test_an_owner_on_another_host_is_waited_for_until_it_is_stale(tmp_path, capsys):
    record = LockRecord("n7", 41, time.time() - 59.5, token="t")
    owner_path(tmp_path, "all").write_bytes(msgspec.json.encode(record))
    assert wait_until_vacant(tmp_path)
    assert time.time() - record.time >= 60
    assert "process 41 on n7" in capsys.readouterr().err


def test_one_that_lives_is_waited_for_no_longer_than_that_makes_sense(tmp_path):
    owner = RunLock.acquire(tmp_path, "1-of-2")
    assert wait_until_vacant(tmp_path, "2-of-2")
    assert not wait_until_vacant(tmp_path, "1-of-2", stop=lambda: True)
    assert not wait_until_vacant(tmp_path, stop=lambda: True)
    owner.release()
    assert wait_until_vacant(tmp_path)


def test_as_a_step_of_a_script_it_always_lets_the_run_begin(tmp_path, capsys):
    assert main(["vacant", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().err == ""
