"""The columns of results as CSV: ids, the fields of answers, errors, and fields of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bagent.duck import literal, quoted
from bagent.store.tables.schema import RESULTS, pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Columns = dict[str, str]
"""Names of columns, each with the SQL of its value."""

INPUT_ROWS = 1000
"""First rows of the input whose fields become columns."""


def _iso_time(column: str) -> str:
    return f"strftime(make_timestamp(({column} * 1000000)::bigint), '%Y-%m-%dT%H:%M:%S.%fZ')"


RESULT_COLUMNS: Columns = {name: quoted(name) for name in RESULTS} | {
    name: _iso_time(name) for name in ("started_at", "finished_at")
}
"""The columns of ``results``, with times as text."""


def csv_columns(
    connection: DuckDBPyConnection,
    answers: Mapping[str, str],
    *,
    all_columns: bool = False,
    with_input: bool = False,
) -> Columns:
    """Return ``id``, ``status``, the fields of the answers or their text, and the error.

    Stage and number of the answer are included where there are several.

    Args:
        connection: with the table ``results``.
        answers: the SQL of each field of the answers.
        all_columns: include the other columns of ``results``.
        with_input: include the fields of the input.
    """
    several = connection.execute(
        "select count(distinct stage) > 1, count(distinct answer) > 1 from results"
    ).fetchone() or (False, False)
    stage, answer = ["stage"] * several[0], ["answer"] * several[1]
    chosen = {name: RESULT_COLUMNS[name] for name in ("id", *stage, *answer, "status")}
    # A field of the answer keeps its name; what it would hide gets another one.
    chosen |= {f"{name}_answer" if name in chosen else name: sql for name, sql in answers.items()}
    for name in RESULT_COLUMNS if all_columns else [*([] if answers else ["text"]), "error"]:
        if RESULT_COLUMNS[name] not in chosen.values():
            chosen[f"result_{name}" if name in chosen else name] = RESULT_COLUMNS[name]
    fields = input_fields(connection) if with_input else {}
    return chosen | {f"input.{name}" if name in chosen else name: fields[name] for name in fields}


def input_fields(connection: DuckDBPyConnection, *, as_json: bool = False) -> Columns:
    """Return the fields of the input's first rows, each as text or as JSON."""
    rows = connection.execute(
        f"select json_keys(input) from results where json_type(input) = 'OBJECT' limit {INPUT_ROWS}"
    ).fetchall()
    names = dict.fromkeys(name for (keys,) in rows for name in keys)
    arrow = "->" if as_json else "->>"
    return {name: f"input {arrow} {literal(pointer(name))}" for name in names}


def select_list(columns: Mapping[str, str]) -> str:
    """Return the SQL that selects columns."""
    return ", ".join(f"{sql} as {quoted(name)}" for name, sql in columns.items())
