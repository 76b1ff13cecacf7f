"""Streamed tool calls joined from their pieces."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.openai.stream import StreamReader, ToolCallAssembler
from bagent.types import Reply
from support.provider_calls import PROVIDERS, WEATHER, ask, call
from support.provider_protocols import ModelAnswer


def entry(index=0, call_id=None, name=None, arguments=None):
    found = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {key: value for key, value in found.items() if value is not ...}


def joined(*chunks):
    joiner = ToolCallAssembler()
    for chunk in chunks:
        joiner.add(chunk)
    return [(call.id, call.name, call.arguments) for call in joiner.result()]


def test_calls_are_told_apart_by_index():
    assert joined(
        [entry(0, "a", "f", '{"x":'), entry(1, "b", "g", '{"y":')],
        [entry(1, arguments="2}"), entry(0, arguments="1}")],
    ) == [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]


def test_an_empty_repetition_at_the_end_overwrites_nothing():
    assert joined(
        [entry(0, "a", "f", '{"x":1}')],
        [entry(0, "", "", "")],
        [entry(0, None, None, None)],
        [entry(0, "a", "f", "")],
        [entry(0, "", "f", "")],
    ) == [("a", "f", '{"x":1}')]


@pytest.mark.parametrize("index", [0, None, ...])
def test_calls_without_useful_index_are_told_apart_by_id(index):
    assert joined(
        [entry(index, "a", "f", '{"x":')],
        [entry(index, None, None, "1}")],
        [entry(index, "b", "g", "{}")],
        [entry(index, "c", "f", "{}")],
    ) == [("a", "f", '{"x":1}'), ("b", "g", "{}"), ("c", "f", "{}")]


@pytest.mark.parametrize("index", [0, None, ...])
def test_calls_without_index_and_id_are_told_apart_by_name(index):
    assert joined(
        [entry(index, ..., "f", '{"x":1}'), entry(index, ..., "g", "{}")],
        [entry(index, ..., "g", "{}")],
    ) == [("call_0", "f", '{"x":1}'), ("call_1", "g", "{}"), ("call_2", "g", "{}")]


def test_arguments_may_be_an_object_or_missing():
    assert joined(
        [entry(0, "a", "f", {"x": 1})], [entry(1, "b", "g", None)], [entry(2, "c", "h", {})]
    ) == [("a", "f", '{"x":1}'), ("b", "g", "{}"), ("c", "h", "{}")]


@pytest.mark.parametrize(
    ("names", "joined_name"),
    [
        (("look", "_up"), "look_up"),
        (("look", "look_up"), "look_up"),
        (("look_up", "", None, "look_up"), "look_up"),
    ],
    ids=["in pieces", "growing", "repeated"],
)
def test_a_name_may_come_in_pieces_or_again(names, joined_name):
    chunks = [[entry(0, "a" if not n else None, name)] for n, name in enumerate(names)]
    assert joined(*chunks, [entry(0, None, None, "{}")]) == [("a", joined_name, "{}")]


def test_arguments_that_come_once_more_as_a_whole_are_those_there_are():
    assert joined(
        [entry(0, "a", "f", '{"x"')], [entry(0, None, None, ":1}")], [entry(0, "a", "f", '{"x":1}')]
    ) == [("a", "f", '{"x":1}')]
    assert joined(
        [entry(0, "a", "f", '{"x":')], [entry(0, None, None, '{"x":')], [entry(arguments="1}}")]
    ) == [("a", "f", '{"x":{"x":1}}')]


CALLS = (("call_a", "weather", {"town": "Bonn"}), ("call_b", "weather", {"town": "Köln"}))


def watched(provider, *, stream=True):
    """The final reply, and the calls that each watch was told, for one answer with two calls."""
    told = []

    def watch():
        told.append([])
        return told[-1].append

    request = msgspec.structs.replace(call(stream=stream, tools=(WEATHER,)), watch=watch)
    talk = ask(provider, ModelAnswer(text=None, calls=CALLS, stop="tool_calls"), calls=[request])
    return talk.reply, told


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.kind)
def test_every_backend_tells_each_call_once_with_its_whole_arguments(provider):
    reply, told = watched(provider)
    assert [[(c.id, c.name, json.loads(c.arguments)) for c in one] for one in told] == [list(CALLS)]
    assert list(reply.tool_calls) == told[0]


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


def chunk(delta, finish=None):
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@pytest.mark.parametrize(("word", "count"), [("tool_calls", 1), ("stop", 1), ("length", 0)])
def test_a_call_without_arguments_is_told_where_the_answer_ends_well(word, count):
    told = []
    reader = StreamReader(0.0, lambda: 1.0, told.append)
    reader.feed(chunk({"tool_calls": [entry(0, "a", "now")]}))
    assert told == []
    reader.feed(chunk({}, word))
    assert len(told) == count
    reply = reader.result()
    assert isinstance(reply, Reply) and reply.tool_calls[0].arguments == "{}"


def test_a_call_in_the_older_form_is_told_and_joined_too():
    told = []
    reader = StreamReader(0.0, lambda: 1.0, told.append)
    reader.feed(chunk({"role": "assistant", "content": None, "function_call": {"name": "look"}}))
    reader.feed(chunk({"function_call": {"arguments": '{"q":'}}))
    reader.feed(chunk({"function_call": {"arguments": '"a"}'}, "tool_calls": None}))
    assert [(one.name, one.arguments) for one in told] == [("look", '{"q":"a"}')]
    reader.feed(chunk({"function_call": None}, "function_call"))
    reply = reader.result()
    assert isinstance(reply, Reply) and reply.finish_reason == "tool_calls"
    assert reply.tool_calls == tuple(told)
