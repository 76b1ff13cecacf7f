"""Model calls, independent of a provider's wire format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bagent.text.unicode import wire_json
from bagent.types import Json, Message, ToolCall

EMBEDDINGS = "/embeddings"
"""The route of embeddings below ``/v1``."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON Schema that the server is asked to enforce."""

    name: str
    document: bytes
    """Self-contained JSON text."""
    strict: bool
    """Whether the schema obeys OpenAI's strict mode (closed objects, required properties)."""


class CallSettings(msgspec.Struct, frozen=True, eq=False):
    """The settings that all calls of a stage share; grouped calls share them."""

    model: str | None
    """None for ``auto``: the endpoint's own."""
    sampling: Mapping[str, Json]
    """OpenAI parameter names; only what the user set, since a model may refuse others."""
    extra: Mapping[str, Json]
    output: OutputFormat | None = None
    tools: Sequence[Json] = ()
    max_tokens: int | None = None
    """Separate from ``sampling`` because it is set per row."""
    schema_excludes_tools: bool = False
    """The endpoint may be unable to enforce ``output`` in calls that may call tools; see
    :mod:`bagent.backends.profile`."""

    def fingerprint(self) -> bytes:
        """Return bytes that differ for settings that may lead to different answers."""
        parts: list[Any] = [
            self.model,
            dict(self.sampling),
            dict(self.extra),
            list(self.tools),
            self.max_tokens,
            [self.output.name, self.output.document.decode(), self.output.strict]
            if self.output
            else None,
        ]
        try:
            text = _encode(parts)
        except UnicodeEncodeError:
            text = _encode(wire_json(parts))
        return hashlib.sha256(text).digest()


Watch = Callable[[], Callable[[ToolCall], None]]
"""Starts watching one streamed answer for tool calls; see :class:`Request`."""


class Request(msgspec.Struct):
    """One model call: chat ``messages``, a raw ``prompt``, or a whole ``body``."""

    settings: CallSettings
    payload: bytes
    """JSON text of messages, prompt or body, encoded once."""
    messages: list[Message] | None = None
    prompt: str | None = None
    body: dict[str, Json] | None = None
    """Written by the user, such as a line of an OpenAI batch file."""
    path: str = "/chat/completions"
    """The route of ``body``."""
    max_tokens: int | None = None
    seed: int | None = None
    """Overrides the settings' seed, for the further answers of a row."""
    stream: bool = False
    tool_choice: Json = None
    """For this call if the settings have none: ``none``, ``required`` or OpenAI's form of a
    function."""
    watch: Watch | None = None
    """Called once per streamed attempt; the result gets each complete tool call, on the event loop.
    """
    began: Callable[[], None] | None = None
    """Called at the first token of a streamed answer."""
    heard: Callable[[str, str], None] | None = None
    """Gets each piece of a streamed answer, ``text`` or ``reasoning``; only from Bedrock's backend.
    """
    returning: int = 0
    """The turns with tools behind this one; an engine with priorities serves it earlier, while its
    cache holds them."""


def requested_model(request: Request) -> str | None:
    """Return the model that ``request`` names, None for the endpoint's own."""
    model = request.settings.model or (request.body or {}).get("model")
    return model if isinstance(model, str) else None


BODY_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of a body that limit its answer, of all APIs."""


def answer_limit(request: Request) -> int | None:
    """Return the most tokens that ``request`` lets its answer have; None without a limit.

    A body written by the user has its own limit, the largest of its fields; embeddings have 0.
    """
    if request.body is None:
        return request.max_tokens
    if request.path == EMBEDDINGS:
        return 0
    limits = [request.body.get(name) for name in BODY_LIMITS]
    return max((limit for limit in limits if type(limit) is int and limit > 0), default=None)


def encode_payload(value: Json) -> bytes:
    """Return compact JSON text of ``value`` in valid UTF-8; lone surrogates become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(wire_json(value))
