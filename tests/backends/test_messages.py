"""Messages in OpenAI form as alternating turns."""

from __future__ import annotations

import itertools
import re

import pytest

from bagent.backends.messages import TextPart, ToolResultPart, ToolUse, read_conversation
from bagent.types import Message


def user(text: object) -> Message:
    return {"role": "user", "content": text}


def test_blank_texts_are_left_out_and_blank_turns_with_them() -> None:
    talk = read_conversation(
        [user(" "), {"role": "assistant", "content": None}, user("x"), user("")]
    )
    assert [turn.parts for turn in talk.turns] == [[TextPart("x")]]


def test_results_of_one_turn_stand_in_one_user_turn() -> None:
    functions = [{"name": "f", "arguments": '{"n":1}'}, {"name": "g", "arguments": ""}]
    calls = [{"id": key, "function": one} for key, one in zip("ab", functions, strict=True)]
    talk = read_conversation(
        [
            user("x"),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "no", "is_error": True},
            user("go on"),
        ]
    )
    assert talk.turns[1].parts == [ToolUse("a", "f", {"n": 1}), ToolUse("b", "g", {})]
    assert talk.turns[2].parts == [
        ToolResultPart("a", (TextPart("1"),)),
        ToolResultPart("b", (TextPart("no"),), failed=True),
        TextPart("go on"),
    ]


@pytest.mark.parametrize("arguments", ["{broken", "[1]"])
def test_arguments_that_are_no_object_stay_visible(arguments: str) -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": arguments}}]
    talk = read_conversation([user("x"), {"role": "assistant", "tool_calls": calls}])
    (asked,) = talk.turns[1].parts
    assert isinstance(asked, ToolUse)
    assert list(asked.arguments) == ["arguments"]


@pytest.mark.parametrize(
    "message", [{"role": "narrator", "content": "x"}, user([{"type": "input_audio"}])]
)
def test_what_cannot_be_told_is_said(message: Message) -> None:
    with pytest.raises(ValueError, match=r"narrator|input_audio"):
        read_conversation([message])


def told(*calls: tuple[str, str], text: str = "") -> Message:
    """A turn of the assistant with calls: their ids and names."""
    functions = [{"id": key, "function": {"name": name}} for key, name in calls]
    return {"role": "assistant", "content": text, "tool_calls": functions}


def result(key: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": key, "content": text}


def pairs(messages: list[Message]) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """For each turn with calls their ids, and the results of the turn after it."""
    turns = read_conversation(messages).turns
    found = []
    for turn, after in itertools.pairwise(turns):
        ids = [part.id for part in turn.parts if isinstance(part, ToolUse)]
        texts = [
            (part.id, "".join(text.text for text in part.parts if isinstance(text, TextPart)))
            for part in after.parts
            if isinstance(part, ToolResultPart)
        ]
        if ids or texts:
            found.append((ids, texts))
    return found


@pytest.mark.parametrize("key", ["functions.f:0", "x" * 90, ""])
def test_ids_that_a_provider_would_not_take_are_made_over(key: str) -> None:
    ((ids, results),) = pairs([user("x"), told((key, "f")), result(key, "1")])
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", ids[0])
    assert results == [(ids[0], "1")]


TURNS = [
    [told(("call_0", "f"), ("call_1", "g")),
     result("call_1", f"g{turn}"), result("call_0", f"f{turn}")]
    for turn in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([*TURNS[0], *TURNS[1]], [
            (["call_0", "call_1"], [("call_1", "g1"), ("call_0", "f1")]),
            (["call_0_2", "call_1_2"], [("call_1_2", "g2"), ("call_0_2", "f2")]),
        ]),
        ([told(("a", "f"), ("a", "f")), result("a", "1"), result("a", "2")],
         [(["a", "a_2"], [("a", "1"), ("a_2", "2")])]),
        ([told(("a", "f"), ("b", "g")), {"role": "function", "name": "g", "content": "1"},
          result("a", "2")], [(["a", "b"], [("b", "1"), ("a", "2")])]),
    ],
    ids=["used again", "twice in a turn", "an old result with the function's name"],
)  # fmt: skip
def test_results_reach_their_calls_whatever_the_ids(
    messages: list[Message], expected: list[tuple[list[str], list[tuple[str, str]]]]
) -> None:
    assert pairs([user("x"), *messages]) == expected


def test_each_call_has_a_result_and_each_result_a_call() -> None:
    messages = [user("x"), told(("a", "f"), ("b", "g")), user("wait"), result("b", "1")]
    turns = read_conversation([*messages, result("z", "lost")]).turns
    assert turns[2].parts == [
        ToolResultPart("b", (TextPart("1"),)),
        ToolResultPart("a", (TextPart("(no result)"),), failed=True),
        TextPart("wait"),
        TextPart("lost"),
    ]
