"""The arguments of a call: parsing, validation and a canonical form."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from bagent.answers.schema.schema import OutputSchema
from bagent.answers.validation_messages import shorten
from bagent.text.json import decode_json
from bagent.text.unicode import MAX_DEPTH, clean_json, nested_deeper
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

MOST_BYTES = 1 << 20
"""Longest argument text that is read."""


def read_arguments(raw: str | Mapping[str, Json] | None) -> Arguments:
    """Return the object that ``raw`` is: a mapping, its JSON text, or that text as a JSON string.

    None, an empty text and ``null`` are no arguments.

    Raises:
        ToolFault: it is none of these.
    """
    value: Json = raw
    for _ in range(2):
        if isinstance(value, str):
            value = _decoded(value, outer=value is raw)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        text = shorten(repr(value), 80)
        raise ToolFault(f"the arguments are {text}, not a JSON object", "bad_arguments")
    if nested_deeper(dict(value)):
        raise ToolFault(f"the arguments are nested deeper than {MAX_DEPTH} levels", "bad_arguments")
    cleaned: Arguments = clean_json(dict(value))
    return cleaned


def _decoded(text: str, *, outer: bool) -> Json:
    if not text.strip():
        return None
    if len(text) > MOST_BYTES:
        raise ToolFault(f"the arguments are longer than {MOST_BYTES:,} characters", "bad_arguments")
    try:
        return decode_json(text)
    except ValueError as error:
        if not outer:  # the JSON string holds no JSON
            raise ToolFault(
                f"the arguments are {shorten(repr(text), 80)}, not a JSON object", "bad_arguments"
            ) from None
        raise ToolFault(
            f"the arguments are not JSON: {shorten(str(error))}; they begin {text[:80]!r}",
            "bad_arguments",
        ) from None


def check_arguments(arguments: Arguments, schema: OutputSchema) -> None:
    """Raise ToolFault where ``arguments`` do not fit ``schema``."""
    if not schema.accepts_clean(arguments):
        faults = schema.explain(arguments) or ["/: not what the schema asks for"]
        raise ToolFault("the arguments do not fit: " + "; ".join(faults), "bad_arguments")


def canonical(arguments: Arguments) -> bytes:
    """Return equal bytes for equal arguments, whatever the order of their keys."""
    try:
        return msgspec.json.encode(arguments, order="deterministic")
    except OverflowError:  # numbers beyond 64 bits
        return json.dumps(arguments, sort_keys=True, separators=(",", ":")).encode()
