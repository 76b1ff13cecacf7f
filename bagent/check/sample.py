"""The rows that are looked at, as the very requests that a run would send for them."""

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
_AROUND_MESSAGE = 12
"""Bytes that stand for what a chat template puts around one message: three tokens."""


class Sampled(msgspec.Struct, eq=False):
    """One row and its first request; ``request`` is None where the row ends before it.

    ``error`` says why. ``name`` is the exact request, so equal ones can be told.
    """

    row: Row
    request: Request | None
    error: str | None = None
    name: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer that the request asks for; None where it names no limit."""
        if self.request is None or self.request.body is None:
            return self.request.max_tokens if self.request else None
        for key in _LIMITS:
            limit = self.request.body.get(key)
            if isinstance(limit, int):
                return limit
        return None

    @property
    def messages(self) -> list[Message] | None:
        """The messages as they go over the wire; None for a prompt without a chat."""
        found = self._sent("messages")
        return found if isinstance(found, list) else None

    @property
    def prompt(self) -> str | None:
        """The raw text as it goes over the wire; None for a chat."""
        found = self._sent("prompt")
        return found if isinstance(found, str) else None

    @property
    def text(self) -> str:
        """The whole prompt as one text; marks of one common form stand for a chat template's."""
        messages = self.messages
        if messages is None:
            return self.prompt or ""
        parts = [f"<|{one.get('role')}|>\n{message_text(one)}" for one in messages]
        return "\n".join([*parts, "<|assistant|>\n"])

    @property
    def size(self) -> int:
        """Bytes of UTF-8 by which the tokens of the prompt are estimated; images do not count."""
        messages = self.messages
        if messages is None:
            return len((self.prompt or "").encode("utf-8", "replace"))
        said = sum(len(message_text(one).encode("utf-8", "replace")) for one in messages)
        return said + _AROUND_MESSAGE * (len(messages) + 1)

    @property
    def images(self) -> int:
        """How many images the messages hold."""
        parts = [one.get("content") for one in self.messages or ()]
        found = [part for content in parts if isinstance(content, list) for part in content]
        return sum(isinstance(part, dict) and "image_url" in part for part in found)

    def _sent(self, key: str) -> Json:
        request = self.request
        if request is None:
            return None
        if request.body is not None:
            return request.body.get(key)
        if (request.prompt is not None) != (key == "prompt"):
            return None
        return msgspec.json.decode(request.payload)


class _Listener:
    """Stands around conversations that are opened and never sent."""

    def __init__(self) -> None:
        self.ended: Outcome | None = None

    def now(self) -> float:
        """No time passes: nothing is sent."""
        return 0.0

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Never called: there are no replies to go on from."""
        raise AssertionError("a conversation went on without a reply")

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Keep why the row ended."""
        self.ended = outcome


MAX_LOOK_SECONDS = 20.0


def open_rows_as_requests(plan: StagePlan, rows: Iterable[Row]) -> list[Sampled]:
    """The first request of each row's first answer; nothing is sent.

    Rows are looked at for :data:`MAX_LOOK_SECONDS`: templates may take their time.
    """
    found: list[Sampled] = []
    deadline = time.monotonic() + MAX_LOOK_SECONDS
    for row in rows:
        if time.monotonic() > deadline:
            break
        listener = _Listener()
        conversation = Conversation(plan, row, 0, listener)
        call = conversation.open()
        if call is not None:
            found.append(Sampled(row, call.request, name=conversation.request_hash))
            continue
        error = listener.ended.error if listener.ended else None
        found.append(Sampled(row, None, error or "the row cannot be sent"))
    return found


def parameters(request: Request, model: str | None, *, native_schema: bool) -> dict[str, Json]:
    """The body of ``request`` as it goes out, less the prompt itself and streaming."""
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
    """The text of one message, its text parts joined; images leave nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def repeats(sample: Sequence[Sampled]) -> int:
    """How many requests of the sample are equal to an earlier one."""
    names = [one.name for one in sample if one.name is not None]
    return len(names) - len(set(names))
