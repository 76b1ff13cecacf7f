"""Messages in OpenAI form as alternating turns."""

from __future__ import annotations

import pytest

from bagent.backends.turns import (
    OWN_BLOCKS,
    Asked,
    Image,
    Own,
    Result,
    Text,
    assistant_message,
    read_talk,
)
from bagent.types import Message, Reply, ToolCall


def user(text: object) -> Message:
    return {"role": "user", "content": text}


def test_turns_alternate_whatever_the_messages_do() -> None:
    messages = [
        user("a"),
        user("b"),
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        user("e"),
    ]
    talk = read_talk(messages)
    assert [turn.role for turn in talk.turns] == ["user", "assistant", "user"]
    assert talk.turns[0].parts == [Text("a"), Text("b")]


def test_blank_texts_are_left_out_and_blank_turns_with_them() -> None:
    talk = read_talk([user(" "), {"role": "assistant", "content": None}, user("x"), user("")])
    assert [turn.parts for turn in talk.turns] == [[Text("x")]]


def test_results_of_one_turn_stand_in_one_user_turn() -> None:
    messages = [
        user("x"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "function": {"name": "f", "arguments": '{"n":1}'}},
                {"id": "b", "function": {"name": "g", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "no", "is_error": True},
        user("go on"),
    ]
    talk = read_talk(messages)
    assert talk.turns[1].parts == [Asked("a", "f", {"n": 1}), Asked("b", "g", {})]
    assert talk.turns[2].parts == [
        Result("a", (Text("1"),)),
        Result("b", (Text("no"),), failed=True),
        Text("go on"),
    ]


@pytest.mark.parametrize("told", ["{broken", "[1]", "3"])
def test_arguments_that_are_no_object_stay_visible(told: str) -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": told}}]
    talk = read_talk([user("x"), {"role": "assistant", "tool_calls": calls}])
    (asked,) = talk.turns[1].parts
    assert isinstance(asked, Asked)
    assert list(asked.arguments) == ["arguments"]


def test_images_by_data_and_by_address() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/JPEG;base64,AAAA"}},
        {"type": "image_url", "image_url": "https://example.org/a.png"},
    ]
    talk = read_talk([user(parts)])
    assert talk.turns[0].parts == [
        Image("image/jpeg", "AAAA"),
        Image(url="https://example.org/a.png"),
    ]


@pytest.mark.parametrize(
    "message", [{"role": "narrator", "content": "x"}, user([{"type": "input_audio"}])]
)
def test_what_cannot_be_told_is_said(message: Message) -> None:
    with pytest.raises(ValueError, match=r"narrator|input_audio"):
        read_talk([message])


def test_a_turn_in_the_providers_form_goes_back_unchanged() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s=="}]
    reply = Reply("t", "tool_calls", tool_calls=(ToolCall("a", "f", "{}"),), blocks=list(blocks))
    message = assistant_message(reply)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert message[OWN_BLOCKS] == blocks
    assert read_talk([user("x"), message]).turns[1].parts == [Own(blocks[0])]


def test_a_plain_answer_goes_on_as_plain_text() -> None:
    assert assistant_message(Reply("t", "stop")) == {"role": "assistant", "content": "t"}
