"""Outcomes that came with one answer are written with one call, and lose nothing by it."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from bagent.errors import WriteError
from bagent.store.journal.done_index import ResumePolicy, load_index


def test_each_has_the_place_that_it_was_told_also_where_segments_end_in_between(store, outcome):
    journal = store.open(segment_bytes=2_000)
    places = []
    for first in range(0, 60, 12):
        places += journal.write_all([outcome(n, text="é" * n) for n in range(first, first + 12)])
    assert store.segment(4).exists()
    assert [journal.read_at(location).id for location in places] == [f"r{n}" for n in range(60)]
    journal.close()
    done = load_index(store.path, None, ResumePolicy(), report=store.reports.append)
    assert len(done) == 60
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


_LIMITED = """
import resource, sys
from pathlib import Path
from bagent.errors import WriteError
from bagent.store.journal.journal import Journal
from bagent.types import Outcome
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
journal = Journal.open(Path(sys.argv[1]), "all", clock=lambda: 0.0, report=print)
rows = [
    Outcome(key=f"{n:016x}", row=n, id=n, source="s", line=n, stage="main", status="ok",
            text="x" * 200)
    for n in range(30)
]
try:
    if sys.argv[2] == "together":
        written = journal.write_all(rows)
        journal.write_all(rows[len(written):])
    else:
        for row in rows:
            journal.write(row)
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
