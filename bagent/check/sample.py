"""The sampled rows as the requests that a run would send for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bagent.agents.conversation import Conversation
from bagent.agents.plan import StagePlan
from bagent.backends.openai.chat import BodyWriter
from bagent.backends.openai.responses import ResponsesWriter, goes_to_responses
from bagent.backends.request import EMBEDDINGS, Request, answer_limit, encode_payload
from bagent.types import Json, Message, Outcome, Row

_PROMPT_KEYS = ("messages", "prompt", "input", "instructions")
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
        """Return the limit of the answer in the request; None without one, 0 for embeddings."""
        return None if self.request is None else answer_limit(self.request)

    @property
    def generates(self) -> bool:
        """Whether the request asks for text, not for embeddings."""
        return self.request is not None and self.request.path != EMBEDDINGS

    @property
    def messages(self) -> list[Message] | None:
        """Return the messages on the wire; None for a prompt without a chat."""
        messages, system = self._wire_value("messages"), self._wire_value("instructions")
        if isinstance(messages, list):
            return messages
        text = self._wire_value("input")
        if not _is_conversation(text):
            if not system or not isinstance(text, str):
                return None
            text = [{"role": "user", "content": text}]
        return [{"role": "system", "content": system}, *text] if system else text

    @property
    def prompt(self) -> str | None:
        """Return the raw text on the wire, several texts on a line each; None for a chat."""
        value = self._wire_value("prompt") or self._wire_value("input")
        if isinstance(value, str) or value is None:
            return value
        if _is_conversation(value):
            return None
        texts = value if isinstance(value, list) and not _is_ids(value) else [value]
        return "\n".join(text if isinstance(text, str) else _json(text) for text in texts)

    @property
    def is_one_text(self) -> bool:
        """Whether a tokenizer can count the prompt: one text or one chat."""
        value = self._wire_value("prompt") or self._wire_value("input")
        return self.messages is not None or isinstance(value, str)

    @property
    def text(self) -> str:
        """Return the prompt as one text, with generic marks in place of the chat template's."""
        messages = self.messages
        if messages is None:
            return self.prompt or ""
        parts = [f"<|{message.get('role')}|>\n{message_text(message)}" for message in messages]
        return "\n".join([*parts, "<|assistant|>\n"])

    @property
    def token_ids(self) -> int:
        """Return the number of token ids in a prompt that is made of them; 0 for text."""
        value = self._wire_value("prompt") or self._wire_value("input")
        if not isinstance(value, list):
            return 0
        if _is_ids(value):
            return len(value)
        return sum(map(len, value)) if all(map(_is_ids, value)) else 0

    @property
    def size(self) -> int:
        """Return the bytes of UTF-8 by which tokens are estimated, without images."""
        messages = self.messages
        if messages is None:
            return len((self.prompt or "").encode("utf-8", "replace"))
        size = sum(len(message_text(message).encode("utf-8", "replace")) for message in messages)
        return size + _TEMPLATE_BYTES * (len(messages) + 1)

    @property
    def tools_size(self) -> int:
        """Return the bytes of the definitions of tools in the request."""
        request = self.request
        if request is None:
            return 0
        tools = request.settings.tools if request.body is None else request.body.get("tools")
        return len(encode_payload(tools)) if tools else 0

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
        if key != ("messages" if request.prompt is None else "prompt"):
            return None
        return msgspec.json.decode(request.payload)


def _is_conversation(value: Json) -> bool:
    """Return whether the ``input`` of a response is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) for x in value)


def _is_ids(value: Json) -> bool:
    """Return whether a value is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, int) for x in value)


def _json(value: Json) -> str:
    return msgspec.json.encode(value).decode()


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
        conversation = Conversation(plan, row, 0)
        step = conversation.open()
        if isinstance(step, Outcome):
            sample.append(Sampled(row, None, step.error or "the row cannot be sent"))
        else:
            sample.append(Sampled(row, step.request, name=conversation.request_hash))
    return sample


def as_embeddings(sample: Iterable[Sampled]) -> list[Sampled]:
    """Return the sample of an ``embed`` stage: texts to ``/v1/embeddings`` in place of chats."""
    return [_as_embedding(sampled) for sampled in sample]


def _as_embedding(sampled: Sampled) -> Sampled:
    request = sampled.request
    if request is None:
        return sampled
    text = sampled.prompt
    if text is None:
        text = "\n".join(str(message.get("content")) for message in sampled.messages or ())
    body: dict[str, Json] = {"model": request.settings.model, "input": text}
    embedding = Request(request.settings, encode_payload(body), body=body, path=EMBEDDINGS)
    return msgspec.structs.replace(sampled, request=embedding, name=None)  # equal texts are sent


def parameters(
    request: Request, model: str | None, *, native_schema: bool, api: str
) -> dict[str, Json]:
    """Return the body of ``request`` on the wire without the prompt and streaming."""
    by_responses = goes_to_responses(request, api, model or "")
    make_writer = ResponsesWriter if by_responses else BodyWriter
    body: dict[str, Any] = msgspec.json.decode(
        make_writer(model or "", native_schema=native_schema).body(
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
