import json
import random

from bagent.rows.formats.json import Chunk, decode_lines
from bagent.rows.row_keys import RowKeyer
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
