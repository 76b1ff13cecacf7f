"""JSON text to a value: exactly, or with repairs that cannot invent data.

Both readers take the later of two equal keys, as JSON readers commonly do, and keep integers
exact up to 4,300 digits (longer ones are refused, as in Python itself). Neither closes an open
bracket, ever.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from bagent.answers.sanitize import MAX_DEPTH, clean_json, nested_deeper
from bagent.types import Json


class NotJson:
    """The type of ``NOT_JSON``, which says that a text is not JSON (None is a JSON value)."""


NOT_JSON: Final = NotJson()

_decoder = msgspec.json.Decoder()
_lenient = json.JSONDecoder(strict=False)

_STRING_OR_COMMA = re.compile(
    r'[",](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|(?<=,)\s*+(?=[}\]]))', re.DOTALL
)


def decode_strict(text: str) -> Json | NotJson:
    """Return the value of ``text``, which must be JSON (RFC 8259) and no deeper than MAX_DEPTH.

    ``NOT_JSON`` for anything else, also for numbers beyond a double and lone surrogates.
    """
    try:
        value = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return NOT_JSON
    # The count of opening brackets bounds the depth and costs next to nothing.
    if text.count("[") + text.count("{") > MAX_DEPTH and nested_deeper(value):
        return NOT_JSON
    return value


def decode_lenient(text: str) -> Json | NotJson:
    r"""Return the value of almost-JSON ``text``, an object, array or string; else ``NOT_JSON``.

    Taken beyond JSON: trailing commas, raw control characters in strings, and what cannot be
    written back as JSON, which becomes text: ``NaN``, ``Infinity``, numbers beyond a double
    (``"Infinity"``), lone surrogates (visible ``\udXXX``).
    """
    for candidate in (text, _without_trailing_commas(text)):
        try:
            value = _lenient.decode(candidate)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict | list | str) or nested_deeper(value):
            return NOT_JSON
        return clean_json(value)
    return NOT_JSON


def _without_trailing_commas(text: str) -> str:
    def keep(match: re.Match[str]) -> str:
        token = match.group()
        if token[0] == '"' or not _after_value(text, match.start()):
            return token
        return ""

    return _STRING_OR_COMMA.sub(keep, text)


def _after_value(text: str, end: int) -> bool:
    """Whether a value ends before ``end``: ``[,]`` has none, and dropping its comma invents."""
    while end and text[end - 1] in " \t\r\n":
        end -= 1
    return bool(end) and text[end - 1] not in "[{,:"


def malformed_at(text: str) -> str:
    """Return words for why ``text``, which is not JSON, is not, with line and column."""
    try:
        _lenient.decode(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    except RecursionError:
        pass
    except ValueError as error:
        return str(error)
    return f"nested deeper than {MAX_DEPTH} levels"
