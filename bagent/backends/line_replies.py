"""Answers to request bodies that the user wrote, such as lines of a batch file, by their route."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from bagent.backends import embeddings, responses_wire
from bagent.backends.chat_wire import read_reply
from bagent.backends.request import Request
from bagent.types import Failure, Json, Reply

CHAT = "/chat/completions"
COMPLETIONS = "/completions"
ROUTES = (CHAT, COMPLETIONS, embeddings.PATH, responses_wire.PATH)
"""The routes of lines that can be sent."""


def route_of(url: Json) -> str | None:
    """The route below ``/v1`` that a line's ``url`` names, None where no such line can be sent."""
    if not isinstance(url, str):
        return None
    try:
        path = urlsplit(url).path
    except ValueError:
        return None
    return next((route for route in ROUTES if path.endswith(route)), None)


def read_line_reply(request: Request, raw: bytes, headers: Mapping[str, str]) -> Reply | Failure:
    """The reply in the body of an HTTP 200 answer to ``request``, with the body as received."""
    texts = (request.body or {}).get("input")
    return read_by_route(request.path, raw, headers, texts)


def read_by_route(
    path: str, raw: bytes, headers: Mapping[str, str], texts: Json = None
) -> Reply | Failure:
    """As :func:`read_line_reply`; ``texts`` None: how many were sent is not known."""
    if path == embeddings.PATH:
        reply = embeddings.read_vectors(raw, texts, headers)
    elif path == responses_wire.PATH:
        reply = responses_wire.read_response(raw, headers)
    else:
        reply = read_reply(raw, headers.get("Content-Type", ""), headers)
    return msgspec.structs.replace(reply, body=raw) if isinstance(reply, Reply) else reply
