"""What one model call asks for, before any provider's wire form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bagent.text.unicode import wire_json
from bagent.types import Json, Message, ToolCall

_encode = msgspec.json.Encoder(order="deterministic").encode


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON Schema that the server is asked to enforce.

    ``document`` is self-contained JSON text. ``strict`` says whether the schema keeps OpenAI's
    strict-mode rules (every object closed, every property required).
    """

    name: str
    document: bytes
    strict: bool


class CallSettings(msgspec.Struct, frozen=True, eq=False):
    """What all calls of one stage share; calls travel in one group only if they share it.

    ``sampling`` holds OpenAI parameter names; only what the user set is in it, so that nothing
    is sent that a model might refuse. ``max_tokens`` stands apart since it is per row.
    ``model`` is None for ``auto``: the endpoint's own. ``apart``: the endpoint may not be able to
    enforce ``output`` in calls that may also call tools; see :mod:`bagent.backends.profile`.
    """

    model: str | None
    sampling: Mapping[str, Json]
    extra: Mapping[str, Json]
    output: OutputFormat | None = None
    tools: Sequence[Json] = ()
    max_tokens: int | None = None
    apart: bool = False

    def fingerprint(self) -> bytes:
        """Bytes that differ whenever two settings may lead to different answers."""
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
"""Begins to watch one streamed answer for tool calls; see :class:`Request`."""


class Request(msgspec.Struct):
    """One model call: chat ``messages``, or ``prompt`` (raw text), or a whole ``body``.

    ``payload`` is the JSON text of messages, prompt or body: encoded once, hashed and sent.
    ``body`` is a request body that the user wrote himself (a line of an OpenAI batch file);
    ``path`` is then the route it is meant for, such as ``/chat/completions``.
    ``seed`` overrides the settings' seed, for the second and later answers of one row.
    ``tool_choice`` is for this call, where the settings say nothing: ``none``, ``required`` or, in
    OpenAI form, the one function that has to be called.
    ``watch`` is called once for each time that the call is streamed; what it gives back gets every
    tool call as soon as its arguments are whole, on the event loop.
    ``began`` is called at the first token of a streamed answer.
    ``heard`` gets each piece of a streamed answer on the event loop, ``text`` or ``reasoning`` and
    its words; Bedrock's backend alone tells them, to clients of another protocol.
    ``returning`` is how many turns with tools the conversation has behind it: an engine that can
    serves it the earlier, while its cache holds what came before.
    """

    settings: CallSettings
    payload: bytes
    messages: list[Message] | None = None
    prompt: str | None = None
    body: dict[str, Json] | None = None
    path: str = "/chat/completions"
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = False
    tool_choice: Json = None
    watch: Watch | None = None
    began: Callable[[], None] | None = None
    heard: Callable[[str, str], None] | None = None
    returning: int = 0


def requested_model(request: Request) -> str | None:
    """Return the model that ``request`` names, None where the endpoint's own is asked."""
    model = request.settings.model or (request.body or {}).get("model")
    return model if isinstance(model, str) else None


def encode_payload(value: Json) -> bytes:
    """Compact JSON text of ``value``, always valid UTF-8: a lone surrogate becomes U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(wire_json(value))
