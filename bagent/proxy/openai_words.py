"""Replies and failures in the words of OpenAI's chat completions."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator

import msgspec

from bagent.backends.request import encode_payload
from bagent.backends.turns import assistant_message
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
"""The ``type`` and ``code`` of an error, by which clients know its kind again."""

_STATUS = {"timeout": 504, "rejected": 400, "auth": 401, "refused": 400, "context_overflow": 400}
_TO_PASS = frozenset({408, 429})
_HEAD = re.compile(r"HTTP \d{3}: ")


def completion(reply: Reply, model: str) -> dict[str, Json]:
    """A whole answer; ``model`` is the name that was asked for."""
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
    """Counts of tokens; what is not known is null."""
    prompt, answer = usage.prompt, usage.completion
    total = None if prompt is None or answer is None else prompt + answer
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def chunk_bytes(told: tuple[str, str], kind: str, text: str) -> bytes:
    """A piece of a streamed answer; ``told`` is the id of the answer and its model, ``kind``
    ``text`` or ``reasoning``."""
    name = "content" if kind == "text" else "reasoning_content"
    return _chunk(told, {"role": "assistant", name: text})


def last_chunks(
    told: tuple[str, str], found: Reply | Failure, *, heard: bool, counts: bool
) -> Iterator[bytes]:
    """The end of a stream: what was not told piece by piece, the reason for the end, counts.

    Args:
        heard: whether text and reasoning have been told.
        counts: whether the counts of tokens were asked for.
    """
    if isinstance(found, Failure):
        status, body = _error(found)
        yield _event({"error": {**body["error"], "code": status}})
        return
    if not heard:
        for kind, text in (("reasoning", found.reasoning), ("text", found.text)):
            if text:
                yield chunk_bytes(told, kind, text)
    message = assistant_message(found)
    rest = {name: message[name] for name in message.keys() - {"role", "content"}}
    if found.tool_calls:
        rest["tool_calls"] = [
            {"index": place, **call} for place, call in enumerate(message["tool_calls"])
        ]
    yield _chunk(told, rest, found.finish_reason)
    if counts:
        yield _event({**_head(told), "choices": [], "usage": usage_of(found.usage)})
    yield DONE


def _head(told: tuple[str, str]) -> dict[str, Json]:
    answer, model = told
    return {"id": answer, "object": "chat.completion.chunk", "created": 0, "model": model}


def _chunk(told: tuple[str, str], delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({**_head(told), "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + encode_payload(value) + b"\n\n"


def error_of(failure: Failure) -> tuple[int, bytes]:
    """HTTP status and body for a failure."""
    status, body = _error(failure)
    return status, msgspec.json.encode(body)


def _error(failure: Failure) -> tuple[int, dict[str, dict[str, Json]]]:
    status = failure.status or _STATUS.get(failure.kind, 502)
    if status < 400 or (failure.passing and status < 500 and status not in _TO_PASS):
        status = 503 if failure.kind == "overloaded" else 502
    kind = _TYPES.get(failure.kind, failure.kind)
    message = _HEAD.sub("", failure.message, count=1)
    return status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}
