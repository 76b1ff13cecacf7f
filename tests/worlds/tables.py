"""Tables of a world: made by the real program at its end, and read by DuckDB."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bagent.store.tables.build import TableOptions, make_tables

COLUMNS = {
    "results": ("row", "stage", "answer", "status", "error_kind", "text", "prompt_tokens",
                "completion_tokens", "cost_usd", "finished_at"),
    "attempts": ("row", "stage", "answer", "turn", "try", "status_code", "error_kind", "endpoint"),
    "tool_calls": ("row", "stage", "turn", "name", "error"),
}  # fmt: skip
"""The columns of each table that are compared with the journal."""


def read(run: Path) -> dict[str, list[dict[str, Any]]] | None:
    """Make the tables of a run, and return their rows; None where it has no journal."""
    if not (run / "journal").is_dir():
        return None
    import duckdb

    make_tables(run, TableOptions(memory_mb=100), lambda _: None)
    tables: dict[str, list[dict[str, Any]]] = {}
    with duckdb.connect() as connection:
        for name, columns in COLUMNS.items():
            query = f"SELECT {', '.join(columns)} FROM read_parquet($path)"
            rows = connection.execute(query, {"path": os.fspath(run / f"{name}.parquet")})
            tables[name] = [dict(zip(columns, row, strict=True)) for row in rows.fetchall()]
    return tables
