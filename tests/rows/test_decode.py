import pytest

from bagent.rows import is_batch_row
from bagent.rows.formats.json import Unreadable, decode_line


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
