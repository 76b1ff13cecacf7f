"""Keywords of JSON Schema: its drafts, the schemas inside a schema, and OpenAI's strict rules.

Sources: json-schema.org, drafts 4, 6, 7, 2019-09 and 2020-12; for the strict rules
platform.openai.com/docs/guides/structured-outputs, "Supported schemas": the root is an
object and no ``anyOf``; each object has ``additionalProperties: false`` and requires all of its
properties; a subset of keywords and formats; 10 levels, 5,000 properties, 1,000 enum values.
Keywords that the page does not mention count as unsupported: a schema sent without strict mode is
still validated here, while a refused one fails every row.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from bagent.answers.messages import pointer, shorten
from bagent.text.suggest import nearest_name
from bagent.types import Json

Pointer = tuple[str, ...]
"""A place in a document: keys and list indexes, as text."""

_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)


class SchemaDialect(NamedTuple):
    """One draft of JSON Schema.

    ``uri`` is its ``$schema``; ``id_key`` the keyword that names a schema; ``defs_key`` the one
    that holds definitions; ``ref_alone`` says that the neighbours of a ``$ref`` are ignored.
    """

    uri: str
    id_key: str
    defs_key: str
    ref_alone: bool


DEFAULT = SchemaDialect("https://json-schema.org/draft/2020-12/schema", "$id", "$defs", False)
"""The dialect of a schema that names none."""

DIALECTS: Mapping[str, SchemaDialect] = {
    dialect.uri.rstrip("#").partition("://")[2]: dialect
    for dialect in (
        DEFAULT,
        SchemaDialect("https://json-schema.org/draft/2019-09/schema", "$id", "$defs", False),
        SchemaDialect("http://json-schema.org/draft-07/schema#", "$id", "definitions", True),
        SchemaDialect("http://json-schema.org/draft-06/schema#", "$id", "definitions", True),
        SchemaDialect("http://json-schema.org/draft-04/schema#", "id", "definitions", True),
    )
}
"""The known dialects by ``$schema`` without scheme and without an empty fragment."""


def dialect_of(declared: Json) -> SchemaDialect | None:
    """Return the dialect that a ``$schema`` value names, None for an unknown one."""
    if not isinstance(declared, str):
        return None
    return DIALECTS.get(declared.strip().rstrip("#").partition("://")[2])


def children(schema: dict[str, Any]) -> Iterator[tuple[Pointer, Json]]:
    """Yield the direct subschemas of ``schema`` with their locations.

    Data (``enum``, ``const``, ``default``, ``examples``) and unknown keywords are not schemas.
    """
    for key in _ONE:
        if isinstance(schema.get(key), dict | bool):
            yield (key,), schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for index, item in enumerate(schema[key]):
                yield (key, str(index)), item
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            for name, item in schema[key].items():
                if isinstance(item, dict | bool):
                    yield (key, name), item


def walk(schema: Json) -> Iterator[tuple[Pointer, dict[str, Any]]]:
    """Yield every object schema in ``schema`` with its location; references are not followed."""
    stack: list[tuple[Pointer, Json]] = [((), schema)]
    while stack:
        location, item = stack.pop()
        if isinstance(item, dict):
            yield location, item
            stack.extend(
                (location + relative, child) for relative, child in reversed([*children(item)])
            )


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
    """Return a hint for a root without any keyword of JSON Schema; None for a schema."""
    if not isinstance(root, dict):
        return None
    inner = root.get("json_schema")
    if root.get("type") == "json_schema" or (isinstance(inner, dict) and not _ASKING & set(root)):
        return "this is a response_format: give what stands under its schema"
    if _ASKING & set(root) or not _unknown(root):
        return None
    if isinstance(root.get("file"), str):
        return f"a file is named by its path alone, schema: {root['file']}"
    if isinstance(root.get("schema"), dict):
        return 'give what stands under "schema"'
    return 'write {"type": "object", "properties": {"NAME": {"type": "string"}}, ...}'


_ALTERNATIVES = {"not", "if", "then", "else", "anyOf", "oneOf", "dependentSchemas"}
_DEFINITIONS = {"$defs", "definitions"}


def impossible_requirement(document: dict[str, Any]) -> str | None:
    """Say which closed object requires a property that it does not allow; None where none does.

    Alternatives are not looked at, nor what only they refer to: a schema may rule one of them out
    on purpose.
    """
    for location, schema in _without_alternatives(document):
        required, properties = schema.get("required"), schema.get("properties", {})
        if (
            schema.get("additionalProperties") is not False
            or schema.get("type", "object") != "object"
            or not isinstance(required, list)
            or schema.get("patternProperties")
        ):
            continue
        for name in required:
            if name not in properties:
                near = nearest_name(name, properties)
                has = shorten(near or ", ".join(properties) or "none", 60)
                return (
                    f"#{pointer(location)}: no object can be valid: required names"
                    f' "{shorten(name, 60)}", properties has {has}, and additionalProperties is'
                    " false"
                )
    return None


def _without_alternatives(document: dict[str, Any]) -> Iterator[tuple[Pointer, dict[str, Any]]]:
    """Yield the root and what it leads to, by keywords and local references, but no alternative."""
    schemas = dict(walk(document))
    seen: set[Pointer] = set()
    stack: list[Pointer] = [()]
    while stack:
        location = stack.pop()
        schema = schemas.get(location)
        if schema is None or location in seen:
            continue
        seen.add(location)
        yield location, schema
        stack += [
            location + relative
            for relative, _ in children(schema)
            if relative[0] not in _ALTERNATIVES | _DEFINITIONS
        ]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            parts = unquote(reference[2:]).split("/")
            stack.append(tuple(part.replace("~1", "/").replace("~0", "~") for part in parts))


def misspelled_keyword(document: dict[str, Any]) -> tuple[str, str] | None:
    """Return an unknown word near a keyword that asks for something, with a hint; None if none is.

    A word near one of two or three letters may be a note: ``note`` is no ``not``.
    """
    for location, schema in walk(document):
        for name in _unknown(schema):
            keyword = None if name in _INSTEAD else _near(name)
            if keyword in _ASKING and len(keyword) > 3:
                message = f'"{shorten(name, 60)}" is no keyword of JSON Schema'
                hint = f"did you mean {keyword}? A word of your own begins with x-"
                return f"#{pointer(location)}: {message}", hint
    return None


def unknown_keywords(document: dict[str, Any]) -> list[str]:
    """One line for each unknown word, with its first place and the keyword it may be."""
    first_use: dict[str, str] = {}
    for location, schema in walk(document):
        for name in _unknown(schema):
            first_use.setdefault(name, pointer(location))
    return [
        f'"{shorten(name, 60)}" is no keyword of JSON Schema and asks for nothing'
        f" (#{location}){_hint(name)}"
        for name, location in first_use.items()
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
    keyword = _near(name)
    return f": did you mean {keyword}?" if keyword else ""


def _near(name: str) -> str | None:
    """Return the keyword that an unknown word is near to, if any."""
    keywords = {word.lower(): word for word in _ASKING | _NOTES}
    near = difflib.get_close_matches(name.lower(), sorted(keywords), n=1, cutoff=0.75)
    return keywords[near[0]] if near else None


_STRICT_KEYWORDS = frozenset(
    (
        *("$schema", "$defs", "definitions", "$ref", "title", "description"),
        *("type", "enum", "const", "anyOf"),
        *("properties", "required", "additionalProperties"),
        *("items", "minItems", "maxItems", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_STRICT_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
)
_STRICT_TYPED = frozenset({"type", "anyOf", "$ref"})
_STRICT_LEVELS = 10
_STRICT_PROPERTIES = 5000
_STRICT_ENUM = 1000


_TYPE_NAMES: dict[type, str] = {
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
        names = list(dict.fromkeys(_TYPE_NAMES[type(value)] for value in values))
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
        if not _is_strict(schema) or _nesting(location) > _STRICT_LEVELS:
            return False
        properties += len(schema.get("properties", ()))
        values += len(schema.get("enum", ()))
    return properties <= _STRICT_PROPERTIES and values <= _STRICT_ENUM


def _is_strict(schema: dict[str, Any]) -> bool:
    if not schema.keys() <= _STRICT_KEYWORDS or not schema.keys() & _STRICT_TYPED:
        return False
    if "$ref" in schema and len(schema) > 1:
        return False
    if schema.get("format", "date") not in _STRICT_FORMATS or not isinstance(
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


def _nesting(location: Pointer) -> int:
    return sum(1 for part in location if part in ("properties", "items"))
