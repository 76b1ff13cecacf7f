"""Lines that take those before them away."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bagent.store.journal.codec import TOMBSTONE, unit_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.results import iter_results
from bagent.types import Outcome


def unit(item: Outcome) -> int:
    return unit_of(int(item.key, 16), item.stage, item.answer)


def current_by_reading(outcomes: list[Outcome]) -> dict[int, Outcome]:
    best: dict[int, Outcome] = {}
    for item in outcomes:
        status: Any = item.status
        if status == TOMBSTONE:
            best.pop(unit(item), None)
            continue
        before = best.get(unit(item))
        if before is None or before.status != "ok":
            best[unit(item)] = item
    return best


@pytest.mark.parametrize("seed", range(6))
def test_void_lines_are_as_a_plain_reading_takes_them(store, outcome, failure, seed):
    rng = random.Random(seed)
    created = []
    for number in range(300):
        row = rng.randrange(40)
        kind = rng.choice(["ok", "ok", "failed", TOMBSTONE])
        if kind == "failed":
            created.append(failure(row, "timeout", finished_at=float(number)))
        else:
            created.append(outcome(row, status=kind, finished_at=float(number)))
    store.write(*created, segment_bytes=3000)
    expected = current_by_reading(created)
    index = load_index(
        store.path, None, ResumePolicy(skip_failed=True), report=store.reports.append
    )
    assert {u for u in map(unit, created) if index.has(u)} == set(expected)
    assert index.codes.total() == len(expected)
    result = {r["row"]: r["finished_at"] for r in iter_results(store.path, report=print)}
    assert result == {item.row: item.finished_at for item in expected.values()}
