"""Chat completions as the proxy writes them, and what it remembers of their turns."""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from bagent.backends.messages import assistant_message
from bagent.backends.openai.chat import PROVIDER_BLOCKS
from bagent.backends.request import encode_payload
from bagent.types import Failure, Json, Reply, Usage

DONE = b"data: [DONE]\n\n"

_TYPES = {
    "budget": "insufficient_quota",
    "rate_limited": "rate_limit_exceeded",
    "overloaded": "overloaded_error",
    "auth": "authentication_error",
    "context_overflow": "context_length_exceeded",
    "refused": "content_filter",
    "rejected": "invalid_request_error",
    "timeout": "timeout",
}
"""``type`` and ``code`` of an error, by failure kind."""

_STATUS = {"timeout": 504, "rejected": 400, "auth": 401, "refused": 400, "context_overflow": 400}
_KEPT_STATUS = frozenset({408, 429})
_HEAD = re.compile(r"HTTP \d{3}: ")


def completion(reply: Reply, model: str) -> dict[str, Json]:
    """Return a complete answer; ``model`` is the requested name."""
    message = {**assistant_message(reply), "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.refusal:
        message["refusal"] = reply.refusal
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    return {
        "id": reply.request_id or f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model or model,
        "choices": [choice],
        "usage": usage_of(reply.usage),
    }


def usage_of(usage: Usage) -> dict[str, Json]:
    """Return token counts, null for unknown ones."""
    prompt, answer = usage.prompt, usage.completion
    total = None if prompt is None or answer is None else prompt + answer
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class StreamId(msgspec.Struct, frozen=True):
    """What all chunks of a streamed answer have in common."""

    id: str
    model: str


def chunk_bytes(stream: StreamId, kind: str, text: str) -> bytes:
    """Return a chunk of a streamed answer; ``kind`` is ``text`` or ``reasoning``."""
    name = "content" if kind == "text" else "reasoning_content"
    return _chunk(stream, {"role": "assistant", name: text})


def last_chunks(
    stream: StreamId, result: Reply | Failure, *, streamed: bool, usage: bool
) -> Iterator[bytes]:
    """Yield the end of a stream: tool calls, finish reason and usage.

    Args:
        stream: the answer.
        result: how it ended.
        streamed: whether text and reasoning have been sent.
        usage: whether the client wants token counts.
    """
    if isinstance(result, Failure):
        status, body = _error(result)
        yield _event({"error": {**body["error"], "code": status}})
        return
    if not streamed:
        for kind, text in (("reasoning", result.reasoning), ("text", result.text)):
            if text:
                yield chunk_bytes(stream, kind, text)
    message = assistant_message(result)
    delta = {name: message[name] for name in message.keys() - {"role", "content"}}
    if result.tool_calls:
        calls = message["tool_calls"]
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    yield _chunk(stream, delta, result.finish_reason)
    if usage:
        yield _event({**_head(stream), "choices": [], "usage": usage_of(result.usage)})
    yield DONE


def _head(stream: StreamId) -> dict[str, Json]:
    return {
        "id": stream.id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": stream.model,
    }


def _chunk(stream: StreamId, delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head(stream), "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + encode_payload(value) + b"\n\n"


def error_of(failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and body for a failure."""
    status, body = _error(failure)
    return status, msgspec.json.encode(body)


def _error(failure: Failure) -> tuple[int, dict[str, dict[str, Json]]]:
    status = failure.status or _STATUS.get(failure.kind, 502)
    if status < 400 or (failure.passing and status < 500 and status not in _KEPT_STATUS):
        status = 503 if failure.kind == "overloaded" else 502
    kind = _TYPES.get(failure.kind, failure.kind)
    message = _HEAD.sub("", failure.message, count=1)
    return status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}


MAX_TURNS = 4096
"""Turns whose provider blocks are remembered, for clients that send back only the tool calls."""


class TurnMemory:
    """Provider blocks of turns with tools, for clients that send back only the tool calls."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, list[Json]] = OrderedDict()

    def remember(self, reply: Reply) -> None:
        """Remember the blocks that must be sent back with the tool calls of a turn."""
        if reply.blocks is not None and reply.tool_calls:
            self._blocks[reply.tool_calls[0].id] = reply.blocks
            if len(self._blocks) > MAX_TURNS:
                self._blocks.popitem(last=False)

    def restore(self, body: dict[str, Json]) -> None:
        """Restore signed or encrypted reasoning in the turns of a body that lacks it."""
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            first = calls[0] if isinstance(calls, list) and calls else None
            if isinstance(first, dict) and PROVIDER_BLOCKS not in message:
                blocks = self._blocks.get(str(first.get("id")))
                if blocks is not None:
                    message[PROVIDER_BLOCKS] = blocks
