"""Chat replies: what is read."""

from __future__ import annotations

import json

import pytest

from bagent.backends.openai.chat import (
    content_text,
    first_choice,
    normalize_finish_reason,
    read_reply,
    read_tool_calls,
    read_usage,
)
from bagent.types import Failure, Reply, ToolCall, Usage


def answer(message=None, finish="stop", **fields):
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c1", "model": "m1", "choices": [choice], **fields}


def read(body, content_type="application/json"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_reply(raw, content_type, {})


def test_a_reply_is_freed_of_its_wire_form():
    body = answer(
        {"role": "assistant", "content": "yes", "reasoning": "hm"},
        usage={
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
        metrics={"time_to_first_token_ms": 12.5},
    )
    assert read(body) == Reply(
        text="yes",
        finish_reason="stop",
        model="m1",
        reasoning="hm",
        usage=Usage(5, 2, 3, 1),
        ttft_ms=12.5,
        request_id="c1",
    )


@pytest.mark.parametrize(
    ("usage", "read_as"),
    [
        (None, Usage()),
        ({}, Usage()),
        ([], Usage()),
        ("5", Usage()),
        ({"prompt_tokens": 5, "completion_tokens": None}, Usage(prompt=5)),
        ({"prompt_tokens": 5.0, "completion_tokens": 3.9}, Usage(prompt=5, completion=3)),
        ({"prompt_tokens": True, "completion_tokens": "3"}, Usage()),
        ({"prompt_tokens": float("nan"), "completion_tokens": float("inf")}, Usage()),
        ({"prompt_tokens": -1, "completion_tokens": 0}, Usage(completion=0)),
        ({"prompt_tokens": 10**30, "completion_tokens": 1e300}, Usage()),
        ({"prompt_tokens_details": None, "completion_tokens_details": None}, Usage()),
        ({"prompt_tokens_details": {"cached_tokens": None}}, Usage()),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, Usage(cached=0)),
    ],
)
def test_counts_that_the_server_does_not_tell_stay_unknown(usage, read_as):
    assert read_usage(usage) == read_as


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        (None, None),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "thinking", "thinking": []}, {"type": "text", "text": "b"}], "b"),
        (["a", None, 1, {"text": None}, "b"], "ab"),
        ({"type": "text", "text": "a"}, "a"),
        ({"a": 1}, '{"a":1}'),
        ({"a": "\ud800"}, '{"a":"\\ud800"}'),
        (5, "5"),
    ],
)
def test_content_is_text_however_it_is_sent(content, text):
    assert content_text(content) == text
    assert read(answer({"content": content})).text == text


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": "", "reasoning_content": "b"}, "b"),
        ({"reasoning": {"x": 1}, "reasoning_content": "b"}, "b"),
        ({"reasoning": None, "reasoning_content": None}, None),
        ({"reasoning": ""}, None),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "Paris"},
                ]
            },
            "hm",
        ),
    ],
)
def test_reasoning_is_read_under_each_of_its_names(message, reasoning):
    assert read(answer({"content": "x", **message})).reasoning == reasoning


@pytest.mark.parametrize(
    ("refusal", "read_as"), [("no", "no"), ("", None), (None, None), (1, None)]
)
def test_a_refusal_is_kept(refusal, read_as):
    assert read(answer({"content": None, "refusal": refusal})).refusal == read_as


def call(arguments, **fields):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("calls", "read_as"),
    [
        (None, ()),
        ([], ()),
        ("x", ()),
        (5, ()),
        ([None, "x", {}, {"function": None}], ()),
        ([call('{"q": "a"}')], (ToolCall("c", "f", '{"q": "a"}'),)),
        ([call({"q": "a"})], (ToolCall("c", "f", '{"q":"a"}'),)),
        ([call('"{\\"q\\": 1}"')], (ToolCall("c", "f", '"{\\"q\\": 1}"'),)),
        ([call("")], (ToolCall("c", "f", "{}"),)),
        ([call(None)], (ToolCall("c", "f", "{}"),)),
        ([call({})], (ToolCall("c", "f", "{}"),)),
        ([call([1])], (ToolCall("c", "f", "[1]"),)),
        ([call('{"half"')], (ToolCall("c", "f", '{"half"'),)),
        ([call({"q": "\ud800"})], (ToolCall("c", "f", '{"q":"\\ud800"}'),)),
        (
            [{"function": {"name": "f"}}, {"id": "", "function": {"name": "g"}}],
            (ToolCall("call_0", "f", "{}"), ToolCall("call_1", "g", "{}")),
        ),
        ([{"name": "f", "arguments": {"a": 1}}], (ToolCall("call_0", "f", '{"a":1}'),)),
        ({"id": "c", "function": {"name": "f"}}, (ToolCall("c", "f", "{}"),)),
        ([{"id": 7, "function": {"name": None}}], (ToolCall("7", "", "{}"),)),
    ],
)
def test_tool_calls_are_read_in_every_form(calls, read_as):
    assert read_tool_calls(calls) == read_as
    assert read(answer({"content": None, "tool_calls": calls}, "tool_calls")).tool_calls == read_as


@pytest.mark.parametrize(
    ("word", "read_as"),
    [
        ("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"),
        ("content_filter", "content_filter"), ("end_turn", "stop"), ("stop_sequence", "stop"),
        ("eos_token", "stop"), ("STOP", "stop"), ("max_tokens", "length"), ("MAX_TOKENS", "length"),
        ("tool_use", "tool_calls"), ("abort", "abort"), ("error", "error"), ("banana", "banana"),
        ("Banana", "Banana"), ("", ""), (None, None), ({"type": "abort"}, '{"type":"abort"}'),
        (0, "0"),
    ],
)  # fmt: skip
def test_finish_reasons_take_openais_words_and_unknown_ones_stay(word, read_as):
    assert normalize_finish_reason(word) == read_as
    assert read(answer({"content": "a"}, word)).finish_reason == read_as


@pytest.mark.parametrize(
    "body",
    [
        {}, {"choices": []}, {"choices": None}, {"choices": {}}, {"choices": "x"},
        {"choices": [None]}, {"choices": ["x"]}, [], ["x"], [[]], "x", None, 1, True,
    ],
)  # fmt: skip
def test_json_without_choices_is_a_passing_failure(body):
    failure = read(body)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)
    assert "choices" in failure.message
    assert " behind HTTP 200: " in failure.message


@pytest.mark.parametrize(
    "raw", [b"", b"   ", b"<h1>gateway</h1>", b'{"choices": [', b"\x00\x01", b"\xff\xfe{\x00}\x00"]
)
def test_what_is_no_json_is_a_passing_failure_that_shows_its_beginning(raw):
    failure = read_reply(raw, "text/html; charset=utf-8", {})
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)
    assert "not JSON (text/html) behind HTTP 200: " in failure.message


def test_an_answer_that_is_not_utf8_is_a_passing_failure_not_a_mended_text():
    failure = read(json.dumps(answer({"content": "caf\xe9"}), ensure_ascii=False).encode("latin-1"))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)
    assert "not UTF-8" in failure.message


def test_deep_but_readable_arguments_never_raise():
    for depth in range(700, 1400, 35):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"choices":[{"message":{"content":%b},"finish_reason":"stop"}]}' % nested
        result = read(body)
        assert isinstance(result, Reply) or result.kind == "bad_response"


@pytest.mark.parametrize(
    ("body", "kind", "passing"),
    [
        ({"error": {"code": 502, "message": "upstream"}}, "overloaded", True),
        ({"error": {"code": 400, "message": "no"}}, "rejected", False),
        ({"error": {"code": 502, "message": "cut"}, "choices": [{}]}, "overloaded", True),
        ({"choices": [{"error": {"code": 502, "message": "cut"}, "finish_reason": "error"}]},
         "overloaded", True),
    ],
)  # fmt: skip
def test_an_error_is_looked_for_before_choices(body, kind, passing):
    failure = read(body)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing) == (kind, passing)


@pytest.mark.parametrize(
    "indexes", [[0, 0], [1, 2], [None, None], ["0", "1"], [0, 0, 1], [None, 1]]
)
def test_choices_without_a_clear_first_one_are_a_failure_not_a_guess(indexes):
    choices = [{"index": i, "message": {"content": str(i)}} for i in indexes]
    assert first_choice(choices) is None
    assert read({"choices": choices}).kind == "bad_response"
