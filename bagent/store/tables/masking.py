"""Redaction of fields of results, as SQL: values are replaced, nulls stay.

A field is a column (``error``), a path into a JSON column (``output.name.first``, ``input.ssn``) or
a plain name: the column, else that property of both ``input`` and ``output``. Redacting a property
of the output also redacts what may repeat it: text, reasoning, logprobs and the error.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bagent.duck import literal, quoted
from bagent.errors import UsageError
from bagent.store.tables.schema import RESULTS

MASK = "'***'"
"""The replacement of a text, as SQL."""

_JSON_MASK = "***"
_REPEATS = ("text", "reasoning", "logprobs", "error")
_WHOLE = frozenset({"row", "stage", "answer", "status"})


def masked_columns(fields: Iterable[str]) -> dict[str, str]:
    """Return the SQL of the new value of each column of ``results`` that changes.

    Raises:
        UsageError: a field is empty, or a column that identifies rows.
    """
    paths: dict[str, list[list[str]]] = {}
    hidden: set[str] = set()
    for field in fields:
        head, *path = field.split(".")
        if not all([head, *path]) or (field in _WHOLE):
            raise UsageError(f"--redact {field}: no field to hide", hint="output.NAME, text, ...")
        if field in RESULTS:
            hidden.add(field)
            continue
        columns = [head] if head in ("output", "input") and path else ["output", "input"]
        steps = path if head in ("output", "input") and path else [head, *path]
        for column in columns:
            paths.setdefault(column, []).append(steps)
        hidden.update(("error", *_REPEATS) if "output" in columns else ("error",))
    columns_sql = {name: _hidden(name) for name in sorted(hidden)}
    for column in sorted(paths.keys() - hidden):
        value = quoted(column)
        for steps in paths[column]:
            value = _without(value, steps)
        columns_sql[column] = value
    return columns_sql


def masked_answers(fields: Iterable[str]) -> frozenset[str]:
    """Return the columns of ``answers`` that are redacted."""
    names = set()
    for field in fields:
        steps = field.removeprefix("output.").split(".")
        if field not in RESULTS and not field.startswith("input."):
            names.add(steps[0])
    return frozenset(names)


def _hidden(column: str) -> str:
    kind = RESULTS[column]
    if kind == "VARCHAR":
        mask = MASK
    elif kind == "JSON":
        mask = f"""'"{_JSON_MASK}"'::JSON"""
    else:
        return f"NULL::{kind}"
    return f"CASE WHEN {quoted(column)} IS NULL THEN NULL ELSE {mask} END"


def _without(value: str, steps: list[str]) -> str:
    """Return SQL for a JSON value without one property; a non-object on its path is replaced."""
    cases = []
    for depth in range(len(steps), -1, -1):
        pointer = literal("".join(f"/{_escaped(step)}" for step in steps[:depth]))
        patch = _JSON_MASK if depth == 0 else _nested(steps[:depth])
        patched = f"json_merge_patch({value}, {literal(msgspec.json.encode(patch).decode())})"
        if depth == 0:
            patched = f"""'"{_JSON_MASK}"'::JSON"""
        kind = f"json_type({value}, {pointer})"
        there = f"{kind} IS NOT NULL"
        if depth < len(steps):
            there = f"{kind} IN ('ARRAY', 'VARCHAR', 'UBIGINT', 'BIGINT', 'DOUBLE', 'BOOLEAN')"
        cases.append(f"WHEN {there} THEN {patched}")
    return f"CASE {' '.join(cases)} ELSE {value} END"


def _nested(steps: list[str]) -> object:
    value: object = _JSON_MASK
    for step in reversed(steps):
        value = {step: value}
    return value


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")
