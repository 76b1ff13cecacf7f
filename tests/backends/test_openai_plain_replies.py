"""The quick reader of usual answers says what the patient one says, or nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.backends.openai.chat import read_plain_reply, reply_from_choice
from bagent.backends.openai.stream import StreamReader
from bagent.types import Reply

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}

USUAL: dict[str, dict[str, Any]] = {
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
    "told ttft": {
        "choices": [{"message": {"content": "hi"}}],
        "metrics": {"time_to_first_token_ms": 12.5},
    },
}

NOT_USUAL: dict[str, dict[str, Any]] = {
    "tool call": {"choices": [{"message": {"content": "", "tool_calls": [{"id": "a"}]}}]},
    "thinking": {"choices": [{"message": {"content": "x", "reasoning": "hm"}}]},
    "thinking by another name": {
        "choices": [{"message": {"content": "x", "reasoning_content": "hm"}}]
    },
    "refusal": {"choices": [{"message": {"content": None, "refusal": "no"}}]},
    "parts": {"choices": [{"message": {"content": [{"text": "x"}]}}]},
    "error": {"choices": [{"message": {"content": "x"}}], "error": {"message": "full"}},
    "error in the choice": {"choices": [{"message": {"content": "x"}, "error": {"code": 502}}]},
    "two choices": {"choices": [{"message": {"content": "x"}}, {"message": {"content": "y"}}]},
    "no choices": {"choices": []},
    "count below zero": {
        "choices": [{"message": {"content": "x"}}],
        "usage": {"prompt_tokens": -1},
    },
    "count that is none": {
        "choices": [{"message": {"content": "x"}}],
        "usage": {"prompt_tokens": True},
    },
}


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_answer_reads_as_the_patient_reader_has_it(name):
    body = USUAL[name]
    usual = read_plain_reply(msgspec.json.encode(body))
    assert usual == reply_from_choice(body["choices"][0], body)


@pytest.mark.parametrize("name", NOT_USUAL)
def test_what_is_more_than_text_is_left_to_the_patient_reader(name):
    assert read_plain_reply(msgspec.json.encode(NOT_USUAL[name])) is None


@pytest.mark.parametrize("form", ["delta", "text"])
def test_pieces_of_a_stream_come_to_the_same_whichever_way_they_are_read(form):
    def reader(*, strange: bool) -> Reply:
        ticks = iter(range(100))
        found = StreamReader(0.0, lambda: float(next(ticks)))
        for piece in ("", "a", "b", "c"):
            choice = {"delta": {"content": piece}} if form == "delta" else {"text": piece}
            event: dict[str, Any] = {"id": "i", "model": "m", "choices": [choice]}
            if strange:
                event["choices"][0]["index"] = None  # for the patient reader
            if piece == "c":
                event["usage"] = USAGE
            found.feed(b"data: " + msgspec.json.encode(event) + b"\n\n")
        assert (found.pieces, found.deltas) == (4, 3)
        assert found.first_token == 0.0
        found.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        assert found.done
        reply = found.result()
        assert isinstance(reply, Reply)
        return reply

    assert reader(strange=False) == reader(strange=True)
