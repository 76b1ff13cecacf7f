"""Lines that take those before them away."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bagent.store.journal.codec import TOMBSTONE, unit_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.journal.reader import JournalReader
from bagent.store.results import iter_results
from bagent.types import Outcome


def unit(one: Outcome) -> int:
    return unit_of(int(one.key, 16), one.stage, one.answer)


def current_by_reading(outcomes: list[Outcome]) -> dict[int, Outcome]:
    best: dict[int, Outcome] = {}
    for one in outcomes:
        status: Any = one.status
        if status == TOMBSTONE:
            best.pop(unit(one), None)
            continue
        before = best.get(unit(one))
        if before is None or before.status != "ok":
            best[unit(one)] = one
    return best


@pytest.mark.parametrize("seed", range(6))
def test_void_lines_are_as_a_plain_reading_takes_them(store, outcome, failure, seed):
    rng = random.Random(seed)
    made = []
    for number in range(300):
        row = rng.randrange(40)
        kind = rng.choice(["ok", "ok", "failed", TOMBSTONE])
        if kind == "failed":
            made.append(failure(row, "timeout", finished_at=float(number)))
        else:
            made.append(outcome(row, status=kind, finished_at=float(number)))
    store.write(*made, segment_bytes=3000)
    wanted = current_by_reading(made)
    index = load_index(
        store.path, None, ResumePolicy(skip_failed=True), report=store.reports.append
    )
    assert {u for u in map(unit, made) if index.has(u)} == set(wanted)
    assert sum(index.statuses.values()) == len(wanted)
    found = {r["row"]: r["finished_at"] for r in iter_results(store.path, report=print)}
    assert found == {one.row: one.finished_at for one in wanted.values()}


def test_a_journal_without_void_lines_is_not_searched_for_them(store, outcome):
    store.write(outcome(0), outcome(1), outcome(0))
    with JournalReader(store.path, store.reports.append) as lines:
        assert [place.row for place in lines.written()] == [0, 1]
