"""``sql``: SELECT statements over a DuckDB file, or over data files, and nothing else."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import Access, Setting, SqlError, connect, file_literal, quoted, single_query
from bagent.errors import MissingPackage, UsageError
from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_ROWS = 1_000
MOST_BYTES = 256 << 10
LONGEST_VALUE = 64 << 10
"""Characters of one text, or items of one list."""

DESCRIPTION = "Ask a DuckDB database with one SELECT statement; the answer is a JSON list of rows."

READERS = {
    ".parquet": "read_parquet",
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".json": "read_json",
    ".jsonl": "read_json",
    ".ndjson": "read_json",
}
"""Functions that read a data file, by its suffix (before ``.gz`` or ``.zst``)."""

_SETTINGS: dict[str, Setting] = {
    "threads": 2,
    "memory_limit": "512MB",
    "temp_directory": "",
    "TimeZone": "UTC",
}


@dataclass(frozen=True, slots=True)
class SqlConfig:
    """The database of the tool and its statement.

    Attributes:
        database: a DuckDB file, opened read-only; None: the files.
        files: the files of each table, by the table's name.
        query: a fixed statement with ``$name`` for each argument; empty: the model writes it.
        key: the argument of ``query`` that is a list, and the column of its items.
    """

    database: Path | None = None
    files: Mapping[str, Sequence[Path]] | None = None
    query: str = ""
    key: str = ""


class Sql:
    """An open database; use it in one event loop.

    Raises:
        MissingPackage: DuckDB is not installed.
        UsageError: the database, a file or the fixed statement is wrong.
    """

    def __init__(self, config: SqlConfig, threads: AbandonableThreads) -> None:
        self._config = config
        self._threads = threads
        try:
            import duckdb
        except ImportError:
            raise MissingPackage("the tool sql needs DuckDB", hint="pip install duckdb") from None
        self._duckdb = duckdb
        try:
            self._connection = _connected(config)
        except duckdb.Error as error:
            raise UsageError(f"sql: {_first_line(error)}") from None
        self.schema = self._schema()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _schema(self) -> Json:
        query, key = self._config.query, self._config.key
        if not query:
            return _object({"query": {"type": "string", "description": self._tables()}})
        try:
            self._check(query)
        except ToolFault as fault:
            raise UsageError(f"sql: query: {fault.message}") from None
        names = self._names(query)
        if key and key not in names:
            raise UsageError(f"sql: the query has no ${key}", hint=f"WHERE {key} IN ${key}")
        scalar: Json = {"type": ["string", "number", "boolean", "null"]}
        listed: Json = {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1}
        return _object({name: listed if name == key else scalar for name in names})

    def _tables(self) -> str:
        """Return the description of the tables for the model, with their columns."""
        columns_of = self._connection.execute(
            "SELECT table_schema, table_name, string_agg(column_name || ' ' || data_type, ', '"
            " ORDER BY ordinal_position) FROM information_schema.columns GROUP BY ALL ORDER BY ALL"
        ).fetchmany(50)
        tables = [
            f"{name if schema == 'main' else f'{schema}.{name}'}({columns})"
            for schema, name, columns in columns_of
        ]
        return f"A SELECT statement. Tables: {'; '.join(tables)}"[:4000]

    async def run(self, arguments: Arguments) -> str:
        """Run one statement and return its rows as a JSON list.

        Raises:
            ToolFault: the statement is wrong or not a SELECT.
        """
        query = self._config.query or arguments["query"]
        rows, note = await self._ask(query, arguments if self._config.query else None, 1)
        return f"[{','.join(text for _, text in rows)}]{note}"

    async def run_many(self, calls: Sequence[Arguments]) -> list[str | ToolFault]:
        """Answer several calls that differ in their keys by one statement."""
        answers: dict[int, str | ToolFault] = {}
        for indexes in _alike(calls, self._config.key):
            try:
                answers.update(await self._ask_together(calls, indexes))
            except ToolFault as fault:
                answers.update(dict.fromkeys(indexes, fault))
        return [answers[index] for index in range(len(calls))]

    async def _ask_together(
        self, calls: Sequence[Arguments], indexes: Sequence[int]
    ) -> dict[int, str | ToolFault]:
        key = self._config.key
        keys = list(dict.fromkeys(item for index in indexes for item in calls[index][key]))
        arguments = {**calls[indexes[0]], key: keys}
        rows, note = await self._ask(self._config.query, arguments, len(indexes))
        if any(row_key is None for row_key, _ in rows):
            raise ToolFault(f"the query has no column {key}, by which rows belong to calls")
        answers: dict[int, str | ToolFault] = {}
        row_keys = {row_key for row_key, _ in rows}
        has_other_keys = not row_keys <= {str(item) for item in keys}
        for index in indexes:
            own = {str(item) for item in calls[index][key]}
            if has_other_keys and not own <= row_keys:
                # The column may write a key in another way: 1.0 is 1, 2024-1-1 is 2024-01-01.
                answers[index] = await self._alone(calls[index])
                continue
            mine = [text for row_key, text in rows if row_key in own]
            answers[index] = f"[{','.join(mine)}]{note}"
        return answers

    async def _alone(self, call: Arguments) -> str | ToolFault:
        try:
            return await self.run(call)
        except ToolFault as fault:
            return fault

    # --- asking -------------------------------------------------------------------------------

    def _check(self, query: str) -> None:
        try:
            single_query(self._connection, query)
        except self._duckdb.Error as error:
            raise ToolFault(_first_line(error)) from None
        except SqlError as fault:
            raise ToolFault(f"only one SELECT statement may be asked: {fault}") from None

    def _names(self, query: str) -> list[str]:
        parameters = self._duckdb.extract_statements(query)[0].named_parameters
        return sorted(parameters, key=lambda name: query.find(f"${name}"))

    async def _ask(
        self, query: str, values: Arguments | None, calls: int
    ) -> tuple[list[tuple[str | None, str]], str]:
        """Return rows as JSON texts, each with its key, and a note where rows were left out."""
        self._check(query)
        if values is not None:
            values = {name: values.get(name) for name in self._names(query)}
        cursor = self._connection.cursor()
        running = [True]

        def ask() -> tuple[list[tuple[str | None, str]], str]:
            try:
                cursor.execute(query, values)
                return _rows(cursor, self._config.key, calls)
            except self._duckdb.Error as error:
                raise ToolFault(_first_line(error)) from None
            finally:
                running.clear()
                cursor.close()

        try:
            return await self._threads.run(ask)
        except asyncio.CancelledError:
            _interrupt(cursor, running)
            raise


def _interrupt(cursor: DuckDBPyConnection, running: list[bool]) -> None:
    """Interrupt a statement until it ends: one that is about to start ignores an interrupt."""
    if running:
        cursor.interrupt()
        asyncio.get_running_loop().call_later(0.05, _interrupt, cursor, running)


def _connected(config: SqlConfig) -> DuckDBPyConnection:
    files = config.files or {}
    access = Access(files=[path for paths in files.values() for path in paths])
    connection = connect(access, database=config.database, settings=_SETTINGS)
    for name, paths in files.items():
        listed = ", ".join(map(file_literal, paths))
        connection.execute(
            f"CREATE VIEW {quoted(name)} AS SELECT * FROM {_reader(paths[0])}([{listed}])"
        )
    return connection


def _reader(path: Path) -> str:
    name = re.sub(r"\.(gz|zst)$", "", path.name.lower())
    reader = READERS.get(Path(name).suffix)
    if reader is None:
        names = " ".join(READERS)
        raise UsageError(f"sql cannot read {path.name}", hint=f"it reads {names}")
    return reader


def table_name(path: str) -> str:
    """Return the table name of a file or glob: the start of its name, or of its folder's."""
    file = Path(path)
    for part in (file.name.partition(".")[0], file.parent.name):
        name = re.sub(r"\W+", "_", re.sub(r"[*?\[].*", "", part)).strip("_").lower()
        if name:
            return name if not name[0].isdigit() else f"t{name}"
    return "data"


def _rows(
    cursor: DuckDBPyConnection, key: str, calls: int
) -> tuple[list[tuple[str | None, str]], str]:
    names = [column[0] for column in cursor.description or ()]
    key_index = names.index(key) if key in names else None
    rows: list[tuple[str | None, str]] = []
    size = 0
    # One by one: a few rows may fill the memory limit.
    while (record := cursor.fetchone()) is not None:
        if len(rows) >= MOST_ROWS * calls:
            return rows, f"\n[cut: the first {len(rows):,} rows; there are more]"
        text = _json(dict(zip(names, record, strict=True)))
        size += len(text)
        if size > MOST_BYTES * calls:
            returned = f"the first {len(rows):,} rows" if rows else "the first row is too large"
            return rows, f"\n[cut: {returned}; there are more]"
        rows.append((None if key_index is None else str(record[key_index]), text))
    return rows, ""


def _json(row: dict[str, Any]) -> str:
    return msgspec.json.encode(_plain(row), enc_hook=str).decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """Return a value of DuckDB in a JSON form; a long one is cut with a note."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > LONGEST_VALUE:
        more = len(value) - LONGEST_VALUE
        if isinstance(value, str | bytes):
            start = value[:LONGEST_VALUE]
            text = start if isinstance(start, str) else start.hex()
            return f"{text}[cut: {more:,} more]"
        value = [*value[:LONGEST_VALUE], f"[cut: {more:,} more]"]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _alike(calls: Sequence[Arguments], key: str) -> list[list[int]]:
    """Group the indexes of calls that are equal but for their keys, with keys of one type."""
    groups: dict[bytes, list[int]] = {}
    for index, call in enumerate(calls):
        kinds = sorted({type(item).__name__ for item in call[key]})
        common = {**call, key: kinds}
        groups.setdefault(msgspec.json.encode(common, order="deterministic"), []).append(index)
    return list(groups.values())


def _object(properties: dict[str, Json]) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _first_line(error: Exception) -> str:
    return " ".join(str(error).partition("\n\n")[0].split())[:500]
