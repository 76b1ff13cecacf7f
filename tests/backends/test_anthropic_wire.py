"""Anthropic's Messages API: bodies, caches, usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bagent.backends.anthropic import (
    MAX_TOKENS,
    AnthropicStream,
    AnthropicWriter,
    read_message,
    read_usage,
    tool_choice,
    tool_definition,
)
from bagent.backends.prefix_cache import Marks, SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import Request
from bagent.types import Failure, Message, Usage
from support.provider_calls import WEATHER, call
from support.provider_protocols import AnthropicWire, ModelAnswer, sse

LONG = "rule " * 1000
MARK = {"type": "ephemeral"}


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def body(*calls: Request) -> dict[str, Any]:
    """The body of the last call, after those before it went out."""
    writer = AnthropicWriter("m-1", Form(), SharedPrefix())
    *_, last = [writer.body(one, stream=False) for one in calls]
    found: dict[str, Any] = json.loads(last)
    return found


def test_max_tokens_is_always_sent() -> None:
    assert body(call())["max_tokens"] == MAX_TOKENS
    assert body(call(max_tokens=5))["max_tokens"] == 5
    assert body(call(extra={"max_tokens": 7}, max_tokens=5))["max_tokens"] == 7


def test_sampling_has_anthropics_names_and_what_is_not_set_is_not_sent() -> None:
    found = body(call(sampling={"temperature": 0, "stop": ("a", "b"), "seed": 1, "top_k": 5}))
    assert found["stop_sequences"] == ["a", "b"]
    assert (found["temperature"], found["top_k"]) == (0, 5)
    assert not {"seed", "top_p", "stream", "system", "tools", "output_config"} & found.keys()
    assert body(call(sampling={"stop": "x"}))["stop_sequences"] == ["x"]


def test_an_unknown_parameter_is_never_dropped_in_silence() -> None:
    with pytest.raises(ValueError, match="min_p"):
        body(call(sampling={"min_p": 0.1}))


@pytest.mark.parametrize(
    ("effort", "fields"),
    [
        ("minimal", {"output_config": {"effort": "low"}}),
        ("none", {"thinking": {"type": "disabled"}}),
    ],
)
def test_effort_is_told_in_anthropics_words(effort: str, fields: dict[str, Any]) -> None:
    found = body(call(sampling={"reasoning_effort": effort}))
    assert {name: found[name] for name in fields} == fields


def test_tools_and_their_choice_are_translated() -> None:
    told = tool_definition(WEATHER)
    assert told["input_schema"]["properties"] == {"town": {"type": "string"}}
    assert told["description"] == "The weather of a town."
    own = {"type": "web_search_20250305", "name": "web_search"}
    assert tool_definition(own) == own
    assert tool_choice("required") == {"type": "any"}
    assert tool_choice({"type": "function", "function": {"name": "f"}}) == {
        "type": "tool",
        "name": "f",
    }


def test_a_long_system_text_is_marked_for_the_cache_and_a_short_one_is_not() -> None:
    found = body(call(said("system", LONG), said("user", "x")))
    assert found["system"] == [{"type": "text", "text": LONG, "cache_control": MARK}]
    assert "cache_control" not in json.dumps(body(call(said("system", "s"), said("user", "x"))))


def test_a_shared_user_prefix_is_marked_and_the_text_stays_whole() -> None:
    first, second = (call(said("user", f"{LONG}gene {name}")) for name in ("TP53", "KRAS"))
    assert "cache_control" not in json.dumps(body(first))
    content = body(first, second)["messages"][0]["content"]
    assert [block["text"] for block in content] == [LONG + "gene ", "KRAS"]
    assert [block.get("cache_control") for block in content] == [MARK, None]


def test_system_texts_that_differ_by_row_are_not_written_to_a_cache() -> None:
    shared = SharedPrefix()
    shared.look(0, LONG, "row")
    assert shared.look(0, LONG + "other", "row") == Marks()
    assert shared.look(0, LONG, "row") == Marks()


def test_equal_user_texts_leave_something_behind_the_mark() -> None:
    shared = SharedPrefix()
    shared.look(0, "", LONG)
    assert 0 < shared.look(0, "", LONG).user < len(LONG)


def test_tools_carry_the_mark_and_so_does_the_end_of_a_conversation_with_them() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": LONG}}
    assert body(call(tools=(WEATHER, tool)))["tools"][-1]["cache_control"] == MARK
    messages = [said("system", LONG), said("user", "x"), said("assistant", "y"), said("user", "z")]
    found = body(call(*messages, tools=(WEATHER,)))
    assert found["messages"][-1]["content"][-1]["cache_control"] == MARK
    assert "cache_control" not in json.dumps(found["messages"][:-1])


def test_an_answer_begun_for_the_model_ends_without_blanks() -> None:
    found = body(call(said("user", "x"), said("assistant", "It is \n")))
    assert found["messages"][-1]["content"] == [{"type": "text", "text": "It is"}]


def test_a_prompt_of_system_text_only_is_said_to_lack_a_user_message() -> None:
    with pytest.raises(ValueError, match="user message"):
        body(call(said("system", "x")))


def test_a_prompt_is_what_was_read_written_and_neither() -> None:
    told = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 100,
        "cache_read_input_tokens": 2000,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 3},
    }
    assert read_usage(told) == Usage(2105, 2000, 7, 3, 100)
    assert read_usage({"input_tokens": 5, "output_tokens": 7}) == Usage(5, None, 7)
    assert read_usage(None) == Usage()


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"<h1>gateway</h1>", "bad_response"),
        (b'{"content":null}', "bad_response"),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"Busy"}}', "overloaded"),
    ],
)
def test_no_message_behind_200_is_a_passing_failure(raw: bytes, kind: str) -> None:
    found = read_message(raw, "text/html", {})
    assert (found.kind, found.passing) == (kind, True)


def reader(events: Sequence[bytes]) -> AnthropicStream:
    ticks = iter(range(1, 10_000))
    found = AnthropicStream(0.0, lambda: float(next(ticks)))
    for event in events:
        found.feed(event)
    return found


@pytest.mark.parametrize(
    "events",
    [
        [*AnthropicWire().events(ModelAnswer())[:3], b"data: {bad gateway\n\n"],
        [*AnthropicWire().events(ModelAnswer())[:3], b'data: {"bad gateway": "\xff"}\n\n'],
        [b"<h1>bad gateway</h1>\n"],
    ],
    ids=["no JSON", "no UTF-8", "a page"],
)
def test_garbage_in_place_of_events_is_a_failure_that_shows_it(events: list[bytes]) -> None:
    found = reader(events).result()
    assert isinstance(found, Failure)
    assert "bad gateway" in found.message


def block(index: int, start: object, *deltas: object) -> list[bytes]:
    """Return the events of one block."""
    events = [{"type": "content_block_start", "index": index, "content_block": start}]
    events += [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
    return [
        sse(event, event["type"])
        for event in [*events, {"type": "content_block_stop", "index": index}]
    ]


def test_blocks_of_the_server_come_back_whole_and_name_the_model_that_answered() -> None:
    pieces = [{"type": "input_json_delta", "partial_json": part} for part in ('{"q":', '"x"}')]
    summary = {"type": "compaction_delta", "content": "so far", "encrypted_content": "e2"}
    handover = {"type": "fallback", "from": {"model": "first"}, "to": {"model": "second"}}
    whole = AnthropicWire().events(ModelAnswer(text="yes"))
    events = [
        whole[0],
        *block(
            0, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, *pieces
        ),
        *block(1, {"type": "compaction", "content": None}, summary),
        *block(2, handover),
        *block(3, {"type": "text", "text": ""}, {"type": "text_delta", "text": "yes"}),
        *whole[-2:],
    ]
    reply = reader(events).result()
    assert (reply.text, reply.model, reply.tool_calls) == ("yes", "second", ())
    assert reply.blocks is not None
    assert reply.blocks[0]["input"] == {"q": "x"}
    assert (reply.blocks[1]["content"], reply.blocks[1]["encrypted_content"]) == ("so far", "e2")
