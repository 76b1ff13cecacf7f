"""Outcomes that came with one answer are written with one call, and lose nothing by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bagent.errors import WriteError
from bagent.store.journal.done_index import ResumePolicy, load_index


def ids_in(path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_each_has_the_place_that_it_was_told_also_where_segments_end_in_between(store, outcome):
    journal = store.open(segment_bytes=2_000)
    places = []
    for first in range(0, 60, 12):
        with journal.together():
            places += [journal.write(outcome(n, text="é" * n)) for n in range(first, first + 12)]
    assert store.segment(4).exists()
    assert [journal.read_at(location).id for location in places] == [f"r{n}" for n in range(60)]
    journal.close()
    done = load_index(store.path, None, ResumePolicy(), report=store.reports.append)
    assert len(done) == 60
    assert not store.reports


def test_what_is_held_back_can_be_read_at_once(store, outcome):
    journal = store.open()
    with journal.together():
        location = journal.write(outcome(5))
        assert journal.read_at(location).id == "r5"
        other = journal.write(outcome(6))
    assert journal.read_at(other).id == "r6"
    journal.close()


def test_a_fault_in_between_loses_nothing_that_was_written_before_it(store, outcome):
    journal = store.open()

    def one_answer() -> None:
        with journal.together():
            journal.write(outcome(1))
            raise KeyError("a fault")

    with pytest.raises(KeyError):
        one_answer()
    assert ids_in(store.segment()) == ["r1"]
    journal.write(outcome(2))
    assert ids_in(store.segment()) == ["r1", "r2"]
    journal.close()


def test_blocks_that_overlap_each_write_all_that_was_buffered_before(store, outcome):
    journal = store.open()
    first, second = journal.together(), journal.together()
    first.__enter__()
    journal.write(outcome(1))
    second.__enter__()
    journal.write(outcome(2))
    assert ids_in(store.segment()) == []
    first.__exit__(None, None, None)
    assert ids_in(store.segment()) == ["r1", "r2"]
    journal.write(outcome(3))
    assert ids_in(store.segment()) == ["r1", "r2"]
    second.__exit__(None, None, None)
    assert ids_in(store.segment()) == ["r1", "r2", "r3"]
    journal.close()


_LIMITED = """
import contextlib, resource, sys
from pathlib import Path
from bagent.errors import WriteError
from bagent.store.journal.journal import Journal
from bagent.types import Outcome
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
journal = Journal.open(Path(sys.argv[1]), "all", clock=lambda: 0.0, report=print)
around = journal.together() if sys.argv[2] == "together" else contextlib.nullcontext()
try:
    with around:
        for n in range(30):
            journal.write(Outcome(key=f"{n:016x}", row=n, id=n, source="s", line=n, stage="main",
            status="ok", text="x" * 200))
except WriteError as error:
    print(error.exit_code)
journal.close()
"""


def test_on_a_full_file_as_many_are_written_together_as_alone(store):
    result = []
    for way in ("alone", "together"):
        done = subprocess.run(
            [sys.executable, "-c", _LIMITED, str(store.path / way), way],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "74\n"
        content = (store.path / way / "journal" / store.segment().name).read_bytes()
        assert content.endswith(b"}\n")
        result.append(content.count(b"\n"))
    assert result[0] == result[1] > 5


def test_what_is_held_back_when_the_disk_refuses_to_sync_is_not_written(store, outcome):
    journal = store.open()
    journal.write(outcome(0))
    descriptor = journal._rows.descriptor
    remaining = os.dup(descriptor)

    def one_answer() -> None:
        with journal.together():
            journal.write(outcome(1))
            os.close(descriptor)
            with pytest.raises(WriteError):
                journal.sync()
            os.dup2(remaining, descriptor)  # it would take lines again

    with pytest.raises(WriteError):
        one_answer()
    assert ids_in(store.segment()) == ["r0"]
    journal.close()
    os.close(remaining)
