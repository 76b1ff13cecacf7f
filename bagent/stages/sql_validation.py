"""Looks at the query of a ``sql`` stage before anything is sent: DuckDB binds it to no rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import Access, SqlError, quoted, single_query
from bagent.stages.query import StageTable, input_line, make_tables, open_database
from bagent.stages.row import INPUT
from bagent.text.suggest import nearest_name
from bagent.types import Row

if TYPE_CHECKING:
    import duckdb

LONGEST_TEXT = 256
"""Characters of a text of the sample that are enough to guess its type."""

_MAKE = "CREATE TEMP VIEW bagent_found AS\n"
_TABLE = "CREATE TEMP TABLE bagent_found AS\n"
_EXPLAIN = f"EXPLAIN {_TABLE}"
_NO_COLUMN = re.compile(r'(?:column|named) "(?P<name>[^"]*)"(?: not found in| was not found|$)')
_NO_TABLE = re.compile(r'Table with name (?P<name>.+) does not exist|table "(?P<other>[^"]*)" not')
_WHATEVER_TYPES = re.compile(r"Referenced |does not have a column|GROUP BY")
"""What DuckDB says of a query that is wrong whatever types the columns have."""


class QueryError(msgspec.Struct, frozen=True):
    """Why a query cannot be asked: words, how to mend it, and the offset in it, if known."""

    words: str
    hint: str
    offset: int | None


class QueryCheck(msgspec.Struct, frozen=True):
    """A query that can be asked; its result's ``columns``, None where only its rows will tell."""

    columns: tuple[str, ...] | None


def validate_query(
    query: str, tables: Sequence[StageTable], sample: Sequence[Row]
) -> QueryCheck | QueryError:
    """Bind ``query`` to tables as the run will have them, without rows; nothing is computed.

    Args:
        tables: what it reads. Types of ``input`` are guessed from the sample, so a query that
            reads it and is wrong only by a type is let pass.
        sample: the first rows of the input.
    """
    with TemporaryDirectory(prefix="bagent-sql-") as folder:
        work = Path(folder)
        placed = [_placed(number, table, work, sample) for number, table in enumerate(tables)]
        # Nothing that the query names is read: looking at a job of others has no effect.
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
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


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
        pass  # binding it says where it is wrong
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
        found = connection.execute("DESCRIBE bagent_found").fetchall()
        return QueryCheck(tuple(str(name) for name, *_ in found))
    except (duckdb.ParserException, duckdb.CatalogException, duckdb.BinderException) as error:
        typed = isinstance(error, duckdb.BinderException)
        if typed and INPUT in _names(tables) and not _WHATEVER_TYPES.search(str(error)):
            return QueryCheck(None)
        return _fault(str(error), query, head, connection, tables)
    except duckdb.Error:
        return QueryCheck(None)  # such as a file that is not there yet: the run will tell


def _names(tables: Sequence[StageTable]) -> list[str]:
    return [table.name for table in tables]


def _fault(
    text: str,
    query: str,
    head: str,
    connection: duckdb.DuckDBPyConnection,
    tables: Sequence[StageTable],
) -> QueryError:
    told = _told(text)
    words = str(told.get("exception_message") or text).strip().splitlines()[0]
    hint = ""
    if table := _NO_TABLE.search(words):
        name = table["name"] or table["other"]
        words = f"there is no table {name}"
        hint = _hint(name, _names(tables))
    elif column := _NO_COLUMN.search(words):
        name = column["name"]
        words = f"there is no column {name}"
        hint = _hint(name, _columns(connection, tables))
    offset = None
    with suppress(KeyError, ValueError):
        # DuckDB counts bytes.
        before = (head + query.strip()).encode()[: int(told["position"])].decode()
        begin = len(query) - len(query.lstrip())
        offset = len(before) - len(head) + begin
    return QueryError(words, hint, offset if offset is not None and offset >= 0 else None)


def _told(text: str) -> Mapping[str, Any]:
    """What DuckDB says, by name; nothing where it is not JSON."""
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode(text[text.find("{") :])
        if isinstance(found, dict):
            return found
    return {}


def _hint(name: str, known: Sequence[str]) -> str:
    meant = nearest_name(name.strip('"'), known)
    return f"did you mean {meant}?" if meant else f"there are {', '.join(known[:12])}"


def _columns(connection: duckdb.DuckDBPyConnection, tables: Sequence[StageTable]) -> list[str]:
    found: dict[str, None] = {}
    for table in tables:
        rows = connection.execute(f"DESCRIBE {quoted(table.name)}").fetchall()
        found.update(dict.fromkeys(str(name) for name, *_ in rows))
    return list(found)
