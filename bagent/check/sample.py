"""The sampled rows as the requests that a run would send for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bagent.agents.conversation import Conversation
from bagent.agents.plan import StagePlan
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.request import Request
from bagent.fleet.call import Call
from bagent.types import Json, Message, Outcome, Row

_LIMITS = ("max_completion_tokens", "max_tokens")
_PROMPT_KEYS = ("messages", "prompt", "input")
_TEMPLATE_BYTES = 12
"""Bytes that stand for the chat template around one message: three tokens."""


class Sampled(msgspec.Struct, eq=False):
    """One row and its first request."""

    row: Row
    request: Request | None
    """None where the row ends before it; ``error`` says why."""
    error: str | None = None
    name: int | None = None
    """Hash of the request, by which equal ones are recognised."""

    @property
    def max_tokens(self) -> int | None:
        """Return the limit of the answer in the request; None without one."""
        if self.request is None or self.request.body is None:
            return self.request.max_tokens if self.request else None
        for key in _LIMITS:
            limit = self.request.body.get(key)
            if isinstance(limit, int):
                return limit
        return None

    @property
    def messages(self) -> list[Message] | None:
        """Return the messages on the wire; None for a prompt without a chat."""
        messages = self._wire_value("messages")
        return messages if isinstance(messages, list) else None

    @property
    def prompt(self) -> str | None:
        """Return the raw text on the wire; None for a chat."""
        prompt = self._wire_value("prompt")
        return prompt if isinstance(prompt, str) else None

    @property
    def text(self) -> str:
        """Return the prompt as one text, with generic marks in place of the chat template's."""
        messages = self.messages
        if messages is None:
            return self.prompt or ""
        parts = [f"<|{message.get('role')}|>\n{message_text(message)}" for message in messages]
        return "\n".join([*parts, "<|assistant|>\n"])

    @property
    def size(self) -> int:
        """Return the bytes of UTF-8 by which tokens are estimated, without images."""
        messages = self.messages
        if messages is None:
            return len((self.prompt or "").encode("utf-8", "replace"))
        size = sum(len(message_text(message).encode("utf-8", "replace")) for message in messages)
        return size + _TEMPLATE_BYTES * (len(messages) + 1)

    @property
    def images(self) -> int:
        """Return the number of images in the messages."""
        parts = [message.get("content") for message in self.messages or ()]
        content_parts = [part for content in parts if isinstance(content, list) for part in content]
        return sum(isinstance(part, dict) and "image_url" in part for part in content_parts)

    def _wire_value(self, key: str) -> Json:
        request = self.request
        if request is None:
            return None
        if request.body is not None:
            return request.body.get(key)
        if (request.prompt is not None) != (key == "prompt"):
            return None
        return msgspec.json.decode(request.payload)


class _ClosedHost:
    """The host of conversations that are opened and never sent."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None

    def now(self) -> float:
        """Return 0: no time passes."""
        return 0.0

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Fail: there are no replies to continue from."""
        raise AssertionError("a conversation went on without a reply")

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Keep why the row ended."""
        self.outcome = outcome


MAX_RENDER_SECONDS = 20.0


def make_requests(plan: StagePlan, rows: Iterable[Row]) -> list[Sampled]:
    """Return the first request of each row's first answer; nothing is sent.

    Rendering stops after :data:`MAX_RENDER_SECONDS`, since templates may be slow.
    """
    sample: list[Sampled] = []
    deadline = time.monotonic() + MAX_RENDER_SECONDS
    for row in rows:
        if time.monotonic() > deadline:
            break
        host = _ClosedHost()
        conversation = Conversation(plan, row, 0, host)
        call = conversation.open()
        if call is not None:
            sample.append(Sampled(row, call.request, name=conversation.request_hash))
            continue
        error = host.outcome.error if host.outcome else None
        sample.append(Sampled(row, None, error or "the row cannot be sent"))
    return sample


def parameters(request: Request, model: str | None, *, native_schema: bool) -> dict[str, Json]:
    """Return the body of ``request`` on the wire without the prompt and streaming."""
    body: dict[str, Any] = msgspec.json.decode(
        BodyWriter(model or "", native_schema=native_schema).body(
            request, key="prompt" if request.prompt is not None else None
        )
    )
    if not model and not body.get("model"):
        body["model"] = None
    hidden = (*_PROMPT_KEYS, "stream", "stream_options")
    return {key: value for key, value in body.items() if key not in hidden}


def message_text(message: Message) -> str:
    """Return the text of one message, its text parts joined; images leave nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def count_repeats(sample: Sequence[Sampled]) -> int:
    """Return how many requests of the sample equal an earlier one."""
    names = [sampled.name for sampled in sample if sampled.name is not None]
    return len(names) - len(set(names))
