"""A value that is valid under a JSON Schema, chosen by a number: enough of the language for tests.

Known: ``type``, ``enum``, ``const``, ``properties``, ``items``, ``prefixItems``, ``minItems``,
``minLength``, ``minimum``, ``maximum``, ``anyOf``, ``oneOf``, ``allOf`` (merged), local ``$ref``
and the common formats. Optional properties are filled as well.
"""

from __future__ import annotations

from typing import Any

Json = Any

FORMATS = {
    "date-time": "2024-05-06T07:08:09Z",
    "date": "2024-05-06",
    "time": "07:08:09Z",
    "email": "a@example.org",
    "uri": "https://example.org/a",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.org",
}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "hazel")


def instance(schema: Json, seed: int, root: Json = None, depth: int = 0) -> Json:
    """Return a value valid under ``schema``; the same ``seed`` gives the same value.

    Args:
        schema: a JSON Schema as a Python value.
        seed: any number of at least 0; it picks among enum members, numbers and words.
        root: the schema that local references start from; default ``schema``.
        depth: how deep in the schema; past 20 recursion is cut by None.
    """
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > 20:
        return None
    if "$ref" in schema:
        return instance(_resolve(root, schema["$ref"]), seed, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][seed % len(schema["enum"])]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return instance(schema[word][0], seed, root, depth + 1)
    if "allOf" in schema:
        merged = {key: value for part in schema["allOf"] for key, value in part.items()}
        return instance(merged, seed, root, depth + 1)
    return _typed(schema, seed, root, depth)


def _typed(schema: dict[str, Json], seed: int, root: Json, depth: int) -> Json:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind == "object":
        properties = schema.get("properties", {}).items()
        return {
            key: instance(part, seed + place, root, depth + 1)
            for place, (key, part) in enumerate(properties)
        }
    if kind == "array":
        first = schema.get("prefixItems", [])
        count = max(schema.get("minItems", 1), len(first))
        items = [*first, *([schema.get("items", {"type": "string"})] * (count - len(first)))]
        return [instance(part, seed + i, root, depth + 1) for i, part in enumerate(items)]
    if kind in ("integer", "number"):
        low = schema.get("minimum", 0)
        value = low + seed % 7
        return min(value, schema["maximum"]) if "maximum" in schema else value
    if kind == "boolean":
        return seed % 2 == 0
    return None if kind == "null" else _text(schema, seed)


def _text(schema: dict[str, Json], seed: int) -> str:
    if schema.get("format") in FORMATS:
        return FORMATS[schema["format"]]
    word = WORDS[seed % len(WORDS)]
    word = word.ljust(schema.get("minLength", 0), "x")
    return word[: schema.get("maxLength", len(word))]


def _resolve(root: Json, reference: str) -> Json:
    node = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            node = node[part.replace("~1", "/").replace("~0", "~")]
    return node
