"""Chat replies: what is read."""

from __future__ import annotations

import json

import pytest

from bagent.backends.openai.chat import read_plain_reply, read_reply, reply_from_choice
from bagent.backends.openai.stream import StreamReader
from bagent.types import Reply, ToolCall, Usage


def answer(message=None, finish="stop", **fields):
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "c1", "model": "m1", "choices": [choice], **fields}


def read(body, content_type="application/json"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_reply(raw, content_type, {})


def test_a_reply_is_freed_of_its_wire_form():
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    message = {"role": "assistant", "content": "yes", "reasoning": "hm"}
    assert read(answer(message, usage=usage, metrics={"time_to_first_token_ms": 12.5})) == Reply(
        text="yes",
        finish_reason="stop",
        model="m1",
        reasoning="hm",
        usage=Usage(5, 2, 3, 1),
        ttft_ms=12.5,
        request_id="c1",
    )


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("message", "field", "expected"),
    [
        ({"content": None}, "text", None),
        ({"content": []}, "text", ""),
        ({"content": [THINKING, {"type": "text", "text": "b"}]}, "text", "b"),
        ({"content": ["a", None, 1, {"text": None}, "b"]}, "text", "ab"),
        ({"content": {"type": "text", "text": "a"}}, "text", "a"),
        ({"content": {"a": "\ud800"}}, "text", '{"a":"\\ud800"}'),
        ({"reasoning": "a", "reasoning_content": "b"}, "reasoning", "a"),
        ({"reasoning": "", "reasoning_content": "b"}, "reasoning", "b"),
        ({"reasoning": {"x": 1}, "reasoning_content": None}, "reasoning", None),
        ({"content": [THINKING, {"type": "text", "text": "Paris"}]}, "reasoning", "hm"),
        ({"content": None, "refusal": "no"}, "refusal", "no"),
        ({"content": None, "refusal": ""}, "refusal", None),
        ({"content": None, "refusal": 1}, "refusal", None),
    ],
)
def test_what_a_message_holds_is_read_however_it_is_sent(message, field, expected):
    assert getattr(read(answer({"content": "x", **message})), field) == expected


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        # OpenAI's words, and unknown ones as they are
        ({"finish": "end_turn"}, "finish_reason", "stop"),
        ({"finish": "STOP"}, "finish_reason", "stop"),
        ({"finish": "max_tokens"}, "finish_reason", "length"),
        ({"finish": "tool_use"}, "finish_reason", "tool_calls"),
        ({"finish": "abort"}, "finish_reason", "abort"),
        ({"finish": "Banana"}, "finish_reason", "Banana"),
        ({"finish": ""}, "finish_reason", ""),
        ({"finish": None}, "finish_reason", None),
        ({"finish": {"type": "abort"}}, "finish_reason", '{"type":"abort"}'),
        ({"finish": 0}, "finish_reason", "0"),
        # counts that the server does not tell stay unknown
        ({"usage": "5"}, "usage", Usage()),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": None}}, "usage", Usage(prompt=5)),
        ({"usage": {"prompt_tokens": 5.0, "completion_tokens": 3.9}}, "usage", Usage(5, None, 3)),
        ({"usage": {"prompt_tokens": True, "completion_tokens": "3"}}, "usage", Usage()),
        ({"usage": {"prompt_tokens": float("nan")}}, "usage", Usage()),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 0}}, "usage", Usage(completion=0)),
        ({"usage": {"prompt_tokens": 10**30, "completion_tokens": 1e300}}, "usage", Usage()),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, "usage", Usage(cached=0)),
    ],
)
def test_how_an_answer_ended_and_its_counts_are_read_in_every_form(fields, field, expected):
    assert getattr(read(answer({"content": "a"}, **fields)), field) == expected


def call(arguments, **fields):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("calls", "read_as"),
    [
        (None, ()),
        (5, ()),
        ([None, "x", {}, {"function": None}], ()),
        ([call('{"q": "a"}')], (ToolCall("c", "f", '{"q": "a"}'),)),
        ([call("")], (ToolCall("c", "f", "{}"),)),
        ([call({})], (ToolCall("c", "f", "{}"),)),
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
    assert read(answer({"content": None, "tool_calls": calls}, "tool_calls")).tool_calls == read_as


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{}", "no choices behind HTTP 200: "),
        (b'{"choices": "x"}', "choices"),
        (b'{"choices": [null]}', "choices"),
        (b'["x"]', "no choices behind HTTP 200: "),
        (b"null", "no choices behind HTTP 200: "),
        (b"", "not JSON (text/html) behind HTTP 200: "),
        (b"<h1>gateway</h1>", "not JSON (text/html) behind HTTP 200: <h1>"),
        (b'{"choices": [', "not JSON (text/html) behind HTTP 200: "),
        ('{"choices": [{"message": {"content": "café"}}]}'.encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_body_without_an_answer_is_a_passing_failure_that_shows_its_beginning(raw, message):
    failure = read_reply(raw, "text/html; charset=utf-8", {})
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)
    assert message in failure.message


def test_deep_but_readable_arguments_never_raise():
    for depth in range(700, 1400, 35):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"choices":[{"message":{"content":%b},"finish_reason":"stop"}]}' % nested
        result = read(body)
        assert isinstance(result, Reply) or result.kind == "bad_response"


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 502, "message": "cut"}, "choices": [{"message": {"content": "x"}}]},
        {"choices": [{"message": {"content": "x"}, "error": {"code": 502, "message": "cut"}}]},
    ],
)
def test_an_error_is_looked_for_before_choices(body):
    failure = read(body)
    assert (failure.kind, failure.passing) == ("overloaded", True)


@pytest.mark.parametrize("indexes", [[0, 0], [1, 2], [None, None], ["0", "1"]])
def test_choices_without_a_clear_first_one_are_a_failure_not_a_guess(indexes):
    choices = [{"index": i, "message": {"content": str(i)}} for i in indexes]
    assert read({"choices": choices}).kind == "bad_response"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
USUAL = {
    "plain": {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]},
    "vllm": {
        "id": "x",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"content": "hi", "tool_calls": [], "reasoning": None, "refusal": None},
                "finish_reason": "length",
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
            }
        ],
        "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 1}},
        "error": None,
    },
    "no content": {"choices": [{"message": {"content": None}}], "usage": None},
    "raw text": {"choices": [{"text": "hi", "finish_reason": "stop"}], "usage": USAGE},
}


@pytest.mark.parametrize("name", USUAL)
def test_the_quick_reader_of_usual_answers_reads_as_the_patient_one(name):
    body = USUAL[name]
    assert read_plain_reply(json.dumps(body).encode()) == reply_from_choice(
        body["choices"][0], body
    )


@pytest.mark.parametrize("form", ["delta", "text"])
def test_pieces_of_a_stream_come_to_the_same_whichever_way_they_are_read(form):
    def streamed(*, strange):
        ticks = iter(range(100))
        reader = StreamReader(0.0, lambda: float(next(ticks)))
        for piece in ("", "a", "b", "c"):
            choice = {"delta": {"content": piece}} if form == "delta" else {"text": piece}
            event = {"id": "i", "model": "m", "choices": [choice]}
            if strange:
                choice["index"] = None  # for the patient reader
            if piece == "c":
                event["usage"] = USAGE
            reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        reader.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        assert (reader.pieces, reader.deltas, reader.first_token) == (5, 3, 0.0)
        return reader.result()

    assert isinstance(streamed(strange=False), Reply)
    assert streamed(strange=False) == streamed(strange=True)
