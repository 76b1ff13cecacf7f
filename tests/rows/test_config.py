from pathlib import Path

import pytest

from bagent.errors import InputError
from bagent.rows import RowsConfig


def test_json_round_trip_keeps_everything():
    config = RowsConfig(
        inputs=("/data/a.jsonl", "-", {"files": "papers/*.txt"}, {"sql": "select 1"}),
        base=Path("/data"),
        id_field="gene",
        fields=("b", "a", "b"),
        where="a > 1",
        sample=10,
        seed=3,
        limit=5,
        shard=(2, 4),
        stdin_spool=Path("/runs/x/input.jsonl"),
    )
    assert RowsConfig.from_json(config.to_json()) == config
    assert config.fields == ("a", "b")
    assert "\n" not in config.to_json()


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
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(InputError) as caught:
        RowsConfig(**{"inputs": ("a.jsonl",), "base": Path("/"), **wrong})
    assert caught.value.exit_code == 2
