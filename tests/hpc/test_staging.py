"""Files on a node's own disk: whole or not vouched for."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading

import pytest

from bagent.errors import WriteError
from bagent.hpc.staging import (
    SENTINEL,
    StagingTarget,
    copy_into,
    is_staged,
    mpi_broadcast,
    signature,
    stage,
    unpack_into,
)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "shared" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.bin").write_bytes(os.urandom(300_000))
    return folder


def target(tmp_path, node="node", mark="s1"):
    done = tmp_path / "done"
    done.mkdir(exist_ok=True)
    return StagingTarget(tmp_path / node / "bagent", done, mark)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_is_vouched_for_and_not_made_twice(tmp_path, source):
    to = target(tmp_path)
    assert stage(to, ["model"], copy_into([source])) is True
    assert content(to.folder / "model") == content(source)
    assert is_staged(to)
    assert stage(to, ["model"], copy_into([source])) is False
    (source / "config.json").write_text("{1}")
    assert stage(target(tmp_path, mark="s2"), ["model"], copy_into([source])) is True
    assert content(to.folder / "model") == content(source)


def test_a_signature_follows_names_sizes_and_times(source, tmp_path):
    first = signature([source])
    assert signature([source]) == first
    os.utime(source / "config.json", (1, 1))
    assert signature([source]) != first
    with pytest.raises(WriteError, match="not there"):
        signature([tmp_path / "none"])


def test_a_copy_that_breaks_off_is_not_taken_for_whole(tmp_path, source):
    to = target(tmp_path)
    stage(to, ["model"], copy_into([source]))

    def breaks(part):
        (part / "model").mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="No space left"):
        stage(target(tmp_path, mark="s2"), ["model"], breaks)
    assert not is_staged(to)
    assert stage(to, ["model"], copy_into([source])) is True


def test_an_archive_that_came_in_part_is_refused(tmp_path, source):
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(source, "model")
    size = archive.stat().st_size
    os.truncate(archive, size - 1000)
    to = target(tmp_path)
    with pytest.raises(WriteError, match=f"of {size} bytes"):
        stage(to, ["model"], unpack_into(archive, size))
    assert not (to.folder / "model").exists()


@pytest.mark.process("concurrent")
def test_processes_of_one_node_stage_once_between_them(tmp_path, source):
    to = target(tmp_path)
    command = [sys.executable, "-m", "bagent.hpc", "stage", "--to", to.folder, "--done", to.done]
    command += ["--signature", "s1", source]
    env = {**os.environ, "BAGENT_NODE": "n7.site"}
    running = [subprocess.Popen(command, env=env) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert content(to.folder / "model") == content(source)
    assert [path.name for path in to.done.iterdir()] == ["n7"]


class Bus:
    """A communicator among threads: each value goes around once all have come."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=20)
        self.value = None


class Rank:
    def __init__(self, bus, number):
        self.bus, self.number = bus, number

    def Get_rank(self):
        return self.number

    def bcast(self, value, root=0):
        if self.number == root:
            self.bus.value = value
        self.bus.barrier.wait()
        got = self.bus.value
        self.bus.barrier.wait()
        return got

    def allgather(self, value):
        raise AssertionError("not used here")


def spread_over(targets, sources):
    bus, errors = Bus(len(targets)), [None] * len(targets)

    def one(number):
        try:
            mpi_broadcast(Rank(bus, number), targets[number], sources, chunk=65_536)
        except WriteError as error:
            errors[number] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_one_reads_and_all_have_the_files_but_a_node_whose_disk_refuses(tmp_path, source):
    targets = [target(tmp_path, f"node{n}") for n in range(3)]
    (tmp_path / "node1").write_text("a file where a folder should be")
    errors = spread_over(targets, [source])
    assert [error is None for error in errors] == [True, False, True]
    for to in (targets[0], targets[2]):
        assert content(to.folder / "model") == content(source)
        assert is_staged(to)


def test_a_source_that_cannot_be_read_fails_everywhere(tmp_path, source):
    targets = [target(tmp_path, f"node{n}") for n in range(2)]
    errors = spread_over(targets, [source.with_name("none")])
    assert all(error is not None for error in errors)
    assert not any(is_staged(to) for to in targets)


def another_users(folder, monkeypatch):
    """Make what this user owns look like another user's."""
    folder.mkdir(parents=True)
    (folder / SENTINEL).write_text("s1")
    monkeypatch.setattr("bagent.files.os.geteuid", lambda: os.getuid() + 1)


def a_link(folder, monkeypatch):
    """Make the folder a link to one that this user owns."""
    folder.parent.mkdir(parents=True)
    (folder.parent / "other").mkdir()
    folder.symlink_to("other")


@pytest.mark.parametrize("made", [another_users, a_link])
def test_a_folder_that_somebody_else_made_is_neither_trusted_nor_filled(
    tmp_path, source, monkeypatch, made
):
    to = target(tmp_path)
    made(to.folder, monkeypatch)
    assert not is_staged(to)
    with pytest.raises(WriteError, match=r"another user|symbolic link|directory.*stage_to"):
        stage(to, ["model"], copy_into([source]))
    assert not (to.folder / "model").exists()


def test_a_staging_folder_is_for_its_owner_also_where_it_was_open(tmp_path, source):
    to = target(tmp_path)
    to.folder.mkdir(parents=True, mode=0o755)
    stage(to, ["model"], copy_into([source]))
    assert to.folder.stat().st_mode & 0o777 == 0o700
