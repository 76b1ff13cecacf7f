"""Text that is always valid UTF-8, and JSON values that always fit JSON.

Python strings may hold lone surrogates and Python floats may be NaN or infinite; JSON in UTF-8
cannot. Stored values have visible text instead (``clean_``), requests U+FFFD (``wire_``).
"""

from __future__ import annotations

import math
import re

from bagent.types import Json

MAX_DEPTH = 200
"""Deepest accepted nesting of a JSON value (a list of numbers is 1 deep). Deeper values overflow
the C stack of validators and encoders."""

_SURROGATES = re.compile("[\ud800-\udfff]")


def join_surrogates(text: str) -> str:
    """Return ``text`` with each surrogate pair as its character; lone surrogates stay."""
    if is_utf8(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def is_utf8(text: str) -> bool:
    """Return True where ``text`` can be written as UTF-8, that is, has no surrogates."""
    return text.isascii() or _SURROGATES.search(text) is None


def clean_text(text: str) -> str:
    r"""Return ``text`` fit for UTF-8: a lone surrogate becomes the visible text ``\udXXX``.

    A pair of surrogates is the character that it stands for. Other text is returned as it is.
    """
    if is_utf8(text):
        return text
    return join_surrogates(text).encode("utf-8", "backslashreplace").decode("utf-8")


def wire_text(text: str) -> str:
    """Return ``text`` fit for a server: a lone surrogate becomes U+FFFD, pairs are joined."""
    if is_utf8(text):
        return text
    return _SURROGATES.sub("\ufffd", join_surrogates(text))


def clean_json(value: Json) -> Json:
    r"""Return a copy of a JSON value that can be written as valid UTF-8 JSON and read back.

    Lone surrogates in strings and keys become ``\udXXX``; NaN and infinities become the strings
    ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; tuples become lists. Where two keys become equal
    the later wins. The value must not be nested deeper than ``MAX_DEPTH``.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return float_or_text(value)
    # Plain loops: a comprehension would be a second Python frame for each level.
    if isinstance(value, dict):
        cleaned = {}
        for key, item in value.items():
            cleaned[clean_text(key) if isinstance(key, str) else key] = clean_json(item)
        return cleaned
    if isinstance(value, list | tuple):
        items = list(value)
        for index, item in enumerate(items):
            items[index] = clean_json(item)
        return items
    return value


def wire_json(value: Json) -> Json:
    """Return a copy of a JSON value fit for a server: its texts as ``wire_text`` makes them."""
    if isinstance(value, str):
        return wire_text(value)
    if isinstance(value, list | tuple):
        return [wire_json(item) for item in value]
    if isinstance(value, dict):
        return {wire_json(key): wire_json(item) for key, item in value.items()}
    return value


def float_or_text(value: float) -> float | str:
    """Return ``value``, or its name where JSON has none: ``NaN``, ``Infinity``, ``-Infinity``."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def nested_deeper(value: Json, limit: int = MAX_DEPTH) -> bool:
    """Return True where a JSON value is nested deeper than ``limit`` levels (never recurses)."""
    level = [value]
    for _ in range(limit):
        below: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
        if not below:
            return False
        level = below
    return any(isinstance(item, dict | list | tuple) for item in level)
