import json
import tracemalloc

import pytest

from bagent.errors import InputError
from bagent.rows import is_batch_row
from bagent.rows.formats.json import CUT_OFF, ElementSplitter, LineSplitter, Unreadable, decode_line


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


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[1]", "not a JSON object but an array"),
        (b'{"a":1 "b":2}', "malformed JSON: Expecting ',' delimiter (column 8)"),
        (b'{"a":1} {"b":2}', "malformed JSON: Extra data (column 9)"),
        (b'{"a":1}\r{"a":2}', "malformed JSON: lines end in CR alone (write them with LF)"),
        (b'{"a":"\xff"}', "not UTF-8: byte 0xff (column 7)"),
        (b'{"a":"x\x00y"}', "malformed JSON: Invalid control character at (column 8)"),
        (b'{"a":' * 100_000, "the JSON is nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_bad_line_says_what_is_wrong(raw, words):
    item = decode_line(raw)
    assert isinstance(item, Unreadable)
    assert words in item.error
    assert item.raw == raw


def test_nan_and_infinities_become_text():
    raw = b'{"a":[NaN,Infinity,-Infinity],"b":1e400,"c":-1e400,"d":1.5}'
    infinities = {"b": "Infinity", "c": "-Infinity"}
    assert decode_line(raw) == {"a": ["NaN", "Infinity", "-Infinity"], **infinities, "d": 1.5}


def test_batch_rows_are_recognised():
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    assert is_batch_row(row)
    for name in row:
        assert not is_batch_row({key: value for key, value in row.items() if key != name})
    assert not is_batch_row({**row, "body": "text"})
    assert not is_batch_row({**row, "custom_id": 1})


def test_lone_surrogates_stay_in_values_and_become_visible_in_names():
    raw = rb'{"a":"x\ud800y","\udc00":["\uDFFF",{"b":"\ud83d\ude00"}]}'
    data = decode_line(raw)
    assert data == {"a": "x\ud800y", "\\udc00": ["\udfff", {"b": "\U0001f600"}]}
