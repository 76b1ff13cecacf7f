"""What an answer took, read from the answer as it passed: each API tells it in a form of its own.

Sources: OpenAI's chat completions (``usage``, in the last chunk of a stream) and responses
(``response.usage`` in the event that ends a stream), Anthropic's messages (``message.usage`` in the
first event, what was written in ``message_delta``).
"""

from __future__ import annotations

import re
from typing import Any

from bagent.backends import anthropic_wire
from bagent.backends.chat_wire import read_usage
from bagent.backends.json_text import decode_json
from bagent.types import Json, Usage

HEAD_BYTES = 8192
"""So much of a stream's beginning is kept: Anthropic's first event tells what was read."""

TAIL_BYTES = 65536
"""So much of a stream's end is kept to find its token counts in."""


_LONGEST_MARK = 64
_ENDS = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))\b)",
    re.MULTILINE,
)


def stream_ended(tail: bytes, size: int) -> bool:
    """Whether the last ``size`` bytes of a stream have the mark by which its API ends it."""
    return _ENDS.search(tail, max(0, len(tail) - size - _LONGEST_MARK)) is not None


def usage_in(tail: bytes, head: bytes = b"") -> tuple[Usage, str | None]:
    """Token counts and model of an answer; what it does not tell is None.

    Args:
        tail: a whole JSON body, or the last events of a stream.
        head: the beginning of the stream.
    """
    if tail.lstrip()[:1] == b"{":
        body = _decoded(tail)
        if isinstance(body, dict):
            return _read(body), _model(body)
        # What was kept of a long stream may begin with a brace too.
    last = _event(tail.splitlines()[::-1])
    if last is None:
        return Usage(), None
    if last.get("type") == "message_delta":
        first = (_event(head.splitlines()) or {}).get("message")
        start = first if isinstance(first, dict) else {}
        told = {name: value for name, value in last["usage"].items() if value is not None}
        return anthropic_wire.read_usage({**(start.get("usage") or {}), **told}), _model(start)
    inner = last.get("response")
    body = inner if isinstance(inner, dict) else last
    return _read(body), _model(body)


def _read(body: dict[str, Any]) -> Usage:
    usage = body.get("usage")
    if not isinstance(usage, dict) or "input_tokens" not in usage:
        return read_usage(usage)
    if body.get("object") != "response":
        return anthropic_wire.read_usage(usage)
    return read_usage(
        {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "prompt_tokens_details": usage.get("input_tokens_details"),
            "completion_tokens_details": usage.get("output_tokens_details"),
        }
    )


def _event(lines: list[bytes]) -> dict[str, Any] | None:
    """The first of these lines' events that tells usage."""
    for line in lines:
        if line.startswith(b"data:") and b'"usage"' in line:
            body = _decoded(line[5:])
            if isinstance(body, dict) and _tells(body):
                return body
    return None


def _tells(body: dict[str, Any]) -> bool:
    holders = (body, body.get("message"), body.get("response"))
    return any(isinstance(one, dict) and isinstance(one.get("usage"), dict) for one in holders)


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _decoded(raw: bytes) -> Json:
    try:
        return decode_json(raw)
    except ValueError:
        return None
