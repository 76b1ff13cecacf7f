"""Tool calls told while an answer is still being streamed, by every backend that streams."""

from __future__ import annotations

import json

import msgspec
import pytest

from bagent.backends.call_joiner import ToolCallJoiner
from bagent.backends.chat_stream import StreamReader
from bagent.types import Reply
from support.provider_calls import PROVIDERS, WEATHER, ask, call
from support.provider_protocols import ModelAnswer

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


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.kind)
def test_nothing_is_told_of_an_answer_that_comes_as_a_whole(provider):
    reply, told = watched(provider, stream=False)
    assert told == [] and len(reply.tool_calls) == 2


def entry(index=0, call_id=None, name=None, arguments=None):
    return {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}


def test_a_call_is_told_at_the_piece_that_ends_its_arguments():
    told = []
    joiner = ToolCallJoiner(told.append)
    joiner.add([entry(0, "a", "f", '{"x":{"y":1}')])
    assert told == []
    joiner.add([entry(0, arguments="}")])
    assert [(c.id, c.arguments) for c in told] == [("a", '{"x":{"y":1}}')]
    joiner.add([entry(0, "", "", "")])
    joiner.add([entry(0, "b", "g", "{}")])
    joiner.tell_rest()
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
