"""Lines of a batch file: which of them can be sent, and what is kept of their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from bagent.backends.json_text import decode_json
from bagent.backends.line_replies import ROUTES, route_of
from bagent.store.codec import clean
from bagent.types import Json

SENT = ", ".join(f"/v1{route}" for route in ROUTES)
"""The routes of lines that can be sent, for people."""


def line_fault(data: dict[str, Json]) -> str | None:
    """Why a line of a batch file is no request that can be sent, None where it is one."""
    body, method, url = data.get("body"), data.get("method"), data.get("url")
    if data.get("custom_id") in (None, ""):
        return "the line has no custom_id"
    if method not in (None, "POST"):
        return f"method {method!s:.20}: lines are sent by POST"
    if not isinstance(body, dict):
        return "no body"
    if route_of(url) is None:
        return f"url {url!s:.80}: lines are sent to {SENT}"
    if body.get("n") not in (None, 1):
        return "n in its body: a line has one answer (write the line once for each of them)"
    if body.get("background"):
        return "background in its body: a line is answered at once"
    return None


def received_json(body: bytes) -> msgspec.Raw:
    """The body of an answer on one line, as JSON that every reader takes."""
    try:
        msgspec.json.decode(body)
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value: Any = decode_json(body)
        return msgspec.Raw(msgspec.json.encode(clean(value)))
