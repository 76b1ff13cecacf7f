import json
import random
import tracemalloc
from collections import Counter
from hashlib import blake2b

import pytest

from bagent.rows.formats.json import Chunk, decode_lines
from bagent.rows.row_keys import CompactHashSet, Occurrences, RowKeyer, derive
from bagent.rows.warnings import RowWarnings


def text_of(rows: list[dict]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_one_and_text_one_are_two_ids(source_of):
    source = source_of('{"id":1}\n{"id":"1"}\n{"id":1.0}\n{"id":true}', fields=())
    rows = [row for batch in source.batches() for row in batch]
    assert [row.id for row in rows] == [1, "1", 1.0, True]
    assert [type(row.id) for row in rows] == [int, str, float, bool]
    assert len({row.key for row in rows}) == 4
    assert source.warnings == []


def test_rows_without_id_are_named_by_content(rows_of):
    rows = rows_of('{"a":1,"z":1}\n{"a":2}\n{"a":1,"z":2}\n{"a":1}', fields=("a",))
    assert rows[0].id == f"{rows[0].key:016x}"
    assert [row.id for row in rows] == [
        rows[0].id, rows[1].id, f"{rows[0].id}-2", f"{rows[0].id}-3"
    ]  # fmt: skip
    assert len({row.key for row in rows}) == 4


def test_rows_without_the_id_field_are_counted_in_one_warning(source_of):
    source = source_of('{"gene":"a"}\n{"id":1}\n{"gene":null}\nbroken', id_field="gene")
    rows = [row for batch in source.batches() for row in batch]
    assert rows[0].id == "a"
    assert all(len(row.id) == 16 for row in rows[1:])
    assert source.warnings == [
        "rows without a value for the id, known by their content instead: 2; the field is 'gene'"
    ]


def test_two_rows_of_one_id_stay_two_and_both_lines_are_named(source_of):
    source = source_of(
        '{"id":"a","x":1}\n\n{"id":"b","x":1}\n{"id":"a","x":2}\n{"id":"b","x":1}', fields=("x",)
    )
    rows = [row for batch in source.batches() for row in batch]
    assert [row.id for row in rows] == ["a", "b", "a", "b"]
    assert len({row.key for row in rows}) == 4
    assert source.warnings == [
        "rows with an id that came before: 2, each stays a row of its own; "
        'first: "a" at in.jsonl:4, before at in.jsonl:1'
        " (if another column names the rows: --set id=COLUMN)"
    ]


def test_repeats_over_several_sources_name_the_source():
    notices = RowWarnings()
    namer = RowKeyer(None, None, notices)
    for source in ("a.jsonl", "b.jsonl", "c.jsonl"):
        items = decode_lines([b'{"id":"%s"}' % source.encode(), b'{"id":"same"}'])
        namer.rows(Chunk(source, range(1, 3), items))
    assert '"same" at b.jsonl:2, before at a.jsonl:2' in notices.lines[0]
    assert "before: 2," in notices.lines[0]


def test_places_beyond_four_bytes_are_named_without_a_line():
    notices = RowWarnings()
    keyer = RowKeyer(None, None, notices)
    for line in (2**32, 2**32 + 1):
        keyer.rows(Chunk("a.jsonl", [line], [{"id": 1}]))
    assert "before at an earlier row" in notices.lines[0]


def test_unreadable_lines_have_keys_of_their_bytes(rows_of):
    (odd,) = rows_of(rb'{"id":"a\udc00"}')
    assert odd.id == "a\\udc00"
    rows = rows_of("oops\n{}\noops\n[1]")
    assert [row.error is None for row in rows] == [False, True, False, False]
    assert (rows[0].raw, rows[0].data) == (b"oops", {})
    assert rows[2].id == f"{rows[0].id}-2"
    assert len({row.key for row in rows}) == 4


def test_nesting_that_can_be_read_but_not_written_is_a_bad_row():
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    namer = RowKeyer(None, None, RowWarnings())
    bad, good = namer.rows(Chunk("x", [1, 2], [deep, {"id": 1}], [b"raw", b""]))
    assert (bad.error, bad.raw) == ("the JSON is nested too deep", b"raw")
    assert good.id == 1


def test_lines_that_move_keep_their_keys(rows_of):
    rows = [{"id": f"r{n % 40}", "a": n % 7, "b": n} for n in range(100)]
    rows += [{"a": n % 5, "b": n} for n in range(50)]
    keys = {(row.id, row.key) for row in rows_of(text_of(rows), fields=("a",))}
    assert len(keys) == len(rows)
    source = random.Random(5)
    for _ in range(5):
        source.shuffle(rows)
        assert {(row.id, row.key) for row in rows_of(text_of(rows), fields=("a",))} == keys


def random_keys(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)]


def test_holds_what_a_set_holds_while_it_grows():
    keys = CompactHashSet()
    known: set[int] = set()
    source = random.Random(7)
    pool = random_keys(10_000, 1)
    for _ in range(20_000):
        key = source.choice(pool)
        assert keys.add(key) == (key not in known)
        known.add(key)
    assert len(keys) == len(known)
    assert all(key in keys for key in known)
    assert not any(key in keys for key in random_keys(5_000, 2))


def test_notes_stay_those_of_the_first_through_all_splits():
    keys = CompactHashSet(note_size=7)
    numbers = random_keys(30_000, 3)
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        keys.add_all(part, [number.to_bytes(8, "big")[1:] for number in part])
    assert keys.add(numbers[0], b"another") is False
    assert all(keys.note(number) == number.to_bytes(8, "big")[1:] for number in numbers)
    assert keys.note(1) is None


def test_bytes_that_look_like_a_key_across_two_entries_are_no_key():
    keys = CompactHashSet()
    # All in bucket 0; the bytes of the third stand across the border of the first two.
    first, second = 0x01020304050607 << 8, 0x08090A0B0C0D0E << 8
    across = 0x0708090A0B0C0D << 8
    keys.add(first)
    keys.add(second)
    assert across not in keys
    assert keys.add(across)
    assert across in keys
    assert not keys.add(across)


def test_memory_is_about_ten_bytes_a_key():
    numbers = random_keys(65_000, 5)
    tracemalloc.start()
    try:
        keys = CompactHashSet()
        keys.add_all(numbers)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(keys) == len(numbers)
    assert held < 11 * len(numbers)


# The recipe of keys: journals hold them, so these values must never change.
def base_key(body: bytes) -> int:
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big")


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
    (row,) = rows_of(line, **settings)
    assert row.key == base_key(body.encode())


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
