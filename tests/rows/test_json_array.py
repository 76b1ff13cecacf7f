import json
import tracemalloc

import pytest

from bagent.errors import InputError
from bagent.rows.formats.json import CUT_OFF, ElementSplitter


def test_elements_have_the_lines_where_they_begin(rows_of):
    rows = rows_of('\n[\n  {"id":1},\n\n  {"id":\n2}, {"id":3}\n]\n', "in.json")
    assert [(row.id, row.line) for row in rows] == [(1, 3), (2, 5), (3, 6)]


def test_json_lines_in_a_json_file_are_recognised(rows_of):
    text = '\n{"id":1}\nbroken\n\n{"id":2}\n'
    rows = rows_of(text, "in.json")
    assert [(row.line, row.error is None) for row in rows] == [(2, True), (3, False), (5, True)]


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


def test_empty_arrays_and_files_have_no_rows(rows_of):
    for text in ("", "  \n", "[]", "[ ]\n", "[{},]"):
        assert [row.data for row in rows_of(text, "in.json")] == [{}] * text.count("{")


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


def test_an_element_without_end_is_refused_before_it_fills_the_memory():
    elements = ElementSplitter("x.json", array=True, longest=100)
    elements.feed(b"[{},\n\n")
    with pytest.raises(InputError, match=r"x.json:1: one row is longer"):
        for _ in range(20):
            elements.feed(b'{"a":[')
