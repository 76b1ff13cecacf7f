"""Lines and states of provider batches, and requests of clients, with other values in them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from bagent.backends.openai.responses_server import chat_request
from bagent.batches import anthropic, bedrock, openai
from bagent.batches.record import BatchStatus
from bagent.types import Failure, Reply
from support.edited_bodies import CHAT, EDITS, ERROR, ITEMS, MESSAGE, TOKENS, edited

ANSWER = {
    "output": {"message": {"role": "assistant", "content": [
        {"reasoningContent": {"reasoningText": {"text": "why", "signature": "s"}}},
        {"text": "text"}, {"toolUse": {"toolUseId": "c", "name": "f", "input": {}}}]}},
    "stopReason": "end_turn", "usage": {"inputTokens": 1, "outputTokens": 2},
}  # fmt: skip
LINES = {
    "openai": (
        openai.read_line,
        {"custom_id": "1", "response": {"status_code": 200, "body": CHAT}, "error": None},
        {"custom_id": "1", "response": {"status_code": 400, "body": ERROR}, "error": None},
        {"custom_id": "1", "response": None, "error": {"code": "batch_expired", "message": "no"}},
    ),
    "anthropic": (
        anthropic.read_line,
        {"custom_id": "1", "result": {"type": "succeeded", "message": MESSAGE}},
        {"custom_id": "1", "result": {"type": "errored", "error": ERROR}},
    ),
    "bedrock": (
        lambda line: bedrock.read_line(line, "m"),
        {"recordId": "1", "modelInput": {}, "modelOutput": ANSWER},
        {"recordId": "1", "error": {"errorCode": 400, "errorMessage": "no"}},
    ),
}
BATCH = {
    "id": "b", "status": "failed", "output_file_id": "f", "error_file_id": None,
    "request_counts": {"total": 2, "completed": 1, "failed": 1}, "failed_at": 10, "metadata": {},
    "errors": {"data": [{"message": "no", "code": "x", "line": 1}]},
}  # fmt: skip
REQUEST = {
    "model": "m", "instructions": "Be brief.", "stream": True, "max_output_tokens": 5,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, ITEMS[2],
              {"type": "function_call_output", "call_id": "c", "output": "1"}],
    "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "usage": TOKENS,
    "reasoning": {"effort": "low"},
}  # fmt: skip


@pytest.mark.parametrize("provider", LINES)
def test_any_line_of_a_batch_is_an_answer_or_a_value_error(provider):
    read, *lines = LINES[provider]
    for good in lines:
        assert read(json.dumps(good).encode())[0] == "1"

    @given(EDITS)
    def check(edits):
        for good in lines:
            try:
                name, answer = read(json.dumps(edited(good, edits)).encode())
            except ValueError:
                continue
            assert isinstance(name, str)
            assert isinstance(answer, Reply | Failure)

    check()


@given(EDITS)
def test_any_state_of_a_batch_is_read(edits):
    assert isinstance(openai.read_batch(edited(BATCH, edits)), BatchStatus | Failure)


@given(EDITS)
def test_any_request_is_a_chat_or_a_value_error(edits):
    try:
        assert isinstance(chat_request(edited(REQUEST, edits)), dict)
    except ValueError as error:
        assert str(error)
