"""Bodies of servers as they should be, and the same with other values in some places."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from support.provider_protocols import AnthropicWire, ModelAnswer, ResponsesWire, Wire

COUNTS = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
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
SAY = ModelAnswer(text="text", thought="why", calls=(("c", "f", {"a": 1}),), stop="tool_calls")
RESPONSE = ResponsesWire().whole(SAY) | {"incomplete_details": {"reason": "max_output_tokens"}}
ITEMS = RESPONSE["output"]
MESSAGE = AnthropicWire().whole(SAY)
BLOCKS = MESSAGE["content"]
TOKENS = RESPONSE["usage"] | MESSAGE["usage"]


def _events(wire: Wire) -> list[Any]:
    return [json.loads(event.partition(b"data: ")[2]) for event in wire.events(SAY)]


RESPONSE_EVENTS, MESSAGE_EVENTS = _events(ResponsesWire()), _events(AnthropicWire())
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
