"""Whatever JSON a server sends, reading it gives a reply or a failure and never raises."""

from __future__ import annotations

import json
from random import Random

import pytest

from bagent.backends.chat_stream import StreamReader
from bagent.backends.chat_wire import read_reply
from bagent.backends.failures import from_status
from bagent.types import Failure, Reply

LEAVES = [None, True, False, 0, -1, 1.5, float("nan"), 10**30, "", "x", "\ud800", [], {}, [None]]
KEYS = [
    "choices", "message", "delta", "content", "text", "tool_calls", "function", "arguments", "name",
    "id", "index", "usage", "prompt_tokens", "prompt_tokens_details", "cached_tokens", "error",
    "code", "type", "metadata", "raw", "headers", "detail", "errors", "loc", "msg", "finish_reason",
    "refusal", "reasoning", "logprobs", "metrics", "object", "time_to_first_token_ms",
    "function_call", "status",
]  # fmt: skip


def anything(random, depth):
    """Any JSON value, with the names that servers use."""
    kind = random.random()
    if depth <= 0 or kind < 0.35:
        return random.choice(LEAVES)
    if kind < 0.55:
        return [anything(random, depth - 1) for _ in range(random.randrange(3))]
    names = [random.choice(KEYS) for _ in range(random.randrange(4))]
    return {name: anything(random, depth - 1) for name in names}


def nearly_right(random):
    """The shape of a good answer with anything in its places."""
    fields = random.sample(["content", "tool_calls", "refusal", "reasoning", "function_call"], 2)
    choice = {
        "index": random.choice([0, 0, 0, 1, None, "0"]),
        random.choice(["message", "delta"]): {name: anything(random, 2) for name in fields},
        "finish_reason": random.choice(["stop", *LEAVES]),
        **({"error": anything(random, 3)} if random.random() < 0.2 else {}),
    }
    body = {"choices": [choice] * random.randrange(3)}
    for name in ("usage", "metrics", "error", "model", "id"):
        if random.random() < 0.3:
            body[name] = anything(random, 2)
    return body


@pytest.mark.parametrize("seed", range(4))
def test_any_json_is_read(seed):
    random = Random(seed)
    for step in range(1500):
        value = nearly_right(random) if step % 2 else anything(random, 5)
        raw = json.dumps(value).encode()
        assert isinstance(read_reply(raw, "application/json", {}), Reply | Failure)
        assert isinstance(from_status(random.choice([400, 429, 503]), raw.decode(), {}), Failure)
        reader = StreamReader(0.0, lambda: 1.0)
        reader.feed(b"data: " + raw + b"\n\n")
        assert isinstance(reader.result(), Reply | Failure)
