from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest

from bagent.errors import WriteError
from bagent.store.journal.journal import FLUSH_SECONDS, Syncer
from bagent.types import Attempt


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def attempt(row: int) -> Attempt:
    return Attempt(
        key="00", row=row, stage="main", answer=0, turn=1, try_=1, endpoint="e", group="g",
        group_size=1, sent=1.0,
    )  # fmt: skip


def test_the_journal_goes_on_in_the_last_segment_unless_told_otherwise(store, outcome):
    store.write(outcome(0))
    store.write(outcome(1))
    assert len(lines_of(store.segment())) == 2
    store.write(outcome(2), new_segment=True)
    assert len(lines_of(store.segment())) == 2
    assert len(lines_of(store.segment(2))) == 1
    with pytest.raises(ValueError, match="not a part name"):
        store.open("../x")


def test_an_attempt_is_in_its_file_before_the_row_that_it_ended(store, outcome):
    journal = store.open()
    journal.write_attempts([attempt(1)])
    journal.write(outcome(1))
    journal.write_attempts([attempt(2)])
    journal.write_all([outcome(2), outcome(3)])
    assert [line["row"] for line in lines_of(store.segment(stream="attempts"))] == [1, 2]
    journal.close()


def test_attempts_wait_at_most_a_second(store):
    journal = store.open()
    journal.write_attempts([attempt(1)])
    journal.tick()
    assert not store.segment(stream="attempts").exists()
    store.clock.now += FLUSH_SECONDS
    journal.tick()
    assert lines_of(store.segment(stream="attempts"))[0]["try"] == 1
    journal.close()


@pytest.mark.parametrize(("cut", "whole"), [(1, ["r0", "r1"]), (2, ["r0"])])
def test_nothing_is_glued_to_a_cut_line_and_one_that_lacks_its_newline_counts(
    store, outcome, cut, whole
):
    store.write(outcome(0), outcome(1))
    path = store.segment()
    path.write_bytes(path.read_bytes()[:-cut])
    path.with_suffix(".idx").unlink()
    store.write(outcome(2))
    assert [line["id"] for line in lines_of(path)] == [*whole, "r2"]
    assert len(store.finished()) == len(whole) + 1


def test_the_torn_bytes_are_kept_and_reported(store, outcome):
    store.write(outcome(0))
    with store.segment().open("ab") as file:
        file.write(b'{"key":"0123')
    store.write(outcome(1))
    remaining = list((store.path / "journal").glob("torn-*"))
    assert [path.read_bytes() for path in remaining] == [b'{"key":"0123']
    assert any(
        "cut off 12 bytes" in message and remaining[0].name in message for message in store.reports
    )


def test_a_broken_line_in_the_middle_is_named_and_stops_nothing(store, outcome):
    store.write(*(outcome(n) for n in range(3)))
    lines = store.segment().read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"source"', b'"rource"')
    lines[1] = b'{"key":"brok\n'
    store.segment().write_bytes(b"".join(lines))
    store.write(outcome(3))
    for number in (1, 2):
        assert any(f"{store.segment()}:{number}: broken line" in line for line in store.reports)
    assert len(store.finished()) == 2


def test_a_line_changed_in_place_is_noticed(store, outcome):
    store.write(*(outcome(n, text="x" * 900) for n in range(20)))
    content = bytearray(store.segment().read_bytes())
    content[5] = ord("}")
    store.segment().write_bytes(bytes(content))
    os.utime(store.segment(), ns=(1, 1))
    assert len(store.finished()) == 19
    assert any(":1: broken line" in message for message in store.reports)


def test_a_good_line_behind_zero_bytes_is_kept(store, outcome):
    store.write(outcome(0))
    line = store.segment().read_bytes()
    store.segment().write_bytes(
        line + b"\0" * 100 + line.replace(b"r0", b"r1").replace(b":0", b":1")
    )
    journal = store.open()
    assert journal.read_at((1 << 32) | (len(line) + 100)).id == "r1"
    journal.close()


def _fill(journal, outcome) -> list[int]:
    places = []
    for n in range(100_000):
        places.append(journal.write(outcome(n, text="x" * 300)))
    raise AssertionError("the disk never filled up")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_full_disk_the_line_is_taken_back_and_the_reason_is_told(small_disk, outcome, store):
    store.path = small_disk / "run"
    journal = store.open()
    with pytest.raises(WriteError, match="No space left on device") as caught:
        _fill(journal, outcome)
    assert caught.value.exit_code == 74
    assert str(store.segment()) in str(caught.value)
    content = store.segment().read_bytes()
    assert content.endswith(b"}\n")
    with pytest.raises(WriteError, match="No space"):
        journal.write(outcome(1))
    assert journal.read_at(1 << 32).id == "r0"
    journal.close()
    assert len(store.finished()) == content.count(b"\n")


@pytest.mark.parametrize("next_call", ["write", "close"])
def test_a_failed_sync_that_nobody_heard_of_is_told_by_the_next_call(store, outcome, next_call):
    journal = store.open()
    journal.write(outcome(0))
    os.close(journal._rows.descriptor)
    syncer = Syncer(journal, interval=0.001)
    syncer.start()
    syncer.stop()
    journal._rows.descriptor = -1
    with pytest.raises(WriteError):
        journal.write(outcome(1)) if next_call == "write" else journal.close()


def test_the_syncer_syncs_once_more_when_stopped(store, outcome):
    journal = store.open()
    syncer = Syncer(journal, interval=3600.0)
    syncer.start()
    journal.write(outcome(0))
    assert journal._rows.dirty
    syncer.stop()
    assert not journal._rows.dirty
    journal.close()


def test_writing_and_syncing_at_once_over_many_segments_loses_nothing(store, outcome):
    journal = store.open(segment_bytes=2000)
    stop = threading.Event()

    def sync_all_the_time() -> None:
        while not stop.is_set():
            journal.sync()

    thread = threading.Thread(target=sync_all_the_time)
    thread.start()
    for n in range(400):
        journal.write(outcome(n))
    stop.set()
    thread.join()
    journal.close()
    assert len(store.finished()) == 400
    assert store.reports == []


def test_no_descriptor_is_left_open(store, outcome):
    before = len(list(Path("/proc/self/fd").iterdir()))
    journal = store.open(segment_bytes=600)
    places = [journal.write(outcome(n)) for n in range(50)]
    for location in places:
        journal.read_at(location)
    journal.close()
    journal.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # others may be closed meanwhile


def test_each_has_the_place_that_it_was_told_also_where_segments_end_in_between(store, outcome):
    journal = store.open(segment_bytes=500)
    places = []
    for first in range(0, 60, 3):
        places += journal.write_all([outcome(n, text="é" * n) for n in range(first, first + 3)])
    assert store.segment(17).exists(), "more than are held open"
    assert [journal.read_at(location).id for location in places] == [f"r{n}" for n in range(60)]
    journal.close()
    assert len(store.finished()) == 60
    assert not store.reports


ODD = {
    "raw": {"output": msgspec.Raw(b'{"a":\n1}')},
    "broken": {"output": msgspec.Raw(b'{"a":')},
    "surrogate": {"text": "\ud800"},
    "huge": {"id": 1 << 70},
    "nested": {"id": {"a": [float("nan")]}},
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_written_together_is_written_as_each_would_be_alone(store, outcome, odd):
    rows = [outcome(1), outcome(2, **ODD[odd]), outcome(3, text="two\nlines\r\u2028")]
    journal = store.open()
    places = journal.write_all(rows)
    alone = [journal.write(row) for row in rows]
    read = [journal.read_at(location) for location in places + alone]
    assert read[:3] == read[3:]
    journal.close()
    assert len(store.segment().read_bytes().splitlines()) == 6


def test_what_the_disk_takes_only_one_by_one_is_written_without_an_error(
    store, outcome, monkeypatch
):
    journal = store.open()
    append = journal._rows.append

    def refuse_several(lines):
        if lines.count(b"\n") > 1:
            raise WriteError("the disk is full")
        return append(lines)

    monkeypatch.setattr(journal._rows, "append", refuse_several)
    locations = journal.write_all([outcome(1), outcome(2)])
    assert [journal.read_at(location).id for location in locations] == ["r1", "r2"]
    assert journal.failure is None
    journal.close()
