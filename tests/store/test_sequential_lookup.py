"""Whether many units are finished, asked in any order."""

from __future__ import annotations

import random
from array import array

import pytest

from bagent.store.journal.codec import unit_of
from bagent.store.journal.done_index import (
    ResumePolicy,
    SequentialLookup,
    done_index,
    open_indexes,
    units_of,
)
from bagent.types import Outcome
from support.stored_runs import unit

ROWS = 900
AT_ONCE = 30


def written(rng: random.Random, order: str, outcome, failure) -> list[Outcome]:
    """Lines of most rows: some failed, some twice, some of rows that are gone from the input."""
    numbers = list(range(ROWS + 300)) if order == "with rows that are gone" else list(range(ROWS))
    if order == "shuffled":
        rng.shuffle(numbers)
    elif order == "in flight":
        numbers.sort(key=lambda n: n + rng.randrange(64))
    elif order == "backwards":
        numbers.reverse()
    created = []
    for number in numbers:
        if rng.random() < 0.03:
            continue
        if rng.random() < 0.1:
            created.append(failure(number, rng.choice(["timeout", "auth"])))
        if rng.random() < 0.9:
            created.append(outcome(number))
            if rng.random() < 0.05:
                created.append(outcome(number))
    return created


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize(
    "order", ["in order", "in flight", "shuffled", "backwards", "with rows that are gone"]
)
def test_the_answer_is_that_of_each_unit_whatever_the_order(store, outcome, failure, order, chunk):
    rng = random.Random(f"{order} {chunk}")
    store.write(*written(rng, order, outcome, failure), segment_bytes=20_000)
    indexes = open_indexes(store.path, store.reports.append)
    done = done_index(indexes, ResumePolicy())
    near = SequentialLookup(indexes, (), done.has, chunk)
    answers = []
    for start in range(0, ROWS, AT_ONCE):
        units = [unit(outcome(n)) for n in range(start, start + AT_ONCE)]
        missing = {item for item in units if not done.has(item)}
        assert near.has_all(units) is not bool(missing)
        answers.append(near.has_all([item for item in units if item not in missing]))
    assert all(answers)


@pytest.mark.parametrize("kind", [list, lambda keys: array("Q", keys)])
def test_units_of_many_keys_are_those_of_each(kind):
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(50)] + [0, 2**64 - 1]
    assert list(units_of(kind(keys), "main", 2)) == [unit_of(key, "main", 2) for key in keys]
    assert list(units_of(kind([]), "main", 0)) == []
