"""Validation of a ``sql`` stage's query before anything is sent, by binding it to empty tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import Access, SqlError, quoted, single_query
from bagent.stages.prepare import suggest_name
from bagent.stages.query import StageTable, input_line, make_tables, open_database
from bagent.stages.row import INPUT
from bagent.types import Row

if TYPE_CHECKING:
    import duckdb

LONGEST_TEXT = 256
"""Characters of a sampled text that are enough to guess its type."""

_MAKE = "CREATE TEMP VIEW bagent_found AS\n"
_TABLE = "CREATE TEMP TABLE bagent_found AS\n"
_EXPLAIN = f"EXPLAIN {_TABLE}"
_NO_COLUMN = re.compile(r'(?:column|named) "(?P<name>[^"]*)"(?: not found in| was not found|$)')
_NO_TABLE = re.compile(r'Table with name (?P<name>.+) does not exist|table "(?P<other>[^"]*)" not')
_WHATEVER_TYPES = re.compile(r"Referenced |does not have a column|GROUP BY")
"""DuckDB's messages about a query that is wrong whatever types the columns have."""


class QueryError(msgspec.Struct, frozen=True):
    """Why a query is wrong, how to mend it, and the offset of the fault, if known."""

    message: str
    hint: str
    offset: int | None


class QueryCheck(msgspec.Struct, frozen=True):
    """The columns of a valid query's result; None where they depend on the rows."""

    columns: tuple[str, ...] | None


def validate_query(
    query: str, tables: Sequence[StageTable], sample: Sequence[Row]
) -> QueryCheck | QueryError:
    """Bind ``query`` to tables as the run will have them, without rows.

    Args:
        query: the SQL.
        tables: the tables. Types of ``input`` are guessed from the sample, so a query that reads it
            and is wrong only by a type passes.
        sample: the first rows of the input.
    """
    with TemporaryDirectory(prefix="bagent-sql-") as folder:
        work = Path(folder)
        placed = [_placed(number, table, work, sample) for number, table in enumerate(tables)]
        # Files that the query names are not read: checking a job has no effect.
        access = Access(files=[table.path for table in placed])
        connection = open_database(access, work, errors_as_json=True)
        try:
            return _bound(connection, query, placed)
        finally:
            connection.close()


def _placed(number: int, table: StageTable, work: Path, sample: Sequence[Row]) -> StageTable:
    path = work / f"table-{number}.jsonl"
    with path.open("wb") as lines:
        for row in sample if table.name == INPUT else ():
            short = {name: _short(value) for name, value in row.data.items()}
            lines.write(input_line(msgspec.structs.replace(row, data=short)))
    return StageTable(table.name, table.columns, path)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _bound(
    connection: duckdb.DuckDBPyConnection, query: str, tables: Sequence[StageTable]
) -> QueryCheck | QueryError:
    import duckdb

    text = query.strip()
    try:
        text = single_query(connection, text)
    except SqlError as fault:
        return QueryError(str(fault), fault.hint, None)
    except duckdb.Error:
        pass  # binding reports the offset
    make_tables(connection, tables)
    for table in tables:
        connection.execute(f"DELETE FROM {quoted(table.name)}")
    head = _MAKE
    try:
        try:
            connection.execute(head + text)
        except duckdb.ParserException as error:
            if "cannot be used in views" not in str(error):
                raise
            # Its columns depend on the rows.
            head = _EXPLAIN
            connection.execute(head + text)
            return QueryCheck(None)
        columns = connection.execute("DESCRIBE bagent_found").fetchall()
        return QueryCheck(tuple(str(name) for name, *_ in columns))
    except (duckdb.ParserException, duckdb.CatalogException, duckdb.BinderException) as error:
        typed = isinstance(error, duckdb.BinderException)
        if typed and INPUT in _names(tables) and not _WHATEVER_TYPES.search(str(error)):
            return QueryCheck(None)
        return _fault(str(error), query, head, connection, tables)
    except duckdb.Error:
        return QueryCheck(None)  # such as a file that does not exist yet


def _names(tables: Sequence[StageTable]) -> list[str]:
    return [table.name for table in tables]


def _fault(
    text: str,
    query: str,
    head: str,
    connection: duckdb.DuckDBPyConnection,
    tables: Sequence[StageTable],
) -> QueryError:
    report = _error_report(text)
    message = str(report.get("exception_message") or text).strip().splitlines()[0]
    hint = ""
    if table := _NO_TABLE.search(message):
        name = table["name"] or table["other"]
        message = f"there is no table {name}"
        hint = suggest_name(name, _names(tables))
    elif column := _NO_COLUMN.search(message):
        name = column["name"]
        message = f"there is no column {name}"
        hint = suggest_name(name, _columns(connection, tables))
    offset = None
    with suppress(KeyError, ValueError):
        # DuckDB counts bytes.
        before = (head + query.strip()).encode()[: int(report["position"])].decode()
        begin = len(query) - len(query.lstrip())
        offset = len(before) - len(head) + begin
    return QueryError(message, hint, offset if offset is not None and offset >= 0 else None)


def _error_report(text: str) -> Mapping[str, Any]:
    """Return the fields of DuckDB's error; none where it is not JSON."""
    with suppress(msgspec.DecodeError):
        report = msgspec.json.decode(text[text.find("{") :])
        if isinstance(report, dict):
            return report
    return {}


def _columns(connection: duckdb.DuckDBPyConnection, tables: Sequence[StageTable]) -> list[str]:
    columns: dict[str, None] = {}
    for table in tables:
        rows = connection.execute(f"DESCRIBE {quoted(table.name)}").fetchall()
        columns.update(dict.fromkeys(str(name) for name, *_ in rows))
    return list(columns)
