"""Which tables are made of the journal as it is now, kept in ``tables.json``."""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import Path

import msgspec

from bagent.store.columns import COLUMNS, TABLES
from bagent.store.rundir import RunInfo
from bagent.store.segments import Stream, list_segments

_FORMAT = 1
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
    for people about what could not be done.
    """

    tables: dict[str, str] = msgspec.field(default_factory=dict)
    database: str = ""
    notes: list[str] = msgspec.field(default_factory=list)


def read_freshness(directory: Path) -> Freshness:
    """What is written about the tables in a directory; empty where nothing is."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        content = (directory / "tables.json").read_bytes()
        return msgspec.json.decode(content, type=Freshness)
    return Freshness()


def signatures(run_dir: Path, info: RunInfo) -> dict[str, str]:
    """For each table what it would be made of now: files with their sizes, settings, columns."""
    settings = (info.rows, info.keep_input, info.answer_columns)
    found = {}
    for table in TABLES:
        files = [
            (segment.path.name, segment.path.stat().st_size)
            for segment in list_segments(run_dir / "journal", _STREAMS[table])
        ]
        used = settings if _STREAMS[table] == "rows" else tuple(COLUMNS[table])
        content = msgspec.json.encode((_FORMAT, files, used))
        found[table] = blake2b(content, digest_size=8).hexdigest()
    return found


def stale_tables(directory: Path, now: dict[str, str], *, parquet: bool) -> list[str]:
    """The tables in ``directory`` that are missing or older than the journal.

    Args:
        directory: where the tables are.
        now: the signatures of the journal as it is.
        parquet: they are kept as Parquet; without, all are made anew when one is stale.
    """
    made = read_freshness(directory)
    if made.database and not (directory / made.database).is_file():
        return list(TABLES)
    stale = [
        table
        for table, signature in now.items()
        if made.tables.get(table) != signature
        or (parquet and not (directory / f"{table}.parquet").is_file())
    ]
    return list(TABLES) if stale and not parquet else stale
