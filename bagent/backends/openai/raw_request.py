"""Request bodies written by the user in OpenAI's form, such as the lines of a batch file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bagent.backends.openai import embeddings, responses
from bagent.backends.openai.chat import read_reply
from bagent.backends.request import (
    EMBEDDINGS,
    CallSettings,
    OutputFormat,
    Request,
    encode_payload,
)
from bagent.types import Failure, Json, Reply

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "reasoning_effort"),
)
_LIMITS = ("max_completion_tokens", "max_tokens")
_ENVELOPE = frozenset(
    ("model", "messages", "tools", "response_format", "stream", "stream_options", "n", "user")
)


class _ToolCall(msgspec.Struct):
    function: dict[str, Any] | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Chat(msgspec.Struct):
    """The types of those fields of a chat that are read; others go on as they are."""

    messages: list[_Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def unpack_body(request: Request) -> Request:
    """Return ``request`` with settings and messages from its ``body``.

    Raises:
        ValueError: the body is no chat, has a field of another type, or asks for several answers.
    """
    body = request.body
    if body is None:
        return request
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("the body has no messages")
    try:
        msgspec.convert(body, _Chat)
    except msgspec.ValidationError as error:
        raise ValueError(f"the body is malformed: {error}") from None
    if body.get("n") not in (None, 1):
        raise ValueError("the body asks for several answers (n)")
    handled = {*_ENVELOPE, *_SAMPLING, *_LIMITS}
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    settings = CallSettings(
        model=request.settings.model or body.get("model"),
        sampling={name: body[name] for name in _SAMPLING if body.get(name) is not None},
        extra={name: value for name, value in body.items() if name not in handled},
        output=_output(body.get("response_format")),
        tools=tuple(body.get("tools") or ()),
    )
    return msgspec.structs.replace(
        request,
        settings=settings,
        payload=encode_payload(messages),
        messages=messages,
        body=None,
        max_tokens=limit if limit is not None else request.max_tokens,
    )


class ChatRequests:
    """Unpacks requests for an API that has only messages.

    Args:
        api: its name for people.
        ignored: sampling parameters that are not sent, with one notice for each.
    """

    def __init__(self, api: str, ignored: frozenset[str], notice: Callable[[str], None]) -> None:
        self._api = api
        self._ignored = ignored
        self._notice = notice
        self._noticed: set[str] = set()

    def unpack(self, request: Request) -> Request:
        """Return ``request`` as settings and messages.

        Raises:
            ValueError: it is a raw prompt, or its body is not supported.
        """
        if request.prompt is not None:
            raise ValueError(f"{self._api} has no raw prompts, only messages")
        request = unpack_body(request)
        for name in self._ignored & request.settings.sampling.keys() - self._noticed:
            self._noticed.add(name)
            self._notice(f"{self._api} has no {name}: it is left out")
        return request


def _output(response_format: Json) -> OutputFormat | None:
    if not isinstance(response_format, dict) or response_format.get("type") in (None, "text"):
        return None
    schema: Any = response_format.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ValueError(f"the response_format {response_format.get('type')} is not known here")
    name = str(schema.get("name") or "answer")
    return OutputFormat(name, encode_payload(schema["schema"]), bool(schema.get("strict")))


CHAT = "/chat/completions"
COMPLETIONS = "/completions"
ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS, responses.PATH)
"""The supported routes."""


def route_of(url: Json) -> str | None:
    """Return the route below ``/v1`` in a line's ``url``, None if it is not supported."""
    if not isinstance(url, str):
        return None
    try:
        path = urlsplit(url).path
    except ValueError:
        return None
    return next((route for route in ROUTES if path.endswith(route)), None)


def read_line_reply(request: Request, raw: bytes, headers: Mapping[str, str]) -> Reply | Failure:
    """Parse the body of an HTTP 200 response to ``request``; the reply keeps the body."""
    texts = (request.body or {}).get("input")
    return read_by_route(request.path, raw, headers, texts)


def read_by_route(
    path: str, raw: bytes, headers: Mapping[str, str], texts: Json = None
) -> Reply | Failure:
    """Parse a body by its route; ``texts`` is None if the number of inputs is unknown."""
    if path == EMBEDDINGS:
        reply = embeddings.read_vectors(raw, texts, headers)
    elif path == responses.PATH:
        reply = responses.read_response(raw, headers)
    else:
        reply = read_reply(raw, headers.get("Content-Type", ""), headers)
    return msgspec.structs.replace(reply, body=raw) if isinstance(reply, Reply) else reply
