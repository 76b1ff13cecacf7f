"""Current outcomes by ranges of units."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bagent.store.journal import segment_index
from bagent.store.journal.codec import TOMBSTONE, code_of
from bagent.store.journal.done_index import open_indexes
from bagent.store.journal.supersession import OutcomeRanges
from bagent.types import Outcome
from support.stored_runs import current_outcomes, unit


def mixed(outcome: Any, seed: int, count: int, kinds: list[str]) -> list[Outcome]:
    rng = random.Random(seed)
    created = []
    for _ in range(count):
        status = rng.choice(kinds)
        kind = rng.choice(["timeout", "auth"]) if status == "failed" else None
        created.append(outcome(rng.randrange(count // 2), status=status, error_kind=kind))
    return created


@pytest.mark.parametrize("small", [-1, segment_index.SMALL])
@pytest.mark.parametrize("bits", [0, 1, 4])
@pytest.mark.parametrize("kinds", [["ok"], ["ok", "failed"], ["ok", "ok", "failed", TOMBSTONE]])
def test_every_unit_is_in_its_range_once(store, outcome, monkeypatch, bits, kinds, small):
    monkeypatch.setattr(segment_index, "SMALL", small)
    created = mixed(outcome, bits, 300, kinds)
    store.write(*created, segment_bytes=3000)
    result: dict[int, int] = {}
    ranges = list(OutcomeRanges(open_indexes(store.path, store.reports.append), bits).ranges())
    assert len(ranges) == 1 << bits
    for number, (ok, bad) in enumerate(ranges):
        assert all(item >> (64 - bits) == number for item in (*ok, *bad))
        assert len(set(ok)) == len(ok)
        result |= dict.fromkeys(ok, 0) | bad
    current = current_outcomes(created)
    assert result == {u: code_of(o.status, o.error_kind) for u, o in current.items()}


@pytest.fixture
def unread(monkeypatch):
    """Leave columns in the index file until they are used, as those of many lines are."""
    monkeypatch.setattr(segment_index, "SMALL", -1)


@pytest.mark.usefixtures("unread")
def test_an_index_goes_on_when_its_writer_puts_a_longer_file_in_its_place(store, outcome, failure):
    journal = store.open()
    first = [outcome(n) for n in range(9)]
    for item in first:
        journal.write(item)
    journal.save_index()
    (index,) = open_indexes(store.path, store.reports.append)
    for number in range(200, 340):
        journal.write(failure(number, stage="another stage"))
    journal.close()
    assert list(index.column("units")) == list(map(unit, first))
    assert list(index.column("rows")) == list(range(9))
    assert list(index.column("codes")) == [0] * 9
    assert list(index.ok_units()) == sorted(map(unit, first))


@pytest.mark.usefixtures("unread")
def test_a_file_that_covers_less_than_before_is_refused(store, outcome):
    store.write(outcome(0), outcome(1))
    sidecar = store.segment().with_suffix(".idx")
    other = type(store)(store.path / "other")
    other.write(outcome(0))
    (index,) = open_indexes(store.path, store.reports.append)
    other.segment().with_suffix(".idx").replace(sidecar)
    with pytest.raises(EOFError):
        index.column("rows")
