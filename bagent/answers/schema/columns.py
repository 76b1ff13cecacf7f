"""The table columns that a schema asks for: one typed column per top-level property."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote

from bagent.text.unicode import clean_text
from bagent.types import Json

JSON_TYPE = "JSON"
RESERVED = ("id", "stage", "answer")
"""Names that the ``answers`` table itself has; a property of such a name gets a suffix."""

_INT64 = (-(2**63), 2**63 - 1)
_INT128 = (-(2**127), 2**127 - 1)
_SCALARS = {"string": "VARCHAR", "number": "DOUBLE", "boolean": "BOOLEAN"}


_MAX_DEPTH = 4
_MAX_LENGTH = 10_000


class Column(NamedTuple):
    """A column: its name in the table and its DuckDB type."""

    name: str
    type: str


class Columns(NamedTuple):
    """The columns of a schema; ``properties[i]`` is the property that ``columns[i]`` holds.

    A schema that is not for objects with named properties has the one column ``value`` of the
    whole answer, with None as its property.
    """

    columns: list[Column]
    properties: list[str | None]


def columns_of(document: dict[str, Any]) -> Columns:
    """Return the columns for values of ``document`` (self-contained).

    Names that differ only by case, and those of ``RESERVED``, get a suffix ``_2``, ``_3``...
    """
    types = _Types(document)
    properties = types.properties(document)
    if not properties:
        return Columns([Column("value", types.of(document) or JSON_TYPE)], [None])
    taken = {name.lower() for name in RESERVED}
    columns = [Column(_free_name(name, taken), kind) for name, kind in properties.items()]
    return Columns(columns, [*properties])


def _free_name(name: str, taken: set[str]) -> str:
    base = clean_text(name).replace("\0", "") or "empty"
    free, number = base, 2
    while free.lower() in taken:
        free, number = f"{base}_{number}", number + 1
    taken.add(free.lower())
    return free


class _Types:
    """Works out the types in one document; each reference is followed once."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._types: dict[str, str | None] = {}
        self._open: set[str] = set()
        self._recursive: set[str] = set()
        self._depth = 0
        self._properties: dict[str, dict[str, str] | None] = {}

    def properties(self, schema: Json) -> dict[str, str] | None:
        """Return the types of the properties of ``schema``, with those of what it combines.

        None where it does not say that its values are objects (null apart).
        """
        if not isinstance(schema, dict):
            return None
        types = _listed(schema.get("type", []))
        if not {*types} <= {"object", "null"}:
            return None
        own = {name: self._property(item) for name, item in schema.get("properties", {}).items()}
        merged = own if "object" in types or "properties" in schema else None
        for part in schema.get("allOf", ()):
            merged = _merged(merged, self.properties(part))
        if "$ref" in schema:
            merged = _merged(merged, self._properties_at(schema["$ref"]))
        for key in ("anyOf", "oneOf"):
            branches = [self.properties(item) for item in schema.get(key, ()) if not _null(item)]
            if merged is not None or None not in branches:
                for branch in branches:
                    merged = _merged(merged, branch)
        return merged

    def of(self, schema: Json) -> str | None:
        """Return the DuckDB type for values of ``schema``, None where only null is allowed."""
        if not isinstance(schema, dict):
            return JSON_TYPE
        if "const" in schema or "enum" in schema:
            return _of_values([schema["const"]] if "const" in schema else schema["enum"])
        if "type" in schema:
            return _union(self._of_type(kind, schema) for kind in _listed(schema["type"]))
        if "$ref" in schema:
            return self._of_reference(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return _union(self.of(branch) for branch in schema[key])
        types = {self.of(part) for part in schema.get("allOf", ())} - {JSON_TYPE}
        return types.pop() if len(types) == 1 else JSON_TYPE

    def _property(self, schema: Json) -> str:
        return self.of(schema) or JSON_TYPE

    def _of_type(self, kind: Json, schema: dict[str, Any]) -> str | None:
        if kind == "null":
            return None
        if kind == "integer":
            return _integer(schema)
        if kind == "object":
            return self._struct(schema)
        items = schema.get("items")
        if kind == "array" and isinstance(items, dict) and "prefixItems" not in schema:
            item = self.of(items)
            if item not in (None, JSON_TYPE) and (
                str(item).startswith("STRUCT(") or not str(item).endswith("[]")
            ):
                return f"{item}[]"
        return _SCALARS.get(kind, JSON_TYPE)

    def _struct(self, schema: dict[str, Any]) -> str:
        """Return the struct of an object inside an answer; JSON where its names are unknown."""
        if not schema.get("properties") or self._depth > _MAX_DEPTH:
            return JSON_TYPE
        self._depth += 1
        fields = self.properties({**schema, "type": "object"}) or {}
        self._depth -= 1
        names = [clean_text(name).replace("\0", "") for name in fields]
        if (
            "" in names
            or names != [*fields]
            or len({name.casefold() for name in names}) < len(names)
        ):
            return JSON_TYPE
        # JSON inside of a struct is text in the tables.
        kinds = ["VARCHAR" if kind == JSON_TYPE else kind for kind in fields.values()]
        listed = ", ".join(
            '"' + name.replace('"', '""') + '" ' + kind
            for name, kind in zip(names, kinds, strict=True)
        )
        struct = f"STRUCT({listed})"
        return struct if len(struct) <= _MAX_LENGTH else JSON_TYPE

    def _of_reference(self, reference: str) -> str | None:
        if reference in self._open:
            self._recursive.add(reference)
            return JSON_TYPE
        if reference not in self._types:
            self._open.add(reference)
            kind = self.of(self._target(reference))
            self._open.remove(reference)
            self._types[reference] = JSON_TYPE if reference in self._recursive else kind
        return self._types[reference]

    def _properties_at(self, reference: str) -> dict[str, str] | None:
        if reference not in self._properties:
            self._properties[reference] = None
            self._properties[reference] = self.properties(self._target(reference))
        return self._properties[reference]

    def _target(self, reference: str) -> Json:
        target: Json = self._document
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target[int(part)] if isinstance(target, list) else target.get(part)
            if not isinstance(target, dict | list):
                return target
        return target


def _listed(types: Json) -> list[Json]:
    return types if isinstance(types, list) else [types]


def _null(schema: Json) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _merged(first: dict[str, str] | None, second: dict[str, str] | None) -> dict[str, str] | None:
    if first is None or second is None:
        return first if second is None else second
    both = {**second, **first}
    ordered = {**first, **second}
    return {name: _union((ordered[name], both[name])) or JSON_TYPE for name in ordered}


def _union(types: Iterable[str | None]) -> str | None:
    kinds = {kind for kind in types if kind is not None}
    if not kinds:
        return None
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {"BIGINT", "HUGEINT"}:
        return "HUGEINT"
    return "DOUBLE" if kinds <= {"BIGINT", "HUGEINT", "DOUBLE"} else JSON_TYPE


def _of_values(values: list[Json]) -> str | None:
    return _union(_of_value(value) for value in values)


def _of_value(value: Json) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return _integer({"minimum": value, "maximum": value})
    if isinstance(value, float):
        return "DOUBLE"
    return "VARCHAR" if isinstance(value, str) else JSON_TYPE


def _integer(schema: dict[str, Any]) -> str:
    """BIGINT, unless the limits of ``schema`` leave room for, and so announce, larger values."""
    limits = [schema.get(key) for key in ("minimum", "maximum")]
    limits += [schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum")]
    numbers = [x for x in limits if isinstance(x, int | float) and not isinstance(x, bool)]
    if all(_INT64[0] <= number <= _INT64[1] for number in numbers):
        return "BIGINT"
    return "HUGEINT" if all(_INT128[0] <= n <= _INT128[1] for n in numbers) else "DOUBLE"
