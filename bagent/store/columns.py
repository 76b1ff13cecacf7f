"""The tables of a run: their columns and types, in the order that users see.

Types are given to DuckDB, never guessed from data: a column that is null at first cannot change
its type later. What models wrote stays JSON text, so that no key is ever lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bagent.duck import column_type, file_literal, literal, quoted
from bagent.duck_types import is_nested, nested_value, parse_type, type_sql

RESULTS: dict[str, str] = {
    "id": "VARCHAR",
    "row": "BIGINT",
    "source": "VARCHAR",
    "line": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "status": "VARCHAR",
    "output": "JSON",
    "text": "VARCHAR",
    "reasoning": "VARCHAR",
    "error_kind": "VARCHAR",
    "error": "VARCHAR",
    "finish_reason": "VARCHAR",
    "model": "VARCHAR",
    "endpoint": "VARCHAR",
    "attempts": "BIGINT",
    "turns": "BIGINT",
    "prompt_tokens": "BIGINT",
    "cached_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "reasoning_tokens": "BIGINT",
    "cost_usd": "DOUBLE",
    "queue_ms": "DOUBLE",
    "ttft_ms": "DOUBLE",
    "latency_ms": "DOUBLE",
    "started_at": "DOUBLE",
    "finished_at": "DOUBLE",
    "input": "JSON",
    "parents": "VARCHAR[]",
    "parents_failed": "BIGINT",
    "copied_from": "VARCHAR",
    "prompt_sha256": "VARCHAR",
    "output_sha256": "VARCHAR",
    "logprobs": "JSON",
}
"""``results``: one row per (stage, row, answer). Times are Unix seconds and milliseconds."""

DEFAULTS: dict[str, str] = {"answer": "0", "attempts": "0", "turns": "0"}
"""What a line leaves out because it has the usual value."""

ATTEMPTS: dict[str, str] = {
    "row": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "turn": "BIGINT",
    "try": "BIGINT",
    "endpoint": "VARCHAR",
    "sent": "DOUBLE",
    "first_byte": "DOUBLE",
    "first_token": "DOUBLE",
    "done": "DOUBLE",
    "status_code": "BIGINT",
    "error_kind": "VARCHAR",
    "error": "VARCHAR",
    "prompt_tokens": "BIGINT",
    "cached_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "group": "VARCHAR",
    "group_size": "BIGINT",
    "request_id": "VARCHAR",
    "id": "VARCHAR",
}
"""``attempts``: one row per row and HTTP request; ``group`` is called ``group_id`` there."""

TOOL_CALLS: dict[str, str] = {
    "row": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "turn": "BIGINT",
    "name": "VARCHAR",
    "arguments": "VARCHAR",
    "shared": "BOOLEAN",
    "cached": "BOOLEAN",
    "started": "DOUBLE",
    "latency_ms": "DOUBLE",
    "error": "VARCHAR",
    "id": "VARCHAR",
}
"""``tool_calls``: one row per tool call of a row."""

ENDPOINTS: dict[str, str] = {
    "endpoint": "VARCHAR",
    "at": "DOUBLE",
    "healthy": "BOOLEAN",
    "in_flight": "BIGINT",
    "limit": "BIGINT",
    "reason": "VARCHAR",
    "waiting": "BIGINT",
    "running": "BIGINT",
    "kv_usage": "DOUBLE",
    "cache_hits": "BIGINT",
    "cache_queries": "BIGINT",
}
"""``endpoints``: samples of the state of endpoints over time."""

PLAIN_DEFAULTS: dict[str, str] = {"shared": "false", "cached": "false"}
REQUIRED: dict[str, str] = {
    "results": "stage",
    "attempts": "stage",
    "tool_calls": "stage",
    "endpoints": "endpoint",
}
"""A column that every sound line of a table has."""

COLUMNS: dict[str, dict[str, str]] = {
    "results": RESULTS,
    "attempts": ATTEMPTS,
    "tool_calls": TOOL_CALLS,
    "endpoints": ENDPOINTS,
}
"""The columns of the tables that are made from lines."""

RENAMED: dict[str, str] = {"group": "group_id"}
TABLES: tuple[str, ...] = ("results", "answers", "attempts", "tool_calls", "endpoints")
"""The names of the tables and of their Parquet files."""


def declared(columns: dict[str, str]) -> str:
    """Columns as in CREATE TABLE, under their names in the table."""
    return ", ".join(f"{quoted(RENAMED.get(n, n))} {t}" for n, t in columns.items())


def read_json(path: Path, columns: dict[str, str], object_bytes: int) -> str:
    """SQL that reads JSON lines with these columns; a broken line gives a row of nulls.

    Args:
        path: the file.
        columns: names and types, nothing is inferred.
        object_bytes: the longest line that is read, in bytes.
    """
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in columns.items())
    return (
        f"read_json({file_literal(path)}, format='newline_delimited', ignore_errors=true,"
        f" maximum_object_size={object_bytes}, columns={{{types}}})"
    )


def json_select(table: str, path: Path, object_bytes: int) -> str:
    """SQL that reads the lines of a journal file as rows of a table; broken lines give none."""
    columns = COLUMNS[table]
    source = read_json(path, columns, object_bytes)
    defaults = DEFAULTS if table == "results" else PLAIN_DEFAULTS
    return (
        f"SELECT {selected(columns, defaults)} FROM {source}"
        f" WHERE {quoted(REQUIRED[table])} IS NOT NULL"
    )


def selected(columns: dict[str, str], defaults: dict[str, str]) -> str:
    """The columns as a SELECT list under their names in the table.

    The usual values are put in where a line left them out.
    """
    return ", ".join(
        (f"coalesce({quoted(n)}, {defaults[n]})" if n in defaults else quoted(n))
        + f" AS {quoted(RENAMED.get(n, n))}"
        for n in columns
    )


def answer_names(properties: Iterable[str]) -> dict[str, str]:
    """Column names of ``answers`` for the properties of a schema.

    DuckDB's names do not tell upper case from lower, so a property whose name is taken (also by
    ``id``, ``stage``, ``answer``) gets ``_2``, ``_3`` ... behind it.
    """
    taken = {"id", "stage", "answer"}
    names: dict[str, str] = {}
    for name in properties:
        shown, number = name or "_", 1
        while shown.casefold() in taken:
            number += 1
            shown = f"{name}_{number}"
        taken.add(shown.casefold())
        names[name] = shown
    return names


def answers_select(columns: Iterable[tuple[str | None, str]], source: str) -> str:
    """SQL for ``answers``: id, stage, answer and a typed column per property, ok rows only.

    The output is parsed once per row; a value of another type becomes null. None in place of a
    property is the whole output, in the column ``value``.
    """
    wanted = [(name, stored_type(kind)) for name, kind in dict(columns).items()]
    names = _names_of(name for name, _ in wanted)
    if not wanted:
        return f"SELECT id, stage, answer FROM {source} WHERE status = 'ok'"
    paths = "[" + ", ".join(literal(pointer(name)) for name, _ in wanted) + "]"
    typed = []
    for place, (name, kind) in enumerate(wanted, 1):
        value = f"parts[{place}]"
        if is_scalar(kind):
            value = f"{value}->>'$'"
        if is_nested(kind):
            value = nested_value(value, kind)
        elif kind.upper() != ("VARCHAR" if is_scalar(kind) else "JSON"):
            value = f"TRY_CAST({value} AS {kind})"
        typed.append(f"{value} AS {quoted(names[name])}")
    return (
        f"SELECT id, stage, answer, {', '.join(typed)} FROM (SELECT id, stage, answer,"
        f" json_extract(output, {paths}) AS parts FROM {source} WHERE status = 'ok')"
    )


def _names_of(properties: Iterable[str | None]) -> dict[str | None, str]:
    names: dict[str | None, str] = {None: "value"}
    names.update(answer_names(name for name in properties if name is not None))
    return names


def table_columns(
    table: str, answer_columns: Iterable[tuple[str | None, str]]
) -> list[tuple[str, str]]:
    """Names and types of a table's columns in their order, as DuckDB tells them."""
    if table != "answers":
        return [(RENAMED.get(name, name), kind) for name, kind in COLUMNS[table].items()]
    wanted = dict(answer_columns)
    names = _names_of(wanted)
    own = [(name, RESULTS[name]) for name in ("id", "stage", "answer")]
    return [*own, *((names[name], stored_type(kind)) for name, kind in wanted.items())]


def json_columns(table: str, answer_columns: Iterable[tuple[str | None, str]]) -> list[str]:
    """The columns of a table that hold JSON; in Parquet files they are text, as others read it."""
    return [name for name, kind in table_columns(table, answer_columns) if kind == "JSON"]


def stored_type(kind: str) -> str:
    """The type of a column of answers in the tables; Parquet has no HUGEINT."""
    if is_nested(kind):
        nested = parse_type(kind)
        return "JSON" if nested is None else type_sql(nested)
    return column_type(kind).replace("HUGEINT", "DECIMAL(38,0)")


def pointer(name: str | None) -> str:
    """JSON pointer (RFC 6901) to a top-level property; None is the whole value."""
    return "" if name is None else "/" + name.replace("~", "~0").replace("/", "~1")


def is_scalar(kind: str) -> bool:
    """Whether a type is neither JSON nor a list or a struct."""
    return kind.upper() != "JSON" and not kind.endswith("]") and not is_nested(kind)
