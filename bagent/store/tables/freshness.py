"""Which tables are made of the journal as it is now, kept in ``tables.json``."""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.duck import Access, connect, file_literal
from bagent.files import is_regular, read_regular
from bagent.store.journal.segments import Stream, list_segments
from bagent.store.run_dir import RunInfo
from bagent.store.tables.schema import COLUMNS, TABLES, is_as_wide, table_columns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_FORMAT = 2
_STREAMS: dict[str, Stream] = {
    "results": "rows",
    "answers": "rows",
    "attempts": "attempts",
    "tool_calls": "tools",
    "endpoints": "endpoints",
}


class Freshness(msgspec.Struct, omit_defaults=True):
    """What ``tables.json`` says: a signature of the source for each table that was made.

    ``database`` is the name of the DuckDB file, empty where there is none. ``notes`` are words
    for people about what could not be done. ``json_columns`` of a table hold JSON as text.
    """

    tables: dict[str, str] = msgspec.field(default_factory=dict)
    database: str = ""
    notes: list[str] = msgspec.field(default_factory=list)
    json_columns: dict[str, list[str]] = msgspec.field(default_factory=dict)


def read_freshness(directory: Path) -> Freshness:
    """What is written about the tables in a directory; empty where nothing is."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        content = read_regular(directory / "tables.json")
        return msgspec.json.decode(content, type=Freshness)
    return Freshness()


def valid_tables(directory: Path, info: RunInfo) -> frozenset[str]:
    """The tables whose files are Parquet with the right columns; they may be somebody else's."""
    paths = {table: directory / f"{table}.parquet" for table in TABLES}
    regular = {table: path for table, path in paths.items() if is_regular(path)}
    if not regular:
        return frozenset()
    with connect(Access(files=[*regular.values()]), settings={"threads": 1}) as connection:
        return frozenset(
            table
            for table, path in regular.items()
            if _has_columns(connection, path, table_columns(table, info.answer_columns))
        )


def _has_columns(
    connection: DuckDBPyConnection, path: Path, expected: list[tuple[str, str]]
) -> bool:
    """Whether a file is Parquet with these columns; JSON is text there."""
    import duckdb

    try:
        described = connection.execute(f"DESCRIBE FROM read_parquet({file_literal(path)})")
        columns = [(str(name), str(kind)) for name, kind, *_ in described.fetchall()]
    except duckdb.Error:
        return False
    return [name for name, _ in columns] == [name for name, _ in expected] and all(
        is_as_wide("VARCHAR" if right == "JSON" else right, kind)
        for (_, kind), (_, right) in zip(columns, expected, strict=True)
    )


def signatures(run_dir: Path, info: RunInfo) -> dict[str, str]:
    """For each table what it would be made of now: files with their sizes, settings, columns."""
    settings = (info.rows, info.keep_input, info.answer_columns)
    result = {}
    for table in TABLES:
        files = [
            (segment.path.name, segment.path.stat().st_size)
            for segment in list_segments(run_dir / "journal", _STREAMS[table])
        ]
        used = settings if _STREAMS[table] == "rows" else tuple(COLUMNS[table])
        content = msgspec.json.encode((_FORMAT, files, used))
        result[table] = blake2b(content, digest_size=8).hexdigest()
    return result


def stale_tables(directory: Path, info: RunInfo, now: dict[str, str]) -> list[str]:
    """The tables in ``directory`` that are missing, older than the journal, or of other columns.

    Args:
        directory: where the tables are.
        info: of the run. Where no Parquet is wanted all are made anew when one is stale.
        now: the signatures of the journal as it is.
    """
    made = read_freshness(directory)
    if made.database and not (directory / Path(made.database).name).is_file():
        return list(TABLES)
    stale = [table for table, signature in now.items() if made.tables.get(table) != signature]
    if not info.parquet:
        return list(TABLES) if stale else []
    if len(stale) == len(TABLES):
        return stale
    sound = valid_tables(directory, info)
    return [table for table in TABLES if table in stale or table not in sound]
