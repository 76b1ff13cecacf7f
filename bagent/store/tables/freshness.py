"""Which tables are up to date, recorded in ``tables.json``."""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.duck import Access, connect, file_source
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
    """The content of ``tables.json``: the signature of the source of each table.

    ``database`` is the name of the DuckDB file, empty if there is none. ``notes`` are messages
    about the build. ``json_columns`` of a table hold JSON as text.
    """

    tables: dict[str, str] = msgspec.field(default_factory=dict)
    database: str = ""
    notes: list[str] = msgspec.field(default_factory=list)
    json_columns: dict[str, list[str]] = msgspec.field(default_factory=dict)


def read_freshness(directory: Path) -> Freshness:
    """Read ``tables.json`` in a directory; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        content = read_regular(directory / "tables.json")
        return msgspec.json.decode(content, type=Freshness)
    return Freshness()


def valid_tables(
    directory: Path, info: RunInfo, connection: DuckDBPyConnection | None = None
) -> frozenset[str]:
    """Return the tables whose Parquet files have the right columns; the files are not trusted.

    Args:
        directory: the folder of the tables.
        info: the run.
        connection: may read the files; None opens one.
    """
    paths = {table: directory / f"{table}.parquet" for table in TABLES}
    regular = {table: path for table, path in paths.items() if is_regular(path)}
    if not regular:
        return frozenset()
    with contextlib.ExitStack() as stack:
        if connection is None:
            access = Access(files=[*regular.values()])
            connection = stack.enter_context(connect(access, settings={"threads": 1}))
        return frozenset(
            table
            for table, path in regular.items()
            if _has_columns(connection, path, table_columns(table, info.answer_columns))
        )


def _has_columns(
    connection: DuckDBPyConnection, path: Path, expected: list[tuple[str, str]]
) -> bool:
    """Return whether a file is Parquet with these columns, JSON being text."""
    import duckdb

    try:
        described = connection.execute(f"DESCRIBE FROM read_parquet({file_source(path)})")
        columns = [(str(name), str(kind)) for name, kind, *_ in described.fetchall()]
    except duckdb.Error:
        return False
    return [name for name, _ in columns] == [name for name, _ in expected] and all(
        is_as_wide("VARCHAR" if right == "JSON" else right, kind)
        for (_, kind), (_, right) in zip(columns, expected, strict=True)
    )


def signatures(run_dir: Path, info: RunInfo) -> dict[str, str]:
    """Return the current signature of each table's source: files with sizes, settings, columns."""
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


def stale_tables(
    directory: Path,
    info: RunInfo,
    now: dict[str, str],
    connection: DuckDBPyConnection | None = None,
) -> list[str]:
    """Return the tables that are missing, older than the journal, or have other columns.

    Args:
        directory: the folder of the tables.
        info: the run. Without Parquet files, all tables are stale if one is.
        now: the current signatures.
        connection: may read the tables; None opens one where they have to be looked at.
    """
    made = read_freshness(directory)
    if made.database and not (directory / Path(made.database).name).is_file():
        return list(TABLES)
    stale = [table for table, signature in now.items() if made.tables.get(table) != signature]
    if not info.parquet:
        return list(TABLES) if stale else []
    if len(stale) == len(TABLES):
        return stale
    sound = valid_tables(directory, info, connection)
    return [table for table in TABLES if table in stale or table not in sound]
