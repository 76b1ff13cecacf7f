from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from bagent.store.tables.parquet_concat import ParquetConcat, count_rows

PACKED = "FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048"


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Parts of several groups of rows, of one, and of none."""
    paths = []
    with duckdb.connect() as con:
        con.execute("SET disabled_optimizers = 'statistics_propagation'")
        for number, (low, high) in enumerate([(0, 5000), (5000, 5000), (5000, 5007)]):
            path = tmp_path / f"part-{number}.parquet"
            con.execute(
                "COPY (SELECT i, i % 7 AS few, 'name ' || i % 50 AS word,"
                " if(i % 3 = 0, NULL, [i, i + 1]) AS list,"
                " ('{\"a\": ' || i || '}')::JSON AS json"
                f" FROM range({low}, {high}) t(i)) TO '{path}' ({PACKED})"
            )
            paths.append(path)
    return paths


def joined(parts: list[Path], path: Path) -> Path:
    join = ParquetConcat(path)
    for part in parts:
        assert join.add(part) == count_rows(part)
    join.finish()
    return path


def test_rows_of_all_parts_stand_in_order(parts: list[Path], tmp_path: Path) -> None:
    path = joined(parts, tmp_path / "all.parquet")
    complete = pq.read_table(path)
    parts_read = pa.concat_tables([pq.read_table(part) for part in parts])
    assert complete.to_pylist() == parts_read.to_pylist()
    assert complete.schema.field("json").type == pa.string()
    assert complete["i"].to_pylist() == list(range(5007))
    assert count_rows(path) == 5007


def test_statistics_and_filters_of_moved_groups_lead_to_their_rows(
    parts: list[Path], tmp_path: Path
) -> None:
    path = joined([*parts, *parts], tmp_path / "all.parquet")
    with duckdb.connect() as con:
        for word in ("name 0", "name 49", "name 50"):
            result = con.execute(f"SELECT count(*) FROM '{path}' WHERE word = '{word}'").fetchall()
            assert result == [(2 * sum(f"name {i % 50}" == word for i in range(5007)),)]
        kind = con.execute(f"SELECT DISTINCT typeof(json) FROM '{path}'").fetchall()
        offsets = con.execute(
            f"SELECT count(DISTINCT bloom_filter_offset), count(bloom_filter_offset)"
            f" FROM parquet_metadata('{path}')"
        ).fetchall()
    assert kind == [("VARCHAR",)]
    assert offsets[0][0] == offsets[0][1] > 0


def test_other_columns_are_refused(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"i": [1]}), other)
    join = ParquetConcat(tmp_path / "all.parquet")
    join.add(parts[0])
    with pytest.raises(ValueError, match="other columns"):
        join.add(other)
    join.close()
