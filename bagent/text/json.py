"""JSON text in and out.

msgspec does the work. Python's ``json`` handles what msgspec refuses: lone surrogates, NaN,
byte-order marks, numbers beyond a double, broken UTF-8.
"""

from __future__ import annotations

import json

import msgspec

from bagent.types import Json

_decode = msgspec.json.decode
_encode = msgspec.json.encode


def decode_json(raw: bytes | str, *, strict: bool = False) -> Json:
    """Return the value of JSON text; takes lone surrogates, NaN and a byte-order mark too.

    Bytes that are not UTF-8 become U+FFFD; with ``strict`` they are an error.

    Raises:
        UnicodeDecodeError: ``strict`` is set, and it is JSON with bytes that are not UTF-8.
        ValueError: it is not JSON, or it is nested too deeply.
    """
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
        try:
            value = json.loads(text.removeprefix("\ufeff"))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if strict and isinstance(raw, bytes):
            raw.decode()
        return value


def json_or_none(raw: bytes | str) -> Json:
    """Return the value of JSON text, None for ``null`` and for what is not JSON."""
    try:
        return decode_json(raw)
    except ValueError:
        return None


def encode_json(value: Json) -> str:
    """Return the compact JSON text of a value; a lone surrogate stays as its ``\\udXXX`` escape.

    Raises:
        ValueError: it is nested too deeply.
    """
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:
        # Twice, since NaN and infinities are null in what msgspec writes.
        value = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
