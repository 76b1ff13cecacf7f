"""Lines of OpenAI batch files: why one cannot be sent, and the body of its response."""

from __future__ import annotations

from typing import Any

import msgspec

from bagent.backends.openai.raw_request import CHAT, ROUTES, route_of
from bagent.store.journal.codec import clean
from bagent.text.json import decode_json
from bagent.text.suggest import describe_value
from bagent.types import Json

SENT_ROUTES = ", ".join(f"/v1{route}" for route in ROUTES)
"""The routes of batch file lines that can be sent, as text."""


def line_fault(data: dict[str, Json]) -> str | None:
    """Return why a line of a batch file cannot be sent, None if it can."""
    body, method, url = data.get("body"), data.get("method"), data.get("url")
    if data.get("custom_id") in (None, ""):
        return "the line has no custom_id"
    if method not in (None, "POST"):
        return f"method {method!s:.20}: lines are sent by POST"
    if not isinstance(body, dict):
        return "no body" if body is None else f"its body is {describe_value(body)}, not an object"
    if route_of(url) is None:
        return f"url {url!s:.80}: lines are sent to {SENT_ROUTES}"
    if route_of(url) == CHAT and not isinstance(body.get("messages"), list):
        return "no messages in its body"
    if body.get("n") not in (None, 1):
        return "n in its body: a line has one answer (write the line once for each of them)"
    if body.get("background"):
        return "background in its body: a line is answered at once"
    return None


def received_json(body: bytes) -> msgspec.Raw:
    """Return the body of a response on one line, as JSON that every reader accepts."""
    try:
        msgspec.json.decode(body)
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value: Any = decode_json(body)
        return msgspec.Raw(msgspec.json.encode(clean(value)))
