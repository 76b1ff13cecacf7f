from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagent.errors import OwnedError, StoppedEarly, WriteError
from bagent.store.lock import (
    LockRecord,
    Process,
    RunLock,
    is_live,
    read_owner,
    wait_for_orphans,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def here() -> Process:
    return Process.this()


@pytest.fixture
def elsewhere(here: Process) -> Process:
    return dataclasses.replace(here, host="node2", pid=77)


def test_the_owner_file_names_host_pid_and_time_until_the_end(run_dir, clock, here):
    lock = RunLock.acquire(run_dir, "all", clock=clock)
    record = json.loads((run_dir / "owner.json").read_text())
    assert (record["host"], record["pid"], record["time"]) == (here.host, os.getpid(), clock.now)
    lock.release()
    assert not (run_dir / "owner.json").exists()


def test_a_live_owner_is_named(run_dir, clock, elsewhere):
    RunLock.acquire(run_dir, "all", clock=clock, process=elsewhere)
    with pytest.raises(OwnedError, match="process 77 on node2") as caught:
        RunLock.acquire(run_dir, "all", clock=clock)
    assert caught.value.exit_code == 2
    worker = dataclasses.replace(elsewhere, parent=76)  # its parent is the one to stop
    RunLock.acquire(run_dir, "1-of-2", clock=clock, process=worker)
    with pytest.raises(OwnedError, match="process 76 on node2"):
        RunLock.acquire(run_dir, "1-of-2", clock=clock)


def test_an_owner_that_has_not_renewed_for_a_minute_is_replaced(run_dir, clock, elsewhere):
    RunLock.acquire(run_dir, "all", clock=clock, process=elsewhere)
    clock.now += 59
    with pytest.raises(OwnedError):
        RunLock.acquire(run_dir, "all", clock=clock)
    clock.now += 1
    owner = RunLock.acquire(run_dir, "all", clock=clock)
    assert owner.took_over
    assert read_owner(run_dir / "owner.json").pid == os.getpid()
    assert sorted(path.name for path in run_dir.iterdir()) == ["owner.json"]


def test_renewing_every_15_seconds_keeps_it(run_dir, clock, elsewhere):
    owner = RunLock.acquire(run_dir, "all", clock=clock, process=elsewhere)
    for _ in range(20):
        clock.now += 5
        owner.tick()
    with pytest.raises(OwnedError):
        RunLock.acquire(run_dir, "all", clock=clock)
    assert clock.now - read_owner(run_dir / "owner.json").time < 15


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("pid_used_again", [False, True])
def test_a_process_that_is_gone_on_this_host_is_replaced_at_once(
    run_dir, clock, here, gone, pid_used_again
):
    changes = {"started": "1"} if pid_used_again else {"pid": gone}
    RunLock.acquire(run_dir, "all", clock=clock, process=dataclasses.replace(here, **changes))
    assert RunLock.acquire(run_dir, "all", clock=clock).took_over


@pytest.mark.parametrize(("parent_lives", "waits"), [(False, True), (True, False)])
def test_a_start_waits_for_a_worker_whose_parent_was_killed(
    run_dir, clock, here, gone, parent_lives, waits
):
    worker = dataclasses.replace(here, parent=here.pid if parent_lives else gone)
    lock = RunLock.acquire(run_dir, "1-of-2", clock=clock, process=worker)
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock.now += 1
        if len(sleeps) == 3:
            lock.release()

    wait_for_orphans(run_dir, clock=clock, sleep=sleep)
    assert len(sleeps) == (3 if waits else 0)
    stays = RunLock.acquire(run_dir, "2-of-2", clock=clock, process=worker)
    wait_for_orphans(run_dir, clock=clock, sleep=sleep)
    assert (len(sleeps) > 10) == waits, "but not for ever"
    stays.release()


def test_a_zombie_counts_as_gone(clock, here):
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    record = LockRecord(here.host, zombie.pid, clock.now)
    assert not is_live(record, clock.now)
    zombie.wait()
    zombie.stdout.close()


def test_the_pid_of_another_container_says_nothing(clock, here):
    record = LockRecord(here.host, 2**22 - 1, clock.now, space="pid:[1]")
    assert is_live(record, clock.now)


def test_a_half_written_file_counts_by_its_age(run_dir, clock):
    path = run_dir / "owner.json"
    path.write_bytes(b'{"host": "no')
    os.utime(path, (clock.now, clock.now))
    with pytest.raises(OwnedError):
        RunLock.acquire(run_dir, "all", clock=clock)
    clock.now += 61
    assert RunLock.acquire(run_dir, "all", clock=clock).took_over


def test_a_time_that_has_not_come_yet_does_not_bind_for_ever(run_dir, clock):
    path = run_dir / "owner.json"
    path.write_text(json.dumps({"host": "node2", "pid": 3, "time": clock.now + 10**6}))
    os.utime(path, (clock.now - 100, clock.now - 100))
    assert RunLock.acquire(run_dir, "all", clock=clock).took_over


def test_an_owner_that_was_replaced_stops_at_its_next_renewal(run_dir, clock, elsewhere):
    first = RunLock.acquire(run_dir, "all", clock=clock, process=elsewhere)
    clock.now += 100
    second = RunLock.acquire(run_dir, "all", clock=clock)
    with pytest.raises(StoppedEarly, match=str(os.getpid())):
        first.tick()
    first.release()
    second.renew()
    assert read_owner(run_dir / "owner.json").pid == os.getpid()


def test_a_file_that_was_removed_is_made_again_unless_it_was_long_ago(run_dir, clock):
    owner = RunLock.acquire(run_dir, "all", clock=clock)
    (run_dir / "owner.json").unlink()
    clock.now += 20
    owner.tick()
    assert (run_dir / "owner.json").exists()
    (run_dir / "owner.json").unlink()
    clock.now += 100
    with pytest.raises(StoppedEarly):
        owner.tick()


_RACE = """
import sys, time
from pathlib import Path
from bagent.errors import OwnedError
from bagent.store.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    RunLock.acquire(Path(sys.argv[1]), "all")
    print("won", flush=True)
except OwnedError:
    print("lost", flush=True)
sys.stdin.readline()
"""


def test_a_directory_that_is_gone_is_a_write_error(run_dir, clock):
    with pytest.raises(WriteError):
        RunLock.acquire(run_dir / "missing", "all", clock=clock)


def test_of_many_processes_that_start_at_once_one_takes_a_dead_run_over(run_dir):
    dead = {"host": "node9", "pid": 1, "time": 1.0, "token": "dead"}
    (run_dir / "owner.json").write_text(json.dumps(dead))
    command = [sys.executable, "-c", _RACE, str(run_dir)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runners = [subprocess.Popen(command, **pipes) for _ in range(5)]
    for runner in runners:
        assert runner.stdout.readline() == "ready\n"
    for runner in runners:
        runner.stdin.write("go\n")
        runner.stdin.flush()
    message = sorted(runner.stdout.readline() for runner in runners)
    for runner in runners:
        runner.communicate("end\n")
    assert message == ["lost\n"] * 4 + ["won\n"]
