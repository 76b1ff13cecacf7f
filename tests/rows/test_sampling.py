import json
import random
from collections import Counter
from pathlib import Path

import pytest

from bagent.errors import InputError
from bagent.rows import RowsConfig, read_again


def text_of(numbers) -> str:
    return "\n".join(json.dumps({"id": n, "x": n % 10}) for n in numbers)


def ids(rows) -> list:
    return [row.id for row in rows]


def test_the_same_seed_draws_the_same_rows_wherever_they_stand(rows_of):
    numbers = list(range(2000))
    drawn = ids(rows_of(text_of(numbers), sample=50, seed=7))
    assert len(drawn) == 50
    assert drawn == sorted(drawn)
    random.Random(1).shuffle(numbers)
    assert set(ids(rows_of(text_of(numbers), sample=50, seed=7))) == set(drawn)
    assert set(ids(rows_of(text_of(numbers), sample=50, seed=8))) != set(drawn)


def test_a_sample_is_even(rows_of):
    text = text_of(range(400))
    count = Counter()
    for seed in range(40):
        count.update(ids(rows_of(text, sample=100, seed=seed)))
    assert sum(count.values()) == 4000
    # 10 draws a row are expected, with a standard deviation of 3.
    assert max(count.values()) < 26
    assert len(count) > 390
    quarters = [sum(count[n] for n in range(start, start + 100)) for start in range(0, 400, 100)]
    assert all(850 < quarter < 1150 for quarter in quarters)


def test_limit_takes_the_first_rows_and_a_large_sample_all(rows_of):
    assert ids(rows_of(text_of(range(2000)), limit=700)) == list(range(700))
    assert rows_of(text_of(range(5)), limit=0) == []
    assert ids(rows_of(text_of(range(30)), sample=100, limit=90)) == list(range(30))


@pytest.mark.parametrize("parts", [3, 7])
def test_shards_are_disjoint_complete_and_follow_the_key(rows_of, parts):
    numbers = list(range(1000))
    shards = [set(ids(rows_of(text_of(numbers), shard=(i, parts)))) for i in range(1, parts + 1)]
    assert sum(map(len, shards)) == 1000
    assert set().union(*shards) == set(numbers)
    assert min(map(len, shards)) > 1000 / parts * 0.75
    random.Random(2).shuffle(numbers)
    assert set(ids(rows_of(text_of(numbers), shard=(1, parts)))) == shards[0]


def test_filters_apply_in_their_order(rows_of):
    text = text_of(range(1000))
    fitting = ids(rows_of(text, where="x = 3"))
    assert len(fitting) == 100
    drawn = ids(rows_of(text, where="x = 3", sample=30))
    assert len(drawn) == 30
    assert set(drawn) < set(fitting)
    first = ids(rows_of(text, where="x = 3", sample=30, limit=10))
    assert first == drawn[:10]
    shards = [ids(rows_of(text, where="x = 3", sample=30, limit=10, shard=(i, 2))) for i in (1, 2)]
    assert sorted(shards[0] + shards[1]) == first


def test_read_again_gives_the_same_rows(tmp_path):
    (tmp_path / "in.jsonl").write_text(text_of(range(1000)) + "\nbroken\n")
    config = RowsConfig(
        ("in.jsonl",), tmp_path, fields=("x",), where="x < 5", sample=100, limit=50, shard=(2, 3)
    )
    first = [row for batch in read_again(config) for row in batch]
    again = RowsConfig.from_json(config.to_json())
    assert [row for batch in read_again(again) for row in batch] == first
    assert 5 < len(first) < 30


@pytest.mark.parametrize(
    ("selection", "most"),
    [
        ({}, None),
        ({"sample": 5, "limit": 3}, 3),
        ({"limit": 7, "shard": (1, 2)}, 4),
    ],
)
def test_the_most_rows_follow_from_limit_sample_and_shard(source_of, selection, most):
    assert source_of("{}\n" * 20, **selection).most == most


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": ()},
        {"inputs": ({"file": "x"},)},
        {"sample": 0},
        {"limit": -1},
        {"shard": (3, 2)},
        {"shard": (1, 0)},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InputError):
        RowsConfig(**{"inputs": ("a.jsonl",), "base": Path("/"), **wrong})
