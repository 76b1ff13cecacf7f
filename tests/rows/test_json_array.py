import json
import tracemalloc

import pytest

from bagent.errors import InputError
from bagent.rows.formats.json import CUT_OFF, ElementSplitter, LineSplitter


def test_elements_have_the_lines_where_they_begin(rows_of):
    rows = rows_of('\n[\n  {"id":1},\n\n  {"id":\n2}, {"id":3}\n]\n', "in.json")
    assert [(row.id, row.line) for row in rows] == [(1, 3), (2, 5), (3, 6)]


def test_a_broken_element_leaves_the_others(rows_of):
    rows = rows_of('[{"id":1}, {"id":2,}, {"id":[3}, 4, {"id":5},, {"id":6}]', "in.json")
    assert [row.error is None for row in rows] == [True, False, False, False, True, False, True]
    assert rows[3].error == "not a JSON object but a number"
    assert rows[1].raw == b'{"id":2,}'


def test_an_array_that_is_cut_off_is_not_taken_for_whole(rows_of):
    for text in ('[{"id":1}, {"id":2}', '[{"id":1}, {"id":', '[{"id":1},\n', "["):
        rows = rows_of(text, "in.json")
        assert rows[-1].error == CUT_OFF
        assert [row.id for row in rows[:-1]] == ([1] if len(text) > 1 else [])


def test_memory_follows_the_element_not_the_file(source_of):
    element = json.dumps({"t": "x" * 1000})
    source = source_of("[" + ",".join([element] * 4000) + "]", "in.json")
    tracemalloc.start()
    try:
        assert sum(map(len, source.batches())) == 4000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000


@pytest.mark.parametrize(
    ("splitter", "start", "part"),
    [
        (ElementSplitter("x.json", array=True, longest=100), b"\n\n[{},", b'{"a":['),
        (LineSplitter("x.json", longest=100), b"\n\n", b"123456789"),
    ],
)
def test_a_row_without_end_is_refused_before_it_fills_the_memory(splitter, start, part):
    splitter.feed(start)
    with pytest.raises(InputError, match=r"x\.json:3: one row is longer"):
        for _ in range(20):
            splitter.feed(part)
