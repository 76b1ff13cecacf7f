"""An input that was edited between two starts: what of the earlier outcomes still counts."""

from __future__ import annotations

import random

import msgspec
import pytest

from bagent.store.journal.codec import salt_of
from bagent.store.journal.edited_rows import EditedRows, replaced_lines
from bagent.store.journal.journal import Journal
from bagent.store.journal.journal_files import JournalFiles
from bagent.store.journal.reader import JournalReader
from support.stored_runs import unit

OTHER_KEY = "00000000000000ff"


def going_on(store, **options):
    """The journal of a later start, as a run opens it."""
    files = JournalFiles.open(store.path, report=store.reports.append, **{"part": "all", **options})
    return Journal(files, store.clock, edited=edited_rows(store))


def edited_rows(store) -> EditedRows:
    return EditedRows(store.indexes())


def current(store) -> list[str]:
    with JournalReader(store.path, store.reports.append) as lines:
        return [lines.read_at(lines.location(location)).decode() for location in lines.ordered()]


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "r9"},
        {"id": None},
        {"row": 1},
        {"row": 40},
        {"stage": "judge"},
        {"answer": 1},
        {"source": "more.jsonl"},
    ],
    ids=str,
)
def test_another_row_takes_nothing_away(store, outcome, changes):
    store.write(outcome(1), outcome(2), outcome(2, stage="draft"), outcome(3))
    journal = going_on(store)
    journal.write(msgspec.structs.replace(outcome(2, key=OTHER_KEY), **changes))
    journal.close()
    assert len(current(store)) == 5


def test_ids_are_the_same_only_as_typed(store, outcome):
    store.write(outcome(1, id=1), outcome(2, id="1"), outcome(3, id=True))
    edited = edited_rows(store)
    for row in (1, 2, 3):
        assert len(edited.replaced_units(outcome(row, key=OTHER_KEY, id=1))) == (row == 1)


def test_after_a_kill_between_the_two_lines_the_edited_row_is_sent_again(store, outcome):
    store.write(outcome(1), outcome(2))
    journal = going_on(store)
    journal.write(outcome(2, key=OTHER_KEY))
    journal.close()
    path = store.segment()
    path.write_bytes(path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0] + b"\n")
    path.with_suffix(".idx").unlink()
    done = store.finished()
    assert done.has(unit(outcome(1)))
    assert not done.has(unit(outcome(2)))
    assert not done.has(unit(outcome(2, key=OTHER_KEY)))


def test_rows_are_found_in_whichever_segment_they_are(store, outcome):
    rng = random.Random(5)
    rows = rng.sample(range(500), 400)
    store.write(*(outcome(row) for row in rows), segment_bytes=4000)
    assert len(store.indexes()) > 10
    earlier = edited_rows(store)
    for row in range(520):
        edited = outcome(row, key=f"{row + 1:016x}")
        assert earlier.replaced_units(edited) == [unit(outcome(row))] * (row in rows)


def test_an_earlier_segment_that_is_gone_keeps_no_new_outcome_from_being_written(store, outcome):
    store.write(*map(outcome, range(40)), segment_bytes=2000)
    journal = going_on(store)
    for path in (store.segment(1), store.segment(2).with_suffix(".idx")):
        path.unlink()
    for row in range(40):
        journal.write(outcome(row, key=f"{row + 1:016x}"))
    journal.close()


def over_parts(store) -> list[str]:
    """The lines that only all parts together show to be replaced, as PART KEY."""
    result = replaced_lines(store.indexes(), "main")
    return sorted(
        f"{line.segment_index.segment.part} {line.unit ^ salt_of('main', answer):016x}"
        for line in result
        for answer in [line.segment_index.column("answers")[line.ordinal]]
    )


def test_of_an_edited_row_in_two_parts_the_newest_lines_count(store, outcome):
    far = 5_000_000
    rows = [(2, 0), (2, 1), (far, 0), (3, 0)]
    old = [outcome(row, answer=answer, finished_at=1.0) for row, answer in rows]
    store.write(*old, part="1-of-2")
    new = [outcome(row, answer=n, key=OTHER_KEY, finished_at=2.0) for row, n in rows[:3]]
    store.write(*new, part="2-of-2")
    assert over_parts(store) == sorted(f"1-of-2 {item.key}" for item in old[:3])


@pytest.mark.parametrize(
    "changes",
    [{"id": "r9"}, {"id": OTHER_KEY}, {"stage": "judge"}],
    ids=str,
)
def test_another_row_of_another_part_takes_nothing_away(store, outcome, changes):
    store.write(outcome(1), outcome(2), outcome(2, stage="draft"), part="1-of-2")
    other = msgspec.structs.replace(outcome(2, key=OTHER_KEY, finished_at=2.0), **changes)
    store.write(other, part="2-of-2")
    assert over_parts(store) == []


def test_what_was_taken_back_is_not_replaced_once_more(store, outcome):
    store.write(outcome(2, finished_at=1.0), part="1-of-2")
    store.write(outcome(2, key=OTHER_KEY, finished_at=2.0), part="2-of-2")
    journal = store.open("1-of-2")
    journal.write_tombstone(unit(outcome(2)), "main")
    journal.close()
    assert over_parts(store) == []


def test_a_segment_of_taken_back_lines_only_comes_after_what_it_takes_back(store, failure):
    store.write(failure(2, finished_at=1.0), part="1-of-2")
    journal = store.open()
    journal.write_tombstone(unit(failure(2)), "main")
    journal.close()
    assert current(store) == []
