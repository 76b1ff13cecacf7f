"""Waiting for the owner of a run that a lost node may have left behind."""

from __future__ import annotations

import time

import msgspec

from bagent.hpc.__main__ import main
from bagent.hpc.startup import wait_until_vacant
from bagent.store.lock import LockRecord, RunLock, owner_path


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
