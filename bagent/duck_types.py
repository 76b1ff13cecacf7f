"""Nested column types: lists and structs of plain types, read from text that may be anybody's.

A type becomes SQL only from what :func:`parse_type` understood of it: names in quotes, and scalars
of the list in :mod:`bagent.duck`.
"""

from __future__ import annotations

import json
import re

from bagent.duck import literal, plain_scalar, quoted

Nested = str | list["Nested"] | dict[str, "Nested"]
"""A scalar type, a list of one type, or the fields of a struct."""

_DEEPEST = 8
_LONGEST = 20_000
_TOKEN = re.compile(
    r'\s*(?:("(?:[^"]|"")*")|(\[\])|([(),])|(DECIMAL\(\d{1,2},\s?\d{1,2}\)|[A-Za-z_]\w*))',
    re.IGNORECASE,
)


def parse_type(text: str, *, bare_names: bool = False) -> Nested | None:
    """Read a type such as ``STRUCT("line" BIGINT, "tags" VARCHAR[])[]``; None where it is none.

    Names stand in quotes; with ``bare_names`` also without, as in what DuckDB describes. JSON
    inside of it is text, since other readers of Parquet take nested JSON for bytes.
    """
    if len(text) > _LONGEST:
        return None
    tokens: list[str] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        tokens.append(match[match.lastindex or 0])
        place = match.end()
    try:
        kind, rest = _type(tokens, 0, 0, bare_names)
    except (IndexError, ValueError):
        return None
    return kind if rest == len(tokens) else None


def type_sql(kind: Nested) -> str:
    """Return the SQL of a type."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return f"{type_sql(kind[0])}[]"
    fields = ", ".join(f"{quoted(name)} {type_sql(one)}" for name, one in kind.items())
    return f"STRUCT({fields})"


def is_nested(kind: str) -> bool:
    """Whether a type holds structs."""
    return kind[:7].upper() == "STRUCT("


def nested_value(value: str, kind: str) -> str:
    """Return SQL for a JSON value as a nested type.

    A field that is missing or of another type becomes null, and so does what has another shape.
    """
    structure = json.dumps(parse_type(kind), ensure_ascii=False)
    return f"from_json({value}, {literal(structure)})"


def _type(tokens: list[str], place: int, depth: int, bare: bool) -> tuple[Nested, int]:
    if depth > _DEEPEST:
        raise ValueError
    word = tokens[place].upper()
    place += 1
    kind: Nested
    if word == "STRUCT":
        kind, place = _fields(tokens, place, depth, bare)
    elif plain_scalar(word):
        kind = {"JSON": "VARCHAR", "HUGEINT": "DECIMAL(38,0)"}.get(word, word)
    else:
        raise ValueError
    while place < len(tokens) and tokens[place] == "[]":
        kind, place = [kind], place + 1
    return kind, place


def _fields(tokens: list[str], place: int, depth: int, bare: bool) -> tuple[Nested, int]:
    if tokens[place] != "(":
        raise ValueError
    fields: dict[str, Nested] = {}
    while tokens[place] != ")":
        name = tokens[place + 1]
        if name[0] in "()[," or not (bare or name.startswith('"')):
            raise ValueError
        name = name[1:-1].replace('""', '"') if name.startswith('"') else name
        if not name or name.casefold() in map(str.casefold, fields):
            raise ValueError
        fields[name], place = _type(tokens, place + 2, depth + 1, bare)
        if tokens[place] not in (",", ")"):
            raise ValueError
    return fields, place + 1
