"""Bodies and streams of servers with any other values in their places."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagent.backends.anthropic import AnthropicStream, read_message
from bagent.backends.failures import failure_from_status
from bagent.backends.openai.chat import read_reply
from bagent.backends.openai.embeddings import read_vectors
from bagent.backends.openai.models import read_models
from bagent.backends.openai.responses import ResponsesStream, read_response
from bagent.backends.openai.stream import StreamReader
from bagent.types import Failure, Json, Reply

COUNTS = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
TOKENS = {
    "input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 1}, "output_tokens_details": {"reasoning_tokens": 1},
}  # fmt: skip
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
PART = {
    "role": "assistant", "content": "text", "reasoning_content": "why", "refusal": None,
    "tool_calls": [CALL],
}  # fmt: skip
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}
CHAT = {
    "id": "x", "object": "chat.completion", "model": "m", "usage": COUNTS,
    "choices": [
        {"index": 0, "message": PART, "finish_reason": "stop", "logprobs": LOGPROBS, "error": None}
    ],
}  # fmt: skip
CHUNKS = [
    {"id": "x", "model": "m", "choices": [{"index": 0, "delta": PART, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": COUNTS},
]
BLOCKS = [
    {"type": "thinking", "thinking": "why", "signature": "s"},
    {"type": "text", "text": "text"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
]
MESSAGE = {
    "id": "x", "type": "message", "role": "assistant", "model": "m", "content": BLOCKS,
    "stop_reason": "tool_use", "usage": TOKENS,
}  # fmt: skip
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {**MESSAGE, "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": BLOCKS[0]},
    {"type": "content_block_delta", "index": 0,
     "delta": {"type": "thinking_delta", "thinking": "w"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {**BLOCKS[2], "input": {}}},
    {"type": "content_block_delta", "index": 1,
     "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": TOKENS},
    {"type": "message_stop"},
]  # fmt: skip
ITEMS = [
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "why"}]},
    {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "text", "logprobs": LOGPROBS["content"]}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
]  # fmt: skip
RESPONSE = {
    "id": "x", "object": "response", "status": "completed", "model": "m", "output": ITEMS,
    "usage": TOKENS, "error": None, "incomplete_details": {"reason": "max_output_tokens"},
}  # fmt: skip
RESPONSE_EVENTS = [
    {"type": "response.created", "response": {**RESPONSE, "output": []}},
    {"type": "response.output_text.delta", "delta": "te", "output_index": 0},
    {"type": "response.output_item.done", "item": ITEMS[2], "output_index": 1},
    {"type": "response.completed", "response": RESPONSE},
]
VECTORS = {
    "data": [{"embedding": [0.5, 1], "index": 0, "object": "embedding"}], "model": "m",
    "usage": COUNTS,
}  # fmt: skip
MODELS = {"data": [{"id": "m", "max_model_len": 10, "owned_by": "vllm", "meta": {"n_ctx": 9}}]}

ERROR = {
    "error": {"message": "no", "type": "x", "code": 429, "metadata": {"raw": "y", "headers": {}}},
    "detail": [{"loc": ["body"], "msg": "no"}], "errors": [{"message": "no"}],
}  # fmt: skip

OTHERS = st.sampled_from(
    [
        None, True, 0, 1, -1, 10**30, 1.5, "", "1", "text", "\ud800", "error", [], [None], [[]], {},
        {"": None}, {"message": "no", "code": 400, "type": "x"}, [{"type": "text", "text": 1}],
        float("nan"), float("inf"), "tool_use", CALL, BLOCKS[1], ITEMS[1],
    ]
)  # fmt: skip
EDITS = st.lists(st.tuples(st.integers(0, 1 << 12), OTHERS, st.booleans()), min_size=1, max_size=4)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with each of its keys, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def edited(value: Any, edits: list[tuple[int, Any, bool]]) -> Any:
    """Return a copy with some values replaced by others, or left out."""
    value = copy.deepcopy(value)
    for number, other, removes in edits:
        listed = list(places(value))
        if not listed:
            break
        container, key = listed[number % len(listed)]
        if removes:
            del container[key]
        else:
            container[key] = copy.deepcopy(other)
    return value


BODIES = {
    "chat": (CHAT, lambda raw: read_reply(raw, "application/json", {})),
    "message": (MESSAGE, lambda raw: read_message(raw, "application/json", {})),
    "response": (RESPONSE, lambda raw: read_response(raw, {})),
    "vectors": (VECTORS, lambda raw: read_vectors(raw, ["a"], {})),
}
STREAMS = {
    "chat": (CHUNKS, StreamReader),
    "message": (MESSAGE_EVENTS, AnthropicStream),
    "response": (RESPONSE_EVENTS, ResponsesStream),
}


@pytest.mark.parametrize("kind", BODIES)
def test_any_body_is_a_reply_or_a_failure(kind):
    good, read = BODIES[kind]
    assert isinstance(read(json.dumps(good).encode()), Reply)

    @given(EDITS)
    def check(edits: list[tuple[int, Json, bool]]) -> None:
        assert isinstance(read(json.dumps(edited(good, edits)).encode()), Reply | Failure)

    check()


@pytest.mark.parametrize("kind", STREAMS)
def test_any_stream_is_a_reply_or_a_failure(kind):
    good, reader = STREAMS[kind]

    def read(events: list[Json]) -> Reply | Failure:
        stream = reader(0.0, lambda: 1.0)
        for event in events:
            name = event.get("type") if isinstance(event, dict) else None
            line = f"event: {name}\n" if isinstance(name, str) and name.isascii() else ""
            stream.feed(f"{line}data: {json.dumps(event)}\n\n".encode())
        return stream.result()

    assert isinstance(read(good), Reply)

    @given(EDITS)
    def check(edits: list[tuple[int, Json, bool]]) -> None:
        assert isinstance(read(edited(good, edits)), Reply | Failure)

    check()


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("message", {"type": "content_block_start", "index": {}, "content_block": {}}),
        ("message", {"type": "content_block_delta", "index": "a", "delta": "text"}),
        ("message", {"type": "message_delta", "delta": "text"}),
        ("response", {"type": "response.completed", "response": {"output": 5}}),
    ],
)
def test_an_event_of_another_form_ends_no_run(kind, event):
    events, reader = STREAMS[kind]
    stream = reader(0.0, lambda: 1.0)
    for each in (events[0], event):
        stream.feed(f"data: {json.dumps(each)}\n\n".encode())
    assert isinstance(stream.result(), Reply | Failure)


@given(EDITS, st.sampled_from([400, 429, 503]))
def test_any_error_body_is_a_failure(edits, status):
    text = json.dumps(edited(ERROR, edits))
    assert isinstance(failure_from_status(status, text, {}), Failure)


@given(EDITS)
def test_any_list_of_models_is_read(edits):
    read_models(edited(MODELS, edits))
