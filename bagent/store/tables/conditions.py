"""SQL conditions over ``results`` in which fields of answers and inputs are columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from bagent.duck import is_nested, literal, quoted
from bagent.errors import UsageError
from bagent.store.tables.csv_columns import input_fields
from bagent.store.tables.schema import ANSWER_KEY, RESULTS, pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def status_condition(statuses: Collection[str]) -> str:
    """Return a condition over ``results`` for any of the statuses; ``failed`` is every failure."""
    names = ", ".join(map(literal, sorted(statuses)))
    failed = " or error_kind is not null" if "failed" in statuses else ""
    return f"(status in ({names}){failed})"


def typed_condition(connection: DuckDBPyConnection, condition: str, label: str) -> str:
    """Return a condition over ``results`` in which fields of answers and inputs are columns.

    Args:
        connection: with the tables of a run.
        condition: SQL of the user.
        label: names the condition in a message.

    Raises:
        UsageError: it names a column that is not there, or ends the statement that it is part of.
    """
    import duckdb

    fields = {**input_fields(connection), **answer_fields(connection)}
    sql = condition_on_fields(condition, fields)
    checked = f"explain select * from results where {sql}"
    if len(connection.extract_statements(checked)) > 1:
        raise UsageError(f"{label}: more than one statement", hint="write one condition")
    try:
        connection.execute(checked)
    except duckdb.BinderException as error:
        hint = ", ".join(["columns of results", *fields])
        raise UsageError(f"{label}: {str(error).splitlines()[0]}", hint=hint) from None
    return sql


def condition_on_fields(condition: str, fields: Mapping[str, str]) -> str:
    """Return a condition over ``results`` in which the names of fields are columns.

    Args:
        condition: SQL of the user.
        fields: the SQL of each field's value. Names ignore case; a column of ``results`` comes
            first, then a later field.
    """
    typed = condition.casefold()
    own = {name: quoted(name) for name in RESULTS}
    columns = {
        name.casefold(): (quoted(name), sql)
        for name, sql in {**fields, **own}.items()
        if quoted(name)[1:-1].casefold() in typed
    }
    if columns.keys() <= own.keys():
        return f"({condition}\n)"
    # Named as the table, so that results.NAME is a field too.
    names, values = map(", ".join, zip(*columns.values(), strict=True))
    return f"(select ({condition}\n) from (values ({values})) as results({names}))"


def answer_fields(connection: DuckDBPyConnection) -> dict[str, str]:
    """Return SQL over ``results`` for each typed column of ``answers``.

    ``value`` is the complete answer where that is no object with such a field.
    """
    described = connection.execute("describe answers").fetchall()
    kinds = {str(name): str(kind) for name, kind, *_ in described}
    return {name: _value(name, kinds) for name in kinds if name not in ANSWER_KEY}


def _value(name: str, kinds: Mapping[str, str]) -> str:
    value = f"json_extract(output, {literal(pointer(name))})"
    if name == "value":
        value = f"coalesce({value}, output)"
    elif (base := _base(name, kinds)) is not None:
        value = f"coalesce({value}, json_extract(output, {literal(pointer(base))}))"
    kind = kinds[name]
    if kind == "JSON":
        return value
    if kind.endswith("]") or is_nested(kind):
        return f"try_cast({value} as {kind})"
    return f"try_cast({value} ->> '$' as {kind})"


def _base(name: str, names: Iterable[str]) -> str | None:
    """Return the property of a column that has a suffix, since another column has its name."""
    base, _, number = name.rpartition("_")
    others = {*names} - {*ANSWER_KEY}
    if not number.isdecimal() or base in others:
        return None
    return base if base.casefold() in map(str.casefold, names) else None
