"""What the scripted server saw: a record of each request, and what a strict server minds in it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Json = Any

ROLES = {"system", "developer", "user", "assistant", "tool"}


@dataclass(slots=True)
class ReceivedRequest:
    """One request. Times are seconds of ``time.monotonic()``, comparable across processes.

    ``target`` is what the request line names, to a proxy the whole URL.
    ``rows`` are the row ids found in its prompts, one per prompt; ``prompts`` the prompt texts.
    ``answered`` and ``status`` stay None where no answer was sent. ``cancelled`` says that the
    client went away first.
    """

    number: int
    method: str
    path: str
    target: str
    headers: dict[str, str]
    raw: bytes
    received: float
    body: Json = None
    rows: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    answered: float | None = None
    status: int | None = None
    cancelled: bool = False

    @property
    def row_id(self) -> str | None:
        """The row id of a request with one prompt; of a list call the first."""
        return self.rows[0] if self.rows else None


@dataclass(slots=True)
class RequestLog:
    """Every request so far, safe to read from another thread."""

    requests: list[ReceivedRequest] = field(default_factory=list)
    probes: list[ReceivedRequest] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    received: int = 0
    in_flight: int = 0
    peak: int = 0
    finished: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, seen: ReceivedRequest) -> None:
        """Note that a request for an answer came in."""
        with self.changed:
            self.requests.append(seen)
            self.received += 1
            self.counts.update(seen.rows)
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            self.changed.notify_all()

    def end(self, seen: ReceivedRequest, status: int | None) -> None:
        """Note that a request was answered, dropped or given up."""
        with self.changed:
            seen.status = status
            if status is not None:
                seen.answered = time.monotonic()
            self.in_flight -= 1
            self.finished += 1
            self.changed.notify_all()


def message_text(message: Json) -> str:
    """Return the text of one chat message, its text parts joined."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def decode_tokens(tokens: list[int]) -> str:
    """Return the text of tokens; the server's tokens are the bytes of UTF-8."""
    return bytes(tokens).decode("utf-8", "replace")


def encode_tokens(text: str) -> list[int]:
    """Return the tokens of ``text``."""
    return list(text.encode("utf-8", "replace"))


def render(messages: list[Json], add_generation_prompt: bool = True) -> str:
    """Return the messages under the ChatML template."""
    text = "".join(f"<|im_start|>{m['role']}\n{message_text(m)}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def prompts(kind: str, body: Json) -> tuple[str, ...]:
    """Return the prompt texts of a request, one per answer that it asks for.

    Args:
        kind: ``chat``, ``batch``, ``completions`` or ``embeddings``.
        body: the decoded body.
    """
    if not isinstance(body, dict):
        return ()
    if kind in ("chat", "batch"):
        messages = body.get("messages") or []
        conversations = messages if kind == "batch" else [messages]
        return tuple("\n".join(map(message_text, one)) for one in conversations)
    value = body.get("input" if kind == "embeddings" else "prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list):
        return ()
    return tuple(one if isinstance(one, str) else decode_tokens(one) for one in value)


def complaint(kind: str, body: Json) -> str | None:
    """Return what a strict server minds in ``body``, or None where it is well formed."""
    if not isinstance(body, dict):
        return "the body is not a JSON object"
    if not isinstance(body.get("model"), str):
        return "model is not a string"
    if kind == "chat":
        return _conversation(body.get("messages"))
    if kind == "batch":
        found = [_conversation(one) for one in body.get("messages") or [None]]
        return next((words for words in found if words), None)
    return None if prompts(kind, body) else "there is no prompt"


def _conversation(messages: Json) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages is not a list with entries"
    asked: set[str] = set()
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"messages[{place}] has no known role"
        content = message.get("content")
        if not isinstance(content, (str, list)) and not message.get("tool_calls"):
            return f"messages[{place}] has no content"
        for call in message.get("tool_calls") or []:
            words = _call(call)
            if words:
                return f"messages[{place}]: {words}"
            asked.add(call["id"])
        if message["role"] == "tool" and message.get("tool_call_id") not in asked:
            return f"messages[{place}] answers a tool call that was not made"
    return None


def _call(call: Json) -> str | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return "a tool call has no id or function"
    try:
        if isinstance(json.loads(function["arguments"]), dict):
            return None
    except (KeyError, TypeError, ValueError):
        pass
    return f"arguments of {function.get('name')} are not an object as JSON"
