"""What ``tests/properties/test_parquet.py`` does not reach: Bloom filters and other columns."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagent.store.tables.parquet_concat import ParquetConcat

PACKED = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A part of several groups of rows, with Bloom filters."""
    path = tmp_path / "part.parquet"
    with duckdb.connect() as con:
        words = "SELECT i, 'name ' || i % 50 AS word FROM range(5000) t(i)"
        con.execute(f"COPY ({words}) TO '{path}' ({PACKED})")
    return path


def test_filters_of_moved_groups_lead_to_their_rows(part, tmp_path):
    path = tmp_path / "all.parquet"
    join = ParquetConcat(path)
    for _ in range(2):
        join.add(part)
    join.finish()
    with duckdb.connect() as con:
        for word, rows in (("name 0", 200), ("name 49", 200), ("name 50", 0)):
            result = con.execute(f"SELECT count(*) FROM '{path}' WHERE word = '{word}'").fetchall()
            assert result == [(rows,)]
        ((offsets, distinct),) = con.execute(
            f"SELECT count(bloom_filter_offset), count(DISTINCT bloom_filter_offset)"
            f" FROM parquet_metadata('{path}')"
        ).fetchall()
    assert offsets == distinct > 0


def test_other_columns_are_refused(part, tmp_path):
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"i": [1]}), other)
    join = ParquetConcat(tmp_path / "all.parquet")
    join.add(part)
    with pytest.raises(ValueError, match="other columns"):
        join.add(other)
    join.close()
