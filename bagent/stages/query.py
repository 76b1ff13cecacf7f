"""Queries over the tables of earlier stages in DuckDB, in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import (
    Access,
    Setting,
    SqlError,
    column_type,
    connect,
    file_source,
    literal,
    quoted,
    single_query,
)
from bagent.stages.row import INPUT
from bagent.store.journal.codec import clean
from bagent.types import Row

if TYPE_CHECKING:
    import duckdb

BASE = {
    "id": "VARCHAR",
    "row": "BIGINT",
    "answer": "BIGINT",
    "status": "VARCHAR",
    "output": "JSON",
    "text": "VARCHAR",
    "error": "VARCHAR",
    "error_kind": "VARCHAR",
}
"""The columns of every stage's table, with their types."""

MEMORY = "512MB"
LONGEST_LINE = 64 * 1024 * 1024


class StageTable(msgspec.Struct):
    """One table: a stage's name, and the properties of its schema with their DuckDB types."""

    name: str
    columns: list[tuple[str | None, str]] = []
    path: Path = Path()


class QueryResult(msgspec.Struct, frozen=True):
    """One result row, and the outcomes that it was made of, as ``STAGE:ID:ANSWER``."""

    values: dict[str, Any]
    parents: tuple[str, ...]


class Interrupt:
    """Ends a query from another thread."""

    def __init__(self) -> None:
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._requested = False

    def watch(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Interrupt the query that begins on ``connection``, now or later."""
        self._connection = connection
        if self._requested:
            connection.interrupt()

    def now(self) -> None:
        """End the query that runs, or the next one."""
        self._requested = True
        if self._connection is not None:
            self._connection.interrupt()


def run_query(
    query: str, tables: Sequence[StageTable], work: Path, interrupt: Interrupt | None = None
) -> list[QueryResult] | str:
    """Run ``query``; return its rows in order, or why DuckDB refuses it.

    Args:
        query: the SQL.
        tables: the tables with the paths of their JSON lines; parents are looked up in the first.
        work: the folder where DuckDB may spill.
        interrupt: ends the query early.
    """
    import duckdb

    connection = open_database(Access(everything=True), work)
    if interrupt is not None:
        interrupt.watch(connection)
    try:
        make_tables(connection, tables)
        text = single_query(connection, query)
        connection.execute(f"CREATE TEMP TABLE bagent_found AS {text}")
        names = {row[0] for row in connection.execute("DESCRIBE bagent_found").fetchall()}
        rows = connection.execute(_results(tables[0].name, names)).fetchall()
    except (duckdb.Error, SqlError) as error:
        return str(error).strip().splitlines()[0]
    finally:
        connection.close()
    return [QueryResult(msgspec.json.decode(text), tuple(parents or ())) for text, parents in rows]


def open_database(access: Access, work: Path, **settings: Setting) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory that spills to ``work``."""
    settings = {"threads": 1, "memory_limit": MEMORY, **settings}
    return connect(access, spill=work / "spill", settings=settings)


def make_tables(connection: duckdb.DuckDBPyConnection, tables: Sequence[StageTable]) -> None:
    """Create ``tables`` from their files.

    Raises:
        duckdb.Error: a file cannot be read.
    """
    for table in tables:
        select = _input(connection, table) if table.name == INPUT else _stage(table)
        connection.execute(f"CREATE TABLE {quoted(table.name)} AS {select}")


def input_line(row: Row) -> bytes:
    """Return one row of the table ``input`` as a JSON line: its fields, ``id`` and ``row``."""
    return msgspec.json.encode(clean({**row.data, "id": str(row.id), "row": row.index})) + b"\n"


def _input(connection: duckdb.DuckDBPyConnection, table: StageTable) -> str:
    source = file_source(table.path)
    if not table.path.stat().st_size:
        return "SELECT NULL::VARCHAR AS id, NULL::BIGINT AS row WHERE false"
    options = f"format='newline_delimited', maximum_object_size={LONGEST_LINE}"
    guessed = f"SELECT * FROM read_json({source}, {options}, sample_size=-1)"
    columns = connection.execute(f"DESCRIBE {guessed}").fetchall()
    column_types = {name: kind for name, kind, *_ in columns}
    if column_types["id"] == "VARCHAR":
        return guessed
    # Ids are texts as in every other table, also where all look like dates.
    column_types["id"] = "VARCHAR"
    types = _struct(column_types)
    return f"SELECT * FROM read_json({source}, {options}, columns={types})"


def _struct(types: Mapping[str, str]) -> str:
    """Return SQL for the types of columns by their names."""
    return f"{{{', '.join(f'{literal(name)}: {literal(kind)}' for name, kind in types.items())}}}"


def _stage(table: StageTable) -> str:
    source = file_source(table.path)
    columns = [(name, column_type(kind)) for name, kind in table.columns]
    typed = [
        f"TRY_CAST({_value(name, kind)} AS {kind}) AS {quoted(name)}"
        for name, kind in columns
        if name and name.casefold() not in BASE
    ]
    return (
        f"SELECT {', '.join(['*', *typed])} FROM read_json({source}, format='newline_delimited',"
        f" maximum_object_size={LONGEST_LINE}, columns={_struct(BASE)})"
    )


def _value(name: str, kind: str) -> str:
    pointer = literal("/" + name.replace("~", "~0").replace("/", "~1"))
    scalar = kind.upper() != "JSON" and "[" not in kind and "(" not in kind
    return f"json_extract{'_string' if scalar else ''}(output, {pointer})"


def _results(first: str, names: set[str]) -> str:
    """Return SQL for the result rows as JSON, each with its parents in the table ``first``."""
    head = "SELECT to_json(f)::VARCHAR,"
    if first == INPUT or "id" not in names:
        parents = "NULL" if first == INPUT else f"[{literal(first + ':*')}]"
        return f"{head} {parents} FROM bagent_found AS f ORDER BY f.rowid"
    name = literal(first + ":")
    if "answer" in names:
        parents = f"[{name} || f.id || ':' || f.answer]"
        return f"{head} {parents} FROM bagent_found AS f ORDER BY f.rowid"
    return (
        f"{head} p.parents FROM bagent_found AS f LEFT JOIN (SELECT id,"
        f" list({name} || id || ':' || answer ORDER BY answer) AS parents"
        f" FROM {quoted(first)} GROUP BY id) AS p ON p.id = f.id::VARCHAR ORDER BY f.rowid"
    )
