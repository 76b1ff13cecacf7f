"""Tool calls that come as text."""

from __future__ import annotations

import pytest

from bagent.agents.text_calls import with_calls_of_text
from bagent.types import Reply, ToolCall

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
HERMES = f"<tool_call>\n{ADD}\n</tool_call>"


def calls_of(text: str) -> list[tuple[str, str]]:
    """The names and arguments of the calls in a reply of that text."""
    reply = with_calls_of_text(Reply(text, "stop"))
    assert (reply.text is None) == bool(reply.tool_calls)
    return [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(
    "text",
    [
        HERMES,
        f"<think>I should add.</think>\n{HERMES}\n",
        HERMES.removesuffix("\n</tool_call>"),
        f"[TOOL_CALLS][{ADD}]",
        f"[TOOL_CALLS] {ADD}",
        '<function=add>{"a": 1, "b": 2}</function>',
        HERMES.replace("arguments", "parameters"),
        HERMES.replace('{"a": 1, "b": 2}', r'"{\"a\":1,\"b\":2}"'),
    ],
    ids=[
        *("hermes", "after thinking", "not closed", "mistral", "mistral alone", "llama"),
        *("parameters", "text in text"),
    ],
)
def test_a_text_that_is_a_call_is_one(text: str) -> None:
    assert calls_of(text) == [("add", '{"a":1,"b":2}')]


def test_several_calls_in_one_text_keep_their_order_and_have_names_of_their_own() -> None:
    text = f'{HERMES}\n<tool_call>{{"name": "now"}}</tool_call>'
    reply = with_calls_of_text(Reply(text, "stop"))
    assert reply.tool_calls == (
        ToolCall("call_0", "add", '{"a":1,"b":2}'),
        ToolCall("call_1", "now", "{}"),
    )


def test_braces_and_marks_inside_the_arguments_end_nothing() -> None:
    inner = '{"name": "say", "arguments": {"words": "} </tool_call> {", "more": {"a": {}}}}'
    assert calls_of(f"<tool_call>{inner}</tool_call>") == [
        ("say", '{"words":"} </tool_call> {","more":{"a":{}}}')
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"The page says: {HERMES}",
        f"{HERMES}\nis what the page says.",
        ADD,
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"name":' + "[" * 100_000,
        "[TOOL_CALLS]",
        "<think>" + HERMES,
        "",
    ],
    ids=[
        *(
            "quoted",
            "words behind",
            "bare JSON",
            "no JSON",
            "half JSON",
            "no name",
            "empty",
            "deep",
        ),
        *("empty list", "inside thinking", "nothing"),
    ],
)
def test_any_other_text_is_an_answer(text: str) -> None:
    assert calls_of(text) == []


def test_calls_that_the_server_told_go_before_those_in_the_text() -> None:
    reply = Reply(HERMES, "tool_calls", tool_calls=(ToolCall("c", "now", "{}"),))
    assert with_calls_of_text(reply) is reply
