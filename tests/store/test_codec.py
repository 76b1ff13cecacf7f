import json

import msgspec
import pytest

from bagent.store.journal.codec import (
    code_of,
    decode_brief,
    decode_outcome,
    encode_outcome,
    encode_record,
    kind_of,
    status_of,
)
from bagent.types import ToolCall, Turn, Usage


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":NaN,"b":-Infinity}', {"a": "NaN", "b": "-Infinity"}),
        (b'{\n "a": 1,\r\n "b": [2]\n}', {"a": 1, "b": [2]}),
        (b'{"a":"x\\ud800y"}', {"a": "x\\ud800y"}),
        (b'{"a":"\xff"}', {"a": "�"}),
        (b"[" * 5000 + b"]" * 5000, "[" * 5000 + "]" * 5000),
    ],
)
def test_whatever_the_output_is_the_line_is_one_line_of_json(outcome, raw, value):
    line = encode_outcome(outcome(output=msgspec.Raw(raw)))
    assert line.count(b"\n") == 1
    assert json.loads(line.decode())["output"] == value
    assert decode_brief(line).status == "ok"


def test_nan_is_text_where_json_is_free_and_unknown_where_a_number_is_due(outcome):
    line = encode_outcome(outcome(id=float("nan"), logprobs=[float("-inf")], cost_usd=float("nan")))
    read = decode_outcome(line)
    assert (read.id, read.logprobs, read.cost_usd) == ("NaN", ["-Infinity"], None)


def test_a_turn_with_half_a_character_is_still_one_line():
    message = {"role": "assistant", "content": "\ud83d"}
    call = ToolCall("c", "add", '"\ud83d"')
    turn = Turn("k", 0, "main", 0, 1, [message], begun=[call], usage=Usage(prompt=3))
    read = msgspec.json.decode(encode_record(turn), type=Turn)
    assert read.messages[0]["content"] == "\\ud83d"
    assert read.begun == [ToolCall("c", "add", '"\\ud83d"')]
    assert read.usage == Usage(prompt=3)


def test_codes_name_status_and_kind():
    for status, kind in (("ok", None), ("failed", "timeout"), ("truncated", "truncated")):
        code = code_of(status, kind)
        assert (status_of(code), kind_of(code)) == (status, kind)
    assert kind_of(code_of("failed", "kind of a later version")) == "other"
    assert code_of("ok", None) == 0
