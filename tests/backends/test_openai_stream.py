"""Streamed answers put together from server-sent events."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.openai.stream import StreamReader, ToolCallAssembler
from bagent.types import Failure, Reply, ToolCall, Usage


def event(**fields):
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def delta(content=None, finish=None, index=0, **fields):
    inner = dict(fields) if content is None else {"content": content, **fields}
    choice = {"index": index, "delta": inner, "finish_reason": finish}
    return event(id="c1", model="m1", choices=[choice])


FINISH = delta(finish="stop")
USAGE = event(
    id="c1",
    model="m1",
    choices=[],
    usage={
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)
DONE = b"data: [DONE]\n\n"

RECORDED = b"".join(
    [
        b": keep-alive\n\n",
        delta("", role="assistant"),
        delta(reasoning_content="hmm "),
        delta(reasoning_content="née"),
        delta("Grüße, "),
        delta("\U0001f600 \\n \n"),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x": "ü"}'}}]),
        b"event: message\nid: 7\n",
        FINISH,
        USAGE,
        DONE,
    ]
)
WHOLE = Reply(
    text="Grüße, \U0001f600 \\n \n",
    finish_reason="stop",
    model="m1",
    reasoning="hmm née",
    tool_calls=(ToolCall("a", "f", '{"x": "ü"}'),),
    message={"reasoning_content": "hmm née"},
    usage=Usage(5, 4, 3, None),
    ttft_ms=1000.0,
    request_id="c1",
)


def read(*pieces):
    reader = StreamReader(100.0, lambda: 101.0)
    for piece in pieces:
        reader.feed(piece)
    return reader.result()


def test_bytes_may_come_in_two_pieces_cut_anywhere():
    for cut in range(len(RECORDED) + 1):
        assert read(RECORDED[:cut], RECORDED[cut:]) == WHOLE, cut


def test_a_stream_that_stops_anywhere_before_its_finish_reason_is_a_passing_failure():
    end = RECORDED.index(b'"finish_reason": "stop"') + len(b'"finish_reason": "stop"')
    for cut in range(end):
        failure = read(RECORDED[:cut])
        assert isinstance(failure, Failure), cut
        assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)


def test_the_time_to_the_first_token_does_not_count_empty_deltas():
    times = iter(range(101, 200))
    reader = StreamReader(100.0, lambda: float(next(times)))
    for piece in (b": ping\n\n", delta("", role="assistant"), delta(""), delta(reasoning="")):
        reader.feed(piece)
        assert reader.first_token is None
    reader.feed(delta("a"))
    reader.feed(delta("b") + FINISH)
    assert reader.first_token == 101.0
    assert reader.result().ttft_ms == 1000.0


def test_a_plain_json_body_called_an_event_stream_is_read_as_such():
    reply = read(b'{"choices": [{"message": {"content": "a"},\n "finish_reason": "stop"}]}')
    assert reply.text == "a"
    assert read(b'{"error": {"code": 400, "message": "no"}}\n').kind == "rejected"
    assert "<h1>no</h1>" in read(b"<h1>no</h1>\n").message


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_stop_that_follows_does_not_mend_a_cut(reason):
    for later in ("stop", None):
        reply = read(delta("a"), delta(finish=reason), delta("", finish=later))
        assert reply.finish_reason == reason
    assert read(delta("a", finish="stop"), delta(finish=reason)).finish_reason == reason


@pytest.mark.parametrize(
    "odd",
    [
        event(choices=[None, 1, "x", []]),
        delta(tool_calls=[None, 5, {}]),
        event(choices=[{"index": 0, "delta": {}, "logprobs": {"content": None}}]),
        event(choices=[], model=None, id=None),
        b"data: null\n\n",
        b"data\n\n",
    ],
)
def test_odd_events_do_no_harm(odd):
    reply = read(delta("a"), odd, FINISH)
    assert (reply.text, reply.tool_calls) == ("a", ())


def test_refusals_and_logprobs_are_joined():
    logs = [{"delta": {"content": c}, "logprobs": {"content": [{"token": c}]}} for c in "ab"]
    pieces = [event(choices=[one]) for one in logs]
    reply = read(*pieces, delta(refusal="no"), delta(refusal=" way"), FINISH)
    assert reply.logprobs == {"content": [{"token": "a"}, {"token": "b"}]}
    assert reply.refusal == "no way"


def test_a_very_long_event_in_small_pieces_costs_no_more_than_its_length():
    long = delta("x" * 8_000_000) + FINISH
    pieces = [long[i : i + 4096] for i in range(0, len(long), 4096)]
    assert len(read(*pieces).text) == 8_000_000


def choice(**fields):
    return event(choices=[{"finish_reason": "stop", **fields}])


FORMS = {
    "no blank after data": RECORDED.replace(b"data: ", b"data:"),
    "a tab after data": RECORDED.replace(b"data: ", b"data:\t"),
    "no empty line between events": RECORDED.replace(b"\n\n", b"\n"),
    "a byte-order mark": b"\xef\xbb\xbf" + RECORDED,
    "a proxy's comments end otherwise": RECORDED.replace(b"\n\n", b"\r\r: ping\n\n"),
    "no end of the last line": RECORDED.rstrip(b"\n"),
    "an error after the end mark": RECORDED + event(error={"message": "x"}),
    "other choices": delta("b", index=1) + delta(finish="length", index=2) + RECORDED,
    "a first chunk without model and id": event(id="", model="", choices=[]) + RECORDED,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_in_an_odd_form_reads_as_the_usual_one(form):
    assert read(FORMS[form]) == WHOLE


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (delta("a") + FINISH + event(error={"message": "late"}), "a"),
        (choice(delta={"content": "a"}, index=None), "a"),
        (choice(message={"content": "a"}, index=0), "a"),
        (choice(text="a", finish_reason=None) + choice(text="b"), "ab"),
        (choice(delta={"content": "X"}).replace(b"X", b"\\ud800"), "\ud800"),
        (b"data: [" + delta("a")[6:-2] + b"," + delta("b")[6:-2] + b"]\n\n" + FINISH, "ab"),
    ],
)  # fmt: skip
def test_a_stream_that_has_its_finish_reason_is_an_answer(stream, text):
    reply = read(stream)
    assert (reply.text, reply.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    ("rest", "kind", "words"),
    [
        (DONE, "bad_response", "finish reason"),
        (b"data: <html>\n\n" + delta("more") + FINISH + DONE, "bad_response",
         "not JSON in the stream: <html>"),
        (delta("X").replace(b"X", b"caf\xe9") + FINISH + DONE, "bad_response",
         "not UTF-8 in the stream: {"),
        (b'data: [{"error": {"message": "boom"}}]\n\n' + FINISH + DONE, "overloaded", "boom"),
        (event(error={"message": "boom", "code": 500}) + delta("b") + FINISH + DONE, "overloaded",
         "boom"),
        (choice(index=0, delta={}, finish_reason="error", error={"code": 502, "message": "gone"}),
         "overloaded", "gone"),
        (b"event: error\n" + event(error={"message": "bad", "code": 400}), "rejected", "bad"),
        (b"event: error\n" + event(message="gone") + DONE, "overloaded", "gone"),
    ],
)  # fmt: skip
def test_a_stream_that_broke_is_a_failure_with_its_text(rest, kind, words):
    failure = read(delta("half") + rest)
    assert (failure.kind, failure.passing) == (kind, kind != "rejected")
    assert failure.text == "half"
    assert words in failure.message


def entry(index=0, call_id=None, name=None, arguments=None):
    found = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {key: value for key, value in found.items() if value is not ...}


THREE = [("a", "f", '{"x":1}'), ("b", "g", "{}"), ("c", "f", "{}")]
UNNAMED = [("call_0", "f", '{"x":1}'), ("call_1", "g", "{}"), ("call_2", "g", "{}")]


def by_id(index):
    return [
        [entry(index, "a", "f", '{"x":')],
        [entry(index, None, None, "1}")],
        [entry(index, "b", "g", "{}")],
        [entry(index, "c", "f", "{}")],
    ]


def by_name(index):
    return [
        [entry(index, ..., "f", '{"x":1}'), entry(index, ..., "g", "{}")],
        [entry(index, ..., "g", "{}")],
    ]


def named(*names):
    return [[entry(0, "a" if not n else None, name)] for n, name in enumerate(names)]


JOINED = {
    "by index": (
        [[entry(0, "a", "f", '{"x":'), entry(1, "b", "g", '{"y":')],
         [entry(1, arguments="2}"), entry(0, arguments="1}")]],
        [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')],
    ),
    "by id under one index": (by_id(0), THREE),
    "by id without index": (by_id(None), THREE),
    "by name under one index": (by_name(0), UNNAMED),
    "by name without index": (by_name(...), UNNAMED),
    "empty repetitions at the end": (
        [[entry(0, "a", "f", '{"x":1}')], [entry(0, "", "", "")], [entry(0, None, None, None)],
         [entry(0, "a", "f", "")]],
        [("a", "f", '{"x":1}')],
    ),
    "arguments as an object or none": (
        [[entry(0, "a", "f", {"x": 1})], [entry(1, "b", "g", None)], [entry(2, "c", "f", {})]],
        THREE,
    ),
    "a name in pieces": (named("look", "_up"), [("a", "look_up", "{}")]),
    "a name that grows": (named("look", "look_up"), [("a", "look_up", "{}")]),
    "a name again": (named("look_up", "", None, "look_up"), [("a", "look_up", "{}")]),
    "whole arguments again": (
        [[entry(0, "a", "f", '{"x"')], [entry(0, None, None, ":1}")],
         [entry(0, "a", "f", '{"x":1}')]],
        [("a", "f", '{"x":1}')],
    ),
    "pieces that are alike": (
        [[entry(0, "a", "f", '{"x":')], [entry(0, None, None, '{"x":')], [entry(arguments="1}}")]],
        [("a", "f", '{"x":{"x":1}}')],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", JOINED)
def test_pieces_are_joined_to_the_calls_they_belong_to(case):
    chunks, calls = JOINED[case]
    joiner = ToolCallAssembler()
    for chunk in chunks:
        joiner.add(chunk)
    assert [(call.id, call.name, call.arguments) for call in joiner.result()] == calls


def test_a_call_is_told_at_the_piece_that_ends_its_arguments():
    told = []
    joiner = ToolCallAssembler(told.append)
    joiner.add([entry(0, "a", "f", '{"x":{"y":1}')])
    assert told == []
    joiner.add([entry(0, arguments="}")])
    assert [(c.id, c.arguments) for c in told] == [("a", '{"x":{"y":1}}')]
    joiner.add([entry(0, "", "", "")])
    joiner.add([entry(0, "b", "g", "{}")])
    joiner.report_remaining()
    assert [c.id for c in told] == ["a", "b"]


def piece_of(delta, finish=None):
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@pytest.mark.parametrize(("word", "count"), [("tool_calls", 1), ("stop", 1), ("length", 0)])
def test_a_call_without_arguments_is_told_where_the_answer_ends_well(word, count):
    told = []
    reader = StreamReader(0.0, lambda: 1.0, told.append)
    reader.feed(piece_of({"tool_calls": [entry(0, "a", "now")]}))
    assert told == []
    reader.feed(piece_of({}, word))
    assert len(told) == count
    reply = reader.result()
    assert isinstance(reply, Reply) and reply.tool_calls[0].arguments == "{}"


def test_a_call_in_the_older_form_is_told_and_joined_too():
    told = []
    reader = StreamReader(0.0, lambda: 1.0, told.append)
    reader.feed(piece_of({"role": "assistant", "content": None, "function_call": {"name": "look"}}))
    reader.feed(piece_of({"function_call": {"arguments": '{"q":'}}))
    reader.feed(piece_of({"function_call": {"arguments": '"a"}'}, "tool_calls": None}))
    assert [(one.name, one.arguments) for one in told] == [("look", '{"q":"a"}')]
    reader.feed(piece_of({"function_call": None}, "function_call"))
    reply = reader.result()
    assert isinstance(reply, Reply) and reply.finish_reason == "tool_calls"
    assert reply.tool_calls == tuple(told)
