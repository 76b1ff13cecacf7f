"""Bodies of servers as they should be, and the same with other values in some places."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

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
