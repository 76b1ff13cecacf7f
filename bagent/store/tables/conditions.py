"""SQL conditions over ``results`` in which fields of answers and inputs are columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bagent.duck import is_nested, literal, quoted
from bagent.store.tables.schema import RESULTS, pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def condition_on_fields(condition: str, fields: Mapping[str, str]) -> str:
    """Return a condition over ``results`` in which the names of fields are columns.

    Args:
        condition: SQL of the user.
        fields: the SQL of each field's value. Names ignore case; a column of ``results`` comes
            first, then a later field.
    """
    typed = condition.casefold()
    columns = {
        name.casefold(): f"{sql} as {quoted(name)}"
        for name, sql in fields.items()
        if name.casefold() not in RESULTS and quoted(name)[1:-1].casefold() in typed
    }
    if not columns:
        return f"({condition}\n)"
    return f"(select ({condition}\n) from (select {', '.join(columns.values())}) as fields)"


def answer_fields(connection: DuckDBPyConnection) -> dict[str, str]:
    """Return SQL over ``results`` for each typed column of ``answers`` that is named as its field.

    ``value`` is the complete answer where that is no object with such a field.
    """
    described = connection.execute("describe answers").fetchall()
    kinds = {str(name): str(kind) for name, kind, *_ in described}
    return {name: _value(name, kind) for name, kind in kinds.items() if not _renamed(name, kinds)}


def _renamed(name: str, names: Mapping[str, str]) -> bool:
    """Whether a column of ``answers`` may have got a suffix, since another one has the name."""
    base, _, number = name.rpartition("_")
    return number.isdecimal() and base.casefold() in map(str.casefold, names)


def _value(name: str, kind: str) -> str:
    value = f"json_extract(output, {literal(pointer(name))})"
    if name == "value":
        value = f"coalesce({value}, output)"
    if kind == "JSON" or is_nested(kind):
        return value
    if kind.endswith("]"):
        return f"try_cast({value} as {kind})"
    return f"try_cast({value} ->> '$' as {kind})"
