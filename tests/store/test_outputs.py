from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import msgspec

from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.build import TableOptions, make_tables
from bagent.store.tables.schema import TABLES


def rows_of(source: str, database: Path | None = None) -> list[tuple[Any, ...]]:
    with duckdb.connect(":memory:" if database is None else str(database)) as connection:
        return connection.execute(f"FROM {source}").fetchall()


def test_the_database_holds_what_the_parquet_files_hold(
    store: Any, outcome: Any, failure: Any
) -> None:
    texts = [
        "",
        "a" * 100_000,
        "a\0b",
        "\u2028 ü 🙂",
        *(f"word {n} " * (n % 40) for n in range(900)),
    ]
    created = [
        outcome(n, text=text, output=msgspec.Raw(msgspec.json.encode({"text": text, "n": n})))
        for n, text in enumerate(texts)
    ]
    store.write(*created, failure(len(texts)))
    info = RunInfo("packed", answer_columns=[("text", "VARCHAR"), ("n", "JSON")])
    RunDir.create(store.path).save(info)
    make_tables(store.path, TableOptions(), store.reports.append)
    for table in TABLES:
        there = rows_of(table, store.path / "run.duckdb")
        assert there == rows_of(f"'{store.path / table}.parquet'")
    displayed = [row[0] for row in rows_of("(SELECT text FROM results)", store.path / "run.duckdb")]
    assert displayed[:-1] == texts
