"""The rules of OpenAI's strict structured outputs.

Source: platform.openai.com/docs/guides/structured-outputs, "Supported schemas": the root is an
object and no ``anyOf``; each object has ``additionalProperties: false`` and requires all of its
properties; a subset of keywords and formats; 10 levels, 5,000 properties, 1,000 enum values.
Keywords that the page does not mention count as unsupported: a schema sent without strict mode is
still validated here, while a refused one fails every row.
"""

from __future__ import annotations

import copy
from typing import Any

from bagent.answers.schema.dialects import Pointer, walk
from bagent.types import Json

_KEYWORDS = frozenset(
    (
        *("$schema", "$defs", "definitions", "$ref", "title", "description"),
        *("type", "enum", "const", "anyOf"),
        *("properties", "required", "additionalProperties"),
        *("items", "minItems", "maxItems", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
)
_TYPED = frozenset({"type", "anyOf", "$ref"})
_MAX_LEVELS = 10
_MAX_PROPERTIES = 5000
_MAX_ENUM = 1000


_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number",
    type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def with_types(document: Json) -> Json:
    """Return a copy of ``document`` in which each ``enum`` and ``const`` has a ``type``.

    OpenAI refuses a strict schema without it, and the values say what it is.
    """
    copied = copy.deepcopy(document)
    for _, schema in walk(copied):
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref"} or not values:
            continue
        names = list(dict.fromkeys(_NAMES[type(value)] for value in values))
        if "number" in names:  # which takes whole numbers as well
            names = [name for name in names if name != "integer"]
        schema["type"] = names[0] if len(names) == 1 else names
    return copied


def keeps_strict_rules(document: dict[str, Any]) -> bool:
    """Return True where OpenAI's strict mode takes ``document`` (self-contained) as it is."""
    if document.get("type") != "object" or "anyOf" in document:
        return False
    properties = values = 0
    for location, schema in walk(document):
        if not _keeps(schema) or _level(location) > _MAX_LEVELS:
            return False
        properties += len(schema.get("properties", ()))
        values += len(schema.get("enum", ()))
    return properties <= _MAX_PROPERTIES and values <= _MAX_ENUM


def _keeps(schema: dict[str, Any]) -> bool:
    if not schema.keys() <= _KEYWORDS or not schema.keys() & _TYPED:
        return False
    if "$ref" in schema and len(schema) > 1:
        return False
    if schema.get("format", "date") not in _FORMATS or not isinstance(
        schema.get("items", {}), dict
    ):
        return False
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "array" in types and "items" not in schema:
        return False
    children = (*schema.get("properties", {}).values(), *schema.get("anyOf", ()))
    return all(isinstance(child, dict) for child in children) and _is_closed(schema, types)


def _is_closed(schema: dict[str, Any], types: list[Any]) -> bool:
    if "object" not in types:
        return "properties" not in schema
    if schema.get("additionalProperties") is not False:
        return False
    return set(schema.get("required", ())) == set(schema.get("properties", {}))


def _level(location: Pointer) -> int:
    return sum(1 for part in location if part in ("properties", "items"))
