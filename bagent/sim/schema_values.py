"""Seeded instances of a JSON Schema: what a simulated model answers when a schema binds it.

The generator reads the keywords that shape a value (``type enum const properties required items
prefixItems minItems ...``), merges ``allOf`` and a drawn branch of ``anyOf``, ``oneOf`` and
``if``, and follows local ``$ref``. What it cannot read that way (``not``, ``dependentSchemas``,
``contains`` beyond the simple) is left to chance: candidates are drawn until one is valid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from bagent.sim.regex_text import UnsupportedPattern, formatted_text, matching_text
from bagent.sim.text import some_words
from bagent.types import Json

_TRIES = 40
_DEEP = 4
"""Nesting from which the shortest way to an end is taken: no optional parts, short arrays."""

_DEEPEST = 40
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_HINTS = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_MERGED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else")


class NoInstance(ValueError):
    """The schema is broken, or no valid instance was found."""


class InstanceMaker:
    """Makes valid instances of one schema.

    Args:
        schema: a JSON Schema; remote references are refused.

    Raises:
        NoInstance: it is not a JSON Schema.
    """

    def __init__(self, schema: Json) -> None:
        import jsonschema_rs

        if not isinstance(schema, dict | bool):
            raise NoInstance("a JSON schema is an object")
        try:
            self._valid: Callable[[Json], bool] = jsonschema_rs.validator_for(
                schema, offline=True
            ).is_valid
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            first = str(error).partition("\n")[0]
            raise NoInstance(f"not a usable JSON schema: {first}") from None
        self._schema = schema

    def make(self, rng: random.Random) -> Json:
        """One valid instance, the same for the same state of ``rng``.

        Raises:
            NoInstance: none of some tries was valid.
        """
        for attempt in range(_TRIES):
            drawing = _Drawing(self._schema, rng, plain=attempt >= _TRIES // 2)
            try:
                made = drawing.value(self._schema, 0)
            except (UnsupportedPattern, _DeadEnd):
                continue
            if self._valid(made):
                return made
        raise NoInstance("the simulated engine found no valid instance of this schema")


class _DeadEnd(ValueError):
    pass


class _Drawing:
    """One try at one instance; ``plain`` leaves out everything optional."""

    def __init__(self, root: Json, rng: random.Random, *, plain: bool) -> None:
        self.root = root
        self.rng = rng
        self.plain = plain

    def value(self, schema: Json, depth: int) -> Json:
        if depth > _DEEPEST:
            raise _DeadEnd("the schema nests without end")
        if not isinstance(schema, dict):
            return some_words(self.rng, 2)
        merged = self._flat(schema, depth, 0)
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
            return self._number(merged, whole=kind == "integer")
        return None if kind == "null" else self.rng.random() < 0.5

    def _flat(self, schema: dict[str, Any], depth: int, hops: int) -> dict[str, Any]:
        """The schema with references followed and one branch of each choice merged in."""
        if hops > _DEEPEST:
            raise _DeadEnd("references go round in a circle")
        if not any(word in schema for word in _MERGED):
            return schema
        merged = {k: v for k, v in schema.items() if k not in _MERGED}
        parts: list[Json] = list(schema.get("allOf") or ())
        references = (schema.get(word) for word in ("$ref", "$dynamicRef"))
        parts += [self._resolve(text) for text in references if isinstance(text, str)]
        choices = (schema.get(word) for word in ("anyOf", "oneOf"))
        parts += [self._branch(branches, depth) for branches in choices if branches]
        if "if" in schema:
            if self.rng.random() < 0.5:
                parts += [schema["if"], schema.get("then", True)]
            else:
                parts.append(schema.get("else", True))
        for part in parts:
            if isinstance(part, dict):
                merged = _merge(merged, self._flat(part, depth, hops + 1))
        return merged

    def _branch(self, branches: list[Json], depth: int) -> Json:
        if depth >= _DEEP or self.plain:
            ends = [b for b in branches if not _nests(b)]
            branches = ends or branches
        return self.rng.choice(branches)

    def _resolve(self, reference: str) -> Json:
        """What a local reference (``#``, ``#/a/b``, ``#name``) points to."""
        base, _, fragment = reference.partition("#")
        if base and base != (self.root.get("$id") if isinstance(self.root, dict) else None):
            return self._named("$id", base)
        if fragment and not fragment.startswith("/"):
            return self._named("$anchor", fragment, "$dynamicAnchor")
        found: Json = self.root
        for step in unquote(fragment).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def _named(self, word: str, name: str, other: str = "") -> Json:
        stack: list[Json] = [self.root]
        while stack:
            found = stack.pop()
            if isinstance(found, dict):
                if found.get(word) == name or (other and found.get(other) == name):
                    return found
                stack.extend(found.values())
            elif isinstance(found, list):
                stack.extend(found)
        return True

    def _kind(self, schema: dict[str, Any], depth: int) -> str:
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return kinds
        if isinstance(kinds, list) and kinds:
            simple = [k for k in kinds if k not in ("object", "array")]
            return str(self.rng.choice(simple if simple and depth >= _DEEP else kinds))
        for kind, words in _HINTS.items():
            if any(word in schema for word in words):
                return kind
        return self.rng.choice(_TYPES[2:]) if self.plain or "not" in schema else "string"

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Json]:
        known: dict[str, Json] = schema.get("properties") or {}
        required = list(schema.get("required") or ())
        sparse = self.plain or depth >= _DEEP
        made: dict[str, Json] = {}
        for name, part in known.items():
            if name in required or (not sparse and part is not False and self.rng.random() < 0.85):
                made[name] = self.value(part, depth + 1)
        for name in required:
            if name not in made:
                made[name] = self.value(self._other(schema, name), depth + 1)
        names = schema.get("propertyNames") or {}
        for _ in range(50):
            if len(made) >= schema.get("minProperties", 0):
                break
            name = str(self.value({"type": "string", "maxLength": 12, **names}, depth + 1))
            if schema.get("additionalProperties", True) is False:
                name = self._more(schema, made)
            made.setdefault(name, self.value(self._other(schema, name), depth + 1))
        return made

    def _more(self, schema: dict[str, Any], made: dict[str, Json]) -> str:
        """A further allowed name where others than the listed ones are not."""
        unused = [n for n in schema.get("properties") or {} if n not in made]
        if unused:
            return str(self.rng.choice(unused))
        patterns = list(schema.get("patternProperties") or {})
        if not patterns:
            return "more"
        return matching_text(self.rng, self.rng.choice(patterns), self.rng.randint(1, 12))

    def _other(self, schema: dict[str, Any], name: str) -> Json:
        """The schema of property ``name``, also where it is not listed by name."""
        known = schema.get("properties") or {}
        if name in known:
            return known[name]
        patterns = schema.get("patternProperties") or {}
        if len(patterns) == 1:
            return next(iter(patterns.values()))
        extra = schema.get("additionalProperties")
        return extra if isinstance(extra, dict) else {"type": "string"}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Json]:
        first, rest = _items(schema)
        least = max(schema.get("minItems", 0), 1 if "contains" in schema else 0)
        most = schema.get("maxItems", max(least, len(first)) + 3)
        if rest is False:
            most = min(most, len(first))
        wanted = 0 if self.plain or depth >= _DEEP else self.rng.randint(1, 3)
        length = min(max(least, wanted, 0 if self.plain else len(first)), max(most, least))
        made: list[Json] = []
        for i in range(length * 20 if schema.get("uniqueItems") else length):
            if len(made) == length:
                break
            part = first[len(made)] if len(made) < len(first) else rest
            if "contains" in schema and i < schema.get("minContains", 1):
                part = _merge(part if isinstance(part, dict) else {}, schema["contains"])
            item = self.value(part, depth + 1)
            if not schema.get("uniqueItems") or item not in made:
                made.append(item)
        return made

    def _string(self, schema: dict[str, Any]) -> str:
        least = int(schema.get("minLength", 0))
        most = schema.get("maxLength")
        if isinstance(schema.get("pattern"), str):
            return matching_text(self.rng, schema["pattern"], least, most)
        if isinstance(schema.get("format"), str):
            made = formatted_text(self.rng, schema["format"])
            if made is not None:
                return made
        text = some_words(self.rng, self.rng.randint(2, 6))
        while len(text) < least:
            text += " " + some_words(self.rng, 4)
        if most is not None:
            text = text[: max(int(most), least)]
        return text if len(text.strip()) < least else text.strip()

    def _number(self, schema: dict[str, Any], *, whole: bool) -> int | float:
        low, high = _bounds(schema, whole=whole)
        step = schema.get("multipleOf")
        if step:
            first, last = math.ceil(low / step), math.floor(high / step)
            if last < first:
                raise _DeadEnd("no multiple lies between the bounds")
            return self._multiple(step, first, last)
        if whole:
            if math.floor(high) < math.ceil(low):
                raise _DeadEnd("no whole number lies between the bounds")
            return self.rng.randint(math.ceil(low), math.floor(high))
        value = low + (high - low) * self.rng.random()
        rounded = round(value, 2)
        return rounded if low <= rounded <= high else value

    def _multiple(self, step: float, first: int, last: int) -> int | float:
        """``step`` times a number from ``first`` to ``last``.

        In binary fractions 1.2 is no multiple of 0.1, so a product that divides evenly is sought.
        """
        value: int | float = 0
        for _ in range(_TRIES):
            value = self.rng.randint(first, last) * step
            if isinstance(step, int) or float(value).is_integer():
                return int(value)
            value = round(value, 10)
            if (value / step).is_integer():
                break
        return value


def _nests(schema: Json) -> bool:
    """Whether a branch may lead deeper: a reference, an object or an array."""
    if not isinstance(schema, dict):
        return False
    words = ("$ref", "$dynamicRef", "properties", "items", "allOf", "anyOf", "oneOf")
    return any(word in schema for word in words) or schema.get("type") in ("object", "array")


def _items(schema: dict[str, Any]) -> tuple[list[Json], Json]:
    """The schemas of the first items and of the rest; ``items`` as a list is the older spelling."""
    if isinstance(schema.get("items"), list):
        return schema["items"], schema.get("additionalItems", True)
    return list(schema.get("prefixItems") or ()), schema.get("items", True)


def _bounds(schema: dict[str, Any], *, whole: bool) -> tuple[float, float]:
    """The inclusive range to draw from; 0 to 100 where nothing bounds it."""
    gap = 1 if whole else 1e-6
    lows = [schema["minimum"]] if "minimum" in schema else []
    highs = [schema["maximum"]] if "maximum" in schema else []
    under, over = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(under, bool):
        lows = [n + gap for n in lows] if under else lows
    elif under is not None:
        lows.append(math.floor(under) + 1 if whole else under + gap)
    if isinstance(over, bool):
        highs = [n - gap for n in highs] if over else highs
    elif over is not None:
        highs.append(math.ceil(over) - 1 if whole else over - gap)
    low = max(lows) if lows else None
    high = min(highs) if highs else None
    if low is None:
        low = 0 if high is None or high >= 0 else high - 100
    return low, low + 100 if high is None else high


def _merge(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Both schemas at once, as far as that can be said keyword by keyword."""
    merged = dict(one)
    for word, value in two.items():
        if word not in merged:
            merged[word] = value
            continue
        merger = _MERGERS.get(word)
        merged[word] = merger(merged[word], value) if merger else value
    return merged


def _merge_properties(one: dict[str, Json], two: dict[str, Json]) -> dict[str, Json]:
    merged = dict(one)
    for name, part in two.items():
        both = merged.get(name)
        if isinstance(both, dict) and isinstance(part, dict):
            merged[name] = {"allOf": [both, part]}
        elif both is not False:
            merged[name] = part
    return merged


def _merge_types(one: Json, two: Json) -> Json:
    first = one if isinstance(one, list) else [one]
    second = two if isinstance(two, list) else [two]
    both = [t for t in _TYPES if _allows(first, t) and _allows(second, t)]
    return both if len(both) > 1 else (both[0] if both else two)


def _allows(kinds: list[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


_MERGERS: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _merge_properties,
    "patternProperties": _merge_properties,
    "required": lambda one, two: list(dict.fromkeys([*one, *two])),
    "type": _merge_types,
    "enum": lambda one, two: [v for v in one if v in two],
    "items": lambda one, two: (
        _merge(one, two) if isinstance(one, dict) and isinstance(two, dict) else two
    ),
    "additionalProperties": lambda one, two: False if one is False or two is False else two,
    **dict.fromkeys(("minimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("exclusiveMinimum",), max),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), min),
    **dict.fromkeys(("exclusiveMaximum",), min),
}
