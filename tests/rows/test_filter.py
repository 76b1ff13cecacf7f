import io
import json
import re

import pytest

from bagent.errors import InputError
from bagent.rows import RowsConfig, open_rows, read_again

ROWS = [
    {"id": 1, "n": 5, "t": "abc", "tags": ["a", "b"], "meta": {"year": 2001}},
    {"id": 2, "n": 2.5, "t": "", "yes": True, "meta": {"in": {"x": "ab"}}},
    {"id": 3, "n": None, "t": None, "meta": {"year": 1999}, "yes": False},
    {"id": 4, "n": 10**25, "t": "x\u0000y ünï", "meta": {"kind": "Y1"}},
    {"id": 5, "n": -1, "t": "it's", "meta": None, "late": 1},
]
TEXT = "\n".join(map(json.dumps, ROWS))


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("n IS NULL", [3]),
        ("length(t) > 2", [1, 4, 5]),
        ("t = 'it''s' OR id = 1 -- a remark", [1, 5]),
        ("meta.year > 2000", [1]),
        ("meta.year IS NULL and lower(meta.kind) like 'y%'", [4]),
        ("META.Kind = 'Y1' or Meta.in.x[1] = 'a'", [2, 4]),
        ("CAST(meta->>'year' AS INTEGER) < 2000", [3]),
        ("late = 1", [5]),
        ("late IS NULL", [1, 2, 3, 4]),
        ("N > 2 and ID < 2", [1]),
        ("id in (select i from range(2, 4) r(i))", [2, 3]),
        ("false", []),
        ("len(list_filter([1, 2, 3], lambda x: x > id)) > 1", [1]),
    ],
)
def test_rows_that_fulfil_the_condition_are_kept(rows_of, where, ids):
    rows = rows_of(TEXT, where=where)
    assert [row.id for row in rows] == ids
    assert [row.index for row in rows] == [id_ - 1 for id_ in ids]


def test_a_row_is_judged_alone_whatever_stands_around_it(rows_of):
    lines = [json.dumps({"id": n, "v": [n, str(n), n / 2, None][n % 4]}) for n in range(8, 24)]
    together = {row.id for row in rows_of("\n".join(lines), where="v >= 10")}
    alone = {row.id for line in lines[::2] for row in rows_of(line, where="v >= 10")}
    assert together == alone == {12, 16, 20, 22}


def test_rows_on_which_it_fails_are_left_out_with_one_warning(source_of):
    text = "".join(json.dumps({"id": n, "v": "x" if n % 3 else str(n)}) + "\n" for n in range(1500))
    source = source_of(text, where="CAST(v AS INTEGER) >= 9")
    rows = [row for batch in source.batches() for row in batch]
    assert [row.id for row in rows] == list(range(9, 1500, 3))
    (warning,) = source.warnings
    assert source.unselected == 1003
    assert "left out: 1,000; first in.jsonl:2: Conversion Error" in warning


def test_a_condition_that_selects_no_row_is_a_warning(source_of):
    source = source_of(TEXT, where="n > 1e30")
    assert list(source.batches()) == []
    assert source.warnings == ["`where` selects none of the 5 rows that were read"]


def test_an_unknown_name_is_refused_at_once_with_the_nearest(source_of):
    message = r"no field 'tagz' in the first rows \(did you mean tags\?\)"
    with pytest.raises(InputError, match=message):
        source_of(TEXT, where="json_array_length(tagz) > 0")
    with pytest.raises(InputError, match="there are id, n, t"):
        source_of(TEXT, where="zzzzzz = 1")


@pytest.mark.parametrize(
    ("rows", "where", "message"),
    [
        ('{"m":{"kind":"a"}}', "m.kynd = 'a'", "'m.kynd' in the first rows (did you mean m.k"),
        ('{"m":{"kind":"a","x":1}}', "m.z = 1", "'m.z' in the first rows (there are m.kind, m.x)"),
        ('{"m":"{}"}', "m.z.y = 1", "(m is no object; if it is JSON as text: m->>'z'->>'y')"),
        ('{"m.z":1}', "m.z = 1", "no field 'm' in the first rows (write \"m.z\": its name has a"),
        ('{"m":["a"]}', "m[0] = 'a'", "with a text (take the text out of it: tags->>0"),
        ('{"id":1,"ID":2}', "id = 1 and ID = 2", "differ in case only: ID, id"),
    ],
)
def test_a_field_that_no_object_has_is_refused(source_of, rows, where, message):
    with pytest.raises(InputError, match=re.escape(message)):
        source_of(rows, where=where)


@pytest.mark.parametrize("where", ["n > 1) UNION SELECT (1", "n > 1); SELECT (1"])
def test_brackets_that_close_too_early_are_refused(source_of, where):
    with pytest.raises(InputError, match="where"):
        source_of(TEXT, where=where)


def test_types_that_fit_no_row_are_refused_and_csv_is_explained(source_of):
    with pytest.raises(InputError, match=r"where: Binder Error.*CAST\(name AS DOUBLE\)"):
        source_of("id,n\n1,2\n", "in.csv", where="n > 1")


def test_files_in_a_subquery_are_found_from_the_base(rows_of, tmp_path):
    (tmp_path / "keep.csv").write_text("id\n2\n5\n")
    assert [row.id for row in rows_of(TEXT, where="id IN (SELECT id FROM 'keep.csv')")] == [2, 5]


def test_a_pipe_is_judged_by_its_first_row(tmp_path):
    def read(text, where):
        config = RowsConfig(("-",), tmp_path, where=where)
        source = open_rows(config, stdin=io.BytesIO(text.encode()))
        return [row.id for batch in source.batches() for row in batch]

    assert read(TEXT, "n > 2") == [1, 2, 4]
    with pytest.raises(InputError, match="no field 'zz'"):
        read(TEXT, "zz > 2")


def test_a_name_may_be_first_seen_in_a_later_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id":1}\n')
    (tmp_path / "b.jsonl").write_text('{"id":2,"x":1}\n{"id":3,"X":1}\n')
    config = RowsConfig(("*.jsonl",), tmp_path, where="x = 1")
    for batches in (open_rows(config).batches(), read_again(config)):
        assert [row.id for batch in batches for row in batch] == [2, 3]
