"""The recipe of keys: journals hold them, so these values must never change."""

import json
import random
from collections import Counter
from hashlib import blake2b

import pytest

from bagent.rows.row_keys import Occurrences, derive


def base_key(body: bytes) -> int:
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big")


def only(rows):
    (row,) = rows
    return row


@pytest.mark.parametrize(
    ("line", "settings", "body"),
    [
        ('{"id":"r1","b":2,"a":"x"}', {"fields": ("a", "b")}, '["r1",["x",2]]'),
        ('{"id":"r1","b":2,"a":"x"}', {"fields": ("b", "a")}, '["r1",["x",2]]'),
        ('{"id":"r1","b":2,"a":"x"}', {"fields": ()}, '["r1",[]]'),
        ('{"id":"r1","b":2,"a":"x"}', {"fields": None}, '["r1",{"a":"x","b":2,"id":"r1"}]'),
        ('{"id":1,"b":2}', {"fields": ("b",)}, "[1,[2]]"),
        ('{"id":true,"b":2}', {"fields": ("b",)}, "[true,[2]]"),
        ('{"id":1,"b":2}', {"fields": ("a", "b", "c")}, "[1,[,2,]]"),
        ('{"b":2,"a":1}', {"fields": ("a",)}, "[[1]]"),
        ('{"b":2,"a":1}', {"fields": None}, '[{"a":1,"b":2}]'),
        ('{"id":null,"b":2}', {"fields": ("b",)}, "[[2]]"),
        ('{"id":null,"custom_id":"c","b":2}', {"fields": ("b",)}, '["c",[2]]'),
        ('{"gene":"g","id":1,"b":2}', {"fields": ("b",), "id_field": "gene"}, '["g",[2]]'),
        ('{"id":{"y":1,"x":[2]},"b":2}', {"fields": ("b",)}, r'["{\"x\":[2],\"y\":1}",[2]]'),
        ('{"id":1,"b":{"y":[1.5,{"d":1,"c":2}],"x":"é"}}', {"fields": ("b",)},
         '[1,[{"x":"é","y":[1.5,{"c":2,"d":1}]}]]'),
        ('{"id":1,"b":[1e22,1E-7,123456789012345678901,-0.0]}', {"fields": ("b",)},
         "[1,[[1e22,1e-7,123456789012345678901,-0.0]]]"),
        (r'{"id":1,"b":"\ud800"}', {"fields": ("b",)}, r'[1,["\\ud800"]]'),
        ("not json", {"fields": ("b",)}, "not json"),
    ],
)  # fmt: skip
def test_key_is_the_hash_of_the_body(rows_of, line, settings, body):
    assert only(rows_of(line, **settings)).key == base_key(body.encode())


def test_keys_written_down():
    assert base_key(b'["r1",["x",2]]') == 0xD09155BFBDD5121D
    assert derive(0xD09155BFBDD5121D, 1) == 0xC3F00E230428B94D


def test_the_fast_and_the_careful_way_agree(rows_of):
    lines = [json.dumps({"id": f"r{n}", "a": n, "b": [n]}) for n in range(50)]
    fast = rows_of("\n".join(lines), fields=("a", "b"))
    careful = rows_of("\n".join([*lines, '{"id":"x"}', "[]"]), fields=("a", "b"))
    assert [row.key for row in fast] == [row.key for row in careful][:50]
    assert len({row.key for row in careful}) == 52


def test_occurrences_count_like_a_counter():
    source = random.Random(11)
    counted, known = Occurrences(), Counter()
    pool = [source.getrandbits(64) for _ in range(6000)]  # more than it remembers counts for
    for _ in range(100):
        bases = [source.choice(pool) if source.random() < 0.9 else pool[0] for _ in range(300)]
        for base, count in zip(bases, counted.count(bases), strict=True):
            assert count == known[base]
            known[base] += 1
