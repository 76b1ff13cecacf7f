"""Tool calls that come as text."""

from __future__ import annotations

import pytest

from bagent.agents.text_calls import with_calls_of_text
from bagent.types import Json, Reply, ToolCall

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
HERMES = f"<tool_call>\n{ADD}\n</tool_call>"


def calls_of(text: str, *definitions: Json) -> list[tuple[str, str]]:
    """The names and arguments of the calls in a reply of that text."""
    reply = with_calls_of_text(Reply(text, "stop"), definitions)
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
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
        '[TOOL_CALLS]add[CALL_ID]x12[ARGS]{"a": 1, "b": 2}',
        '[TOOL_CALLS]add{"a": 1, "b": 2}',
        '<function=add>{"a": 1, "b": 2}</function>',
        HERMES.replace("arguments", "parameters"),
        HERMES.replace('{"a": 1, "b": 2}', r'"{\"a\":1,\"b\":2}"'),
    ],
    ids=[
        *("hermes", "after thinking", "not closed", "mistral", "mistral alone"),
        *("mistral 11", "mistral 11 with ids", "mistral 13", "llama"),
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


def test_several_calls_that_say_their_names_first_keep_their_order() -> None:
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{} '
    assert calls_of(text) == [("add", '{"a":1}'), ("now", "{}")]
    assert calls_of(f"{text} is a call") == []


CODER = """<tool_call>
<function=find>
<parameter=ship>
1628
</parameter>
<parameter=year>
1628
</parameter>
<parameter=words>
a <b>
 c
</parameter>
</function>
</tool_call>"""


def test_a_call_that_names_each_argument_by_itself_is_read_by_the_schema_of_its_tool() -> None:
    texts = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schemas = {"ship": {"type": "string"}, "year": {"type": "integer"}, "words": texts}
    find = {"function": {"name": "find", "parameters": {"properties": schemas}}}
    wanted = ("find", '{"ship":"1628","year":1628,"words":"a <b>\\n c"}')
    assert calls_of(CODER, find) == [wanted]
    assert calls_of(f"{CODER}\n{CODER.removesuffix('</tool_call>')}", find) == [wanted, wanted]
    assert calls_of("<function=find>\n</function>", find) == [("find", "{}")]
    assert calls_of(CODER.partition("</function>")[0], find) == []
    assert calls_of(f"{CODER} he said", find) == []


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
