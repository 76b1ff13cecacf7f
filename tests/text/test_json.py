"""JSON text in and out."""

from __future__ import annotations

import pytest

from bagent.text.json import decode_json, encode_json


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'"\\ud800"', "\ud800"),
        (b'"a\xff"', "a�"),
        (b"1e400", float("inf")),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        ('\ufeff["ü"]', ["ü"]),
    ],
)
def test_what_servers_send_as_json_is_read(raw, value):
    assert decode_json(raw) == value


def test_bytes_that_are_not_utf8_are_an_error_where_asked():
    assert decode_json('"é\\ud800"'.encode(), strict=True) == "é\ud800"
    with pytest.raises(UnicodeDecodeError):
        decode_json(b'"a\xff"', strict=True)


def test_nan_is_read_as_a_number_that_equals_nothing():
    assert decode_json(b"[NaN]")[0] != decode_json(b"[NaN]")[0]


@pytest.mark.parametrize("raw", [b"", b"<html>", b"{'a': 1}", b"[1,]"])
def test_other_text_is_a_value_error(raw):
    with pytest.raises(ValueError, match=r".+"):
        decode_json(raw)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_beyond_the_stack_is_a_value_error(opening):
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_json(opening * 100_000)


def test_encoding_is_compact_and_keeps_other_text_readable():
    assert encode_json({"a": ["ü", 1.5, None, True]}) == '{"a":["ü",1.5,null,true]}'
    assert encode_json({"a": "x\ud800"}) == '{"a":"x\\ud800"}'


def test_encoding_beyond_the_stack_is_a_value_error():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        encode_json(deep)
    while deep:  # taken apart by hand: dropping it whole would overflow the stack too
        deep = deep[0]
