"""Words in a schema that JSON Schema does not know, and so lets pass without asking for anything.

A misspelt keyword, an example in place of a schema or a schema in another's wrapping would accept
every answer, and nobody would see it.
"""

from __future__ import annotations

import difflib
from typing import Any

from bagent.answers.dialects import walk
from bagent.answers.words import pointer, shorten
from bagent.types import Json

_NOTES = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$comment", "$defs", "definitions", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly"),
    )
)
"""Keywords that ask for nothing themselves."""

_ASKING = frozenset(
    (
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then"),
        *("else", "dependentSchemas", "dependencies", "dependentRequired", "prefixItems", "items"),
        *("additionalItems", "contains", "minContains", "maxContains", "properties"),
        *("patternProperties", "additionalProperties", "propertyNames", "unevaluatedItems"),
        *("unevaluatedProperties", "type", "enum", "const", "multipleOf", "maximum"),
        *("exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern"),
        *("maxItems", "minItems", "uniqueItems", "maxProperties", "minProperties", "required"),
        *("format", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_OTHERS = frozenset(
    ("discriminator", "example", "xml", "externalDocs", "propertyOrdering", "enumNames")
)
"""What OpenAPI and generators of schemas write for other readers."""

_INSTEAD = {"nullable": 'write "type": ["string", "null"]', "optional": "leave it out of required"}


def no_schema(root: Json) -> str | None:
    """How to mend a root that has words, but no keyword of JSON Schema; None for a schema."""
    if not isinstance(root, dict):
        return None
    inner = root.get("json_schema")
    if root.get("type") == "json_schema" or (isinstance(inner, dict) and not _ASKING & set(root)):
        return "this is a response_format: give what stands under its schema"
    if _ASKING & set(root) or not _unknown(root):
        return None
    if isinstance(root.get("schema"), dict):
        return 'give what stands under "schema"'
    return 'write {"type": "object", "properties": {"NAME": {"type": "string"}}, ...}'


def unknown_keywords(document: dict[str, Any]) -> list[str]:
    """One line for each unknown word, with its first place and the keyword it may be."""
    found: dict[str, str] = {}
    for place, schema in walk(document):
        for name in _unknown(schema):
            found.setdefault(name, pointer(place))
    return [
        f'"{shorten(name, 60)}" is no keyword of JSON Schema and asks for nothing'
        f" (#{place}){_hint(name)}"
        for name, place in found.items()
    ]


def _unknown(schema: dict[str, Any]) -> list[str]:
    return [
        name
        for name in schema
        if name not in _ASKING and name not in _NOTES and name not in _OTHERS and name[:2] != "x-"
    ]


def _hint(name: str) -> str:
    if name in _INSTEAD:
        return f": {_INSTEAD[name]}"
    known = {word.lower(): word for word in _ASKING | _NOTES}
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.75)
    return f": did you mean {known[near[0]]}?" if near else ""
