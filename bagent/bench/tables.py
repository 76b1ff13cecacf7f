"""Raw rows into DuckDB, and out again as Parquet and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagent.bench import definitions as sql
from bagent.duck import Access, connect, file_literal, literal
from bagent.errors import WriteError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

DATABASE = "bench.duckdb"
MEMORY_LIMIT = "1GB"

_SOURCES = {
    "requests": (sql.REQUESTS, "requests-*.jsonl"),
    "stages": (sql.STAGES, "stages.jsonl"),
    "client": (sql.CLIENT, "client-*.jsonl"),
    "servers": (sql.SERVERS, "servers.jsonl"),
}


class Tables:
    """The tables of one load test, in ``bench.duckdb`` of its folder; use it with ``with``.

    Args:
        folder: where the raw rows are and the database is made, in place of one of before.
    """

    def __init__(self, folder: Path) -> None:
        import duckdb

        self._folder = folder
        path = folder / DATABASE
        try:
            path.unlink(missing_ok=True)
            self.connection: DuckDBPyConnection = connect(
                Access(folders=[folder]),
                database=path,
                read_only=False,
                settings={"threads": 2, "memory_limit": MEMORY_LIMIT},
            )
        except (OSError, duckdb.Error) as error:
            raise WriteError(f"cannot write {path}: {error}") from None
        for name, (columns, pattern) in _SOURCES.items():
            self._load(name, columns, pattern)
        for view in (sql.TIMED, sql.SPREAD_TOKENS, sql.GAPS):
            self.connection.execute(view)

    def _load(self, name: str, columns: Mapping[str, str], pattern: str) -> None:
        files = [
            file_literal(path) for path in sorted(self._folder.glob(pattern)) if path.stat().st_size
        ]
        listed = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
        self.connection.execute(f"create table {name} ({listed})")
        if not files:
            return
        chosen = ", ".join(
            f'coalesce("{column}", {sql.DEFAULTS[column]}) as "{column}"'
            if name == "requests" and column in sql.DEFAULTS
            else f'"{column}"'
            for column in columns
        )
        self.connection.execute(
            f"insert into {name} select {chosen} from read_json([{', '.join(files)}],"
            f" format='newline_delimited', columns={dict(columns)!r}, maximum_object_size=67108864)"
        )

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query by column name."""
        found = self.connection.execute(query, list(values))
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def write_parquet(self) -> list[Path]:
        """Write every table as a Parquet file beside the database."""
        written = []
        for name in _SOURCES:
            path = self._folder / f"{name}.parquet"
            self.connection.execute(
                f"copy {name} to {literal(str(path))} (format parquet, compression zstd)"
            )
            written.append(path)
        return written

    def close(self) -> None:
        """Write all out and close the database."""
        self.connection.close()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that share their keys as a CSV file with a header.

    Raises:
        WriteError: it cannot be written.
    """
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from None
