"""Seeded instances of a JSON Schema: the simulated model's constrained answers.

The generator reads the keywords that shape a value (``type enum const properties required items
prefixItems minItems ...``), merges ``allOf`` and a drawn branch of ``anyOf``, ``oneOf`` and
``if``, and follows local ``$ref``. Other keywords (``not``, ``dependentSchemas``, complex
``contains``) are left to chance: candidates are drawn until one is valid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from bagent.sim.text import UnsupportedPattern, formatted_text, matching_text, random_words
from bagent.types import Json

_MAX_ATTEMPTS = 40
_DEEP_NESTING = 4
"""Nesting from which the shortest way to an end is taken: no optional parts, short arrays."""

_MAX_DEPTH = 40
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_TYPE_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_MERGED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else")


class UnsatisfiableSchema(ValueError):
    """The schema is broken, or no valid instance was found."""


class SchemaSampler:
    """Makes valid instances of one schema.

    Args:
        schema: a JSON Schema; remote references are refused.

    Raises:
        UnsatisfiableSchema: it is not a JSON Schema.
    """

    def __init__(self, schema: Json) -> None:
        import jsonschema_rs

        if not isinstance(schema, dict | bool):
            raise UnsatisfiableSchema("a JSON schema is an object")
        try:
            self._valid: Callable[[Json], bool] = jsonschema_rs.validator_for(
                schema, offline=True
            ).is_valid
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            first = str(error).partition("\n")[0]
            raise UnsatisfiableSchema(f"not a usable JSON schema: {first}") from None
        self._schema = schema

    def make(self, rng: random.Random) -> Json:
        """Return one valid instance, the same for the same state of ``rng``.

        Raises:
            UnsatisfiableSchema: no attempt was valid.
        """
        for attempt in range(_MAX_ATTEMPTS):
            drawing = _Attempt(self._schema, rng, plain=attempt >= _MAX_ATTEMPTS // 2)
            try:
                value = drawing.value(self._schema, 0)
            except (UnsupportedPattern, _DeadEnd):
                continue
            if self._valid(value):
                return value
        raise UnsatisfiableSchema("the simulated engine found no valid instance of this schema")


class _DeadEnd(ValueError):
    pass


class _Attempt:
    """One attempt at one instance; ``plain`` omits everything optional."""

    def __init__(self, root: Json, rng: random.Random, *, plain: bool) -> None:
        self.root = root
        self.rng = rng
        self.plain = plain

    def value(self, schema: Json, depth: int) -> Json:
        if depth > _MAX_DEPTH:
            raise _DeadEnd("the schema nests without end")
        if not isinstance(schema, dict):
            return random_words(self.rng, 2)
        merged = self._flatten(schema, depth, 0)
        if "const" in merged:
            return merged["const"]
        if isinstance(merged.get("enum"), list) and merged["enum"]:
            return self.rng.choice(merged["enum"])
        kind = self._kind(merged, depth)
        if kind == "object":
            return self._object(merged, depth)
        if kind == "array":
            return self._array(merged, depth)
        if kind == "string":
            return self._string(merged)
        if kind in ("integer", "number"):
            return self._number(merged, integer=kind == "integer")
        return None if kind == "null" else self.rng.random() < 0.5

    def _flatten(self, schema: dict[str, Any], depth: int, hops: int) -> dict[str, Any]:
        """Return the schema with references followed and one branch of each choice merged in."""
        if hops > _MAX_DEPTH:
            raise _DeadEnd("references go round in a circle")
        if not any(keyword in schema for keyword in _MERGED):
            return schema
        merged = {k: v for k, v in schema.items() if k not in _MERGED}
        parts: list[Json] = list(schema.get("allOf") or ())
        references = (schema.get(keyword) for keyword in ("$ref", "$dynamicRef"))
        parts += [
            self._resolve(reference) for reference in references if isinstance(reference, str)
        ]
        choices = (schema.get(keyword) for keyword in ("anyOf", "oneOf"))
        parts += [self._branch(branches, depth) for branches in choices if branches]
        if "if" in schema:
            if self.rng.random() < 0.5:
                parts += [schema["if"], schema.get("then", True)]
            else:
                parts.append(schema.get("else", True))
        for part in parts:
            if isinstance(part, dict):
                merged = _merge(merged, self._flatten(part, depth, hops + 1))
        return merged

    def _branch(self, branches: list[Json], depth: int) -> Json:
        if depth >= _DEEP_NESTING or self.plain:
            ends = [b for b in branches if not _nests(b)]
            branches = ends or branches
        return self.rng.choice(branches)

    def _resolve(self, reference: str) -> Json:
        """Return the target of a local reference (``#``, ``#/a/b``, ``#name``)."""
        base, _, fragment = reference.partition("#")
        if base and base != (self.root.get("$id") if isinstance(self.root, dict) else None):
            return self._find_by_name("$id", base)
        if fragment and not fragment.startswith("/"):
            return self._find_by_name("$anchor", fragment, "$dynamicAnchor")
        target: Json = self.root
        for step in unquote(fragment).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            target = target[int(key)] if isinstance(target, list) else target[key]
        return target

    def _find_by_name(self, keyword: str, name: str, other_keyword: str = "") -> Json:
        stack: list[Json] = [self.root]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                if node.get(keyword) == name or (other_keyword and node.get(other_keyword) == name):
                    return node
                stack.extend(node.values())
            elif isinstance(node, list):
                stack.extend(node)
        return True

    def _kind(self, schema: dict[str, Any], depth: int) -> str:
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return kinds
        if isinstance(kinds, list) and kinds:
            simple = [k for k in kinds if k not in ("object", "array")]
            return str(self.rng.choice(simple if simple and depth >= _DEEP_NESTING else kinds))
        for kind, keywords in _TYPE_KEYWORDS.items():
            if any(keyword in schema for keyword in keywords):
                return kind
        return self.rng.choice(_TYPES[2:]) if self.plain or "not" in schema else "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Json]:
        properties: dict[str, Json] = schema.get("properties") or {}
        required = list(schema.get("required") or ())
        sparse = self.plain or depth >= _DEEP_NESTING
        value: dict[str, Json] = {}
        for name, part in properties.items():
            if name in required or (not sparse and part is not False and self.rng.random() < 0.85):
                value[name] = self.value(part, depth + 1)
        for name in required:
            if name not in value:
                value[name] = self.value(self._property_schema(schema, name), depth + 1)
        names = schema.get("propertyNames") or {}
        for _ in range(50):
            if len(value) >= schema.get("minProperties", 0):
                break
            name = str(self.value({"type": "string", "maxLength": 12, **names}, depth + 1))
            if schema.get("additionalProperties", True) is False:
                name = self._extra_name(schema, value)
            value.setdefault(name, self.value(self._property_schema(schema, name), depth + 1))
        return value

    def _extra_name(self, schema: dict[str, Any], value: dict[str, Json]) -> str:
        """Return a further name where only listed ones are allowed."""
        unused = [n for n in schema.get("properties") or {} if n not in value]
        if unused:
            return str(self.rng.choice(unused))
        patterns = list(schema.get("patternProperties") or {})
        if not patterns:
            return "more"
        return matching_text(self.rng, self.rng.choice(patterns), self.rng.randint(1, 12))

    def _property_schema(self, schema: dict[str, Any], name: str) -> Json:
        """Return the schema of property ``name``, listed or not."""
        properties = schema.get("properties") or {}
        if name in properties:
            return properties[name]
        patterns = schema.get("patternProperties") or {}
        if len(patterns) == 1:
            return next(iter(patterns.values()))
        extra = schema.get("additionalProperties")
        return extra if isinstance(extra, dict) else {"type": "string"}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Json]:
        first, others = _items(schema)
        min_items = max(schema.get("minItems", 0), 1 if "contains" in schema else 0)
        max_items = schema.get("maxItems", max(min_items, len(first)) + 3)
        if others is False:
            max_items = min(max_items, len(first))
        count = 0 if self.plain or depth >= _DEEP_NESTING else self.rng.randint(1, 3)
        length = min(
            max(min_items, count, 0 if self.plain else len(first)), max(max_items, min_items)
        )
        items: list[Json] = []
        for i in range(length * 20 if schema.get("uniqueItems") else length):
            if len(items) == length:
                break
            part = first[len(items)] if len(items) < len(first) else others
            if "contains" in schema and i < schema.get("minContains", 1):
                part = _merge(part if isinstance(part, dict) else {}, schema["contains"])
            item = self.value(part, depth + 1)
            if not schema.get("uniqueItems") or item not in items:
                items.append(item)
        return items

    def _string(self, schema: dict[str, Any]) -> str:
        min_length = int(schema.get("minLength", 0))
        max_length = schema.get("maxLength")
        if isinstance(schema.get("pattern"), str):
            return matching_text(self.rng, schema["pattern"], min_length, max_length)
        if isinstance(schema.get("format"), str):
            formatted = formatted_text(self.rng, schema["format"])
            if formatted is not None:
                return formatted
        text = random_words(self.rng, self.rng.randint(2, 6))
        while len(text) < min_length:
            text += " " + random_words(self.rng, 4)
        if max_length is not None:
            text = text[: max(int(max_length), min_length)]
        return text if len(text.strip()) < min_length else text.strip()

    def _number(self, schema: dict[str, Any], *, integer: bool) -> int | float:
        low, high = _bounds(schema, integer=integer)
        step = schema.get("multipleOf")
        if step:
            first, last = math.ceil(low / step), math.floor(high / step)
            if last < first:
                raise _DeadEnd("no multiple lies between the bounds")
            return self._multiple(step, first, last)
        if integer:
            if math.floor(high) < math.ceil(low):
                raise _DeadEnd("no whole number lies between the bounds")
            return self.rng.randint(math.ceil(low), math.floor(high))
        value = low + (high - low) * self.rng.random()
        rounded = round(value, 2)
        return rounded if low <= rounded <= high else value

    def _multiple(self, step: float, first: int, last: int) -> int | float:
        """Return ``step`` times a number from ``first`` to ``last``.

        In binary fractions 1.2 is no multiple of 0.1, so a product that divides evenly is sought.
        """
        value: int | float = 0
        for _ in range(_MAX_ATTEMPTS):
            value = self.rng.randint(first, last) * step
            if isinstance(step, int) or float(value).is_integer():
                return int(value)
            value = round(value, 10)
            if (value / step).is_integer():
                break
        return value


def _nests(schema: Json) -> bool:
    """Return whether a branch may lead deeper: a reference, an object or an array."""
    if not isinstance(schema, dict):
        return False
    keywords = ("$ref", "$dynamicRef", "properties", "items", "allOf", "anyOf", "oneOf")
    return any(keyword in schema for keyword in keywords) or schema.get("type") in (
        "object",
        "array",
    )


def _items(schema: dict[str, Any]) -> tuple[list[Json], Json]:
    """Return the schemas of the first items and of the others; a list as ``items`` is the older
    syntax."""
    if isinstance(schema.get("items"), list):
        return schema["items"], schema.get("additionalItems", True)
    return list(schema.get("prefixItems") or ()), schema.get("items", True)


def _bounds(schema: dict[str, Any], *, integer: bool) -> tuple[float, float]:
    """Return the inclusive range to draw from; 0 to 100 where nothing bounds it."""
    gap = 1 if integer else 1e-6
    lows = [schema["minimum"]] if "minimum" in schema else []
    highs = [schema["maximum"]] if "maximum" in schema else []
    below, above = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(below, bool):
        lows = [n + gap for n in lows] if below else lows
    elif below is not None:
        lows.append(math.floor(below) + 1 if integer else below + gap)
    if isinstance(above, bool):
        highs = [n - gap for n in highs] if above else highs
    elif above is not None:
        highs.append(math.ceil(above) - 1 if integer else above - gap)
    low = max(lows) if lows else None
    high = min(highs) if highs else None
    if low is None:
        low = 0 if high is None or high >= 0 else high - 100
    return low, low + 100 if high is None else high


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Merge two schemas keyword by keyword, as far as that is possible."""
    merged = dict(base)
    for keyword, value in extra.items():
        if keyword not in merged:
            merged[keyword] = value
            continue
        merger = _MERGERS.get(keyword)
        merged[keyword] = merger(merged[keyword], value) if merger else value
    return merged


def _merge_properties(base: dict[str, Json], extra: dict[str, Json]) -> dict[str, Json]:
    merged = dict(base)
    for name, part in extra.items():
        both = merged.get(name)
        if isinstance(both, dict) and isinstance(part, dict):
            merged[name] = {"allOf": [both, part]}
        elif both is not False:
            merged[name] = part
    return merged


def _merge_types(base: Json, extra: Json) -> Json:
    base_types = base if isinstance(base, list) else [base]
    extra_types = extra if isinstance(extra, list) else [extra]
    both = [t for t in _TYPES if _allows(base_types, t) and _allows(extra_types, t)]
    return both if len(both) > 1 else (both[0] if both else extra)


def _allows(kinds: list[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


_MERGERS: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _merge_properties,
    "patternProperties": _merge_properties,
    "required": lambda base, extra: list(dict.fromkeys([*base, *extra])),
    "type": _merge_types,
    "enum": lambda base, extra: [v for v in base if v in extra],
    "items": lambda base, extra: (
        _merge(base, extra) if isinstance(base, dict) and isinstance(extra, dict) else extra
    ),
    "additionalProperties": lambda base, extra: False if base is False or extra is False else extra,
    **dict.fromkeys(("minimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("exclusiveMinimum",), max),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), min),
    **dict.fromkeys(("exclusiveMaximum",), min),
}
