"""Parquet files that are put together, as pyarrow and DuckDB read them."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagent.store.tables.parquet_concat import ParquetConcat, count_rows

SMALL = st.integers(-100, 100)
TYPES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), SMALL),
    "uint16": (pa.uint16(), st.integers(0, 9)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "string": (pa.string(), st.text(max_size=5)),
    "large": (pa.large_string(), st.text(max_size=5)),
    "binary": (pa.binary(), st.binary(max_size=5)),
    "fixed": (pa.binary(2), st.binary(min_size=2, max_size=2)),
    "decimal": (pa.decimal128(9, 2), st.integers(-999, 999).map(lambda n: Decimal(n) / 100)),
    "date": (pa.date32(), st.dates(date(1900, 1, 1), date(2100, 1, 1))),
    "time": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(UTC))),
    "plain time": (pa.timestamp("ms"), st.integers(0, 10**9).map(datetime.utcfromtimestamp)),
    "words": (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b"])),
    "list": (pa.list_(pa.int32()), st.lists(st.none() | SMALL, max_size=3)),
    "struct": (
        pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))]),
        st.fixed_dictionaries({"x": st.none() | SMALL, "y": st.none() | st.lists(st.text())}),
    ),
    "map": (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(st.text(), SMALL), max_size=2)),
    "null": (pa.null(), st.none()),
}  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> list[Any]:
    """Return tables of the same columns."""
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=5, unique=True))
    schema = pa.schema([(name, TYPES[name][0]) for name in names])
    row = st.fixed_dictionaries({name: st.none() | TYPES[name][1] for name in names})
    tables = draw(st.lists(st.lists(row, max_size=6), min_size=1, max_size=4))
    return [pa.Table.from_pylist(rows, schema) for rows in tables]


def joined(paths: list[Path], path: Path) -> Path:
    concat = ParquetConcat(path)
    with closing(concat):
        for part in paths:
            assert concat.add(part) == count_rows(part)
        concat.finish()
    return path


@given(
    tables=parts(),
    group=st.integers(1, 4),
    compression=st.sampled_from(["none", "snappy", "zstd"]),
    options=st.fixed_dictionaries(
        {
            "write_page_index": st.booleans(),
            "use_dictionary": st.booleans(),
            "write_statistics": st.booleans(),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
        }
    ),
)
def test_rows_of_all_columns_stand_in_order(folder, tables, group, compression, options):
    paths = []
    for number, table in enumerate(tables):
        paths.append(folder / f"part-{number}.parquet")
        pq.write_table(table, paths[-1], row_group_size=group, compression=compression, **options)
    path = joined(paths, folder / "all.parquet")
    complete = pa.concat_tables([pq.read_table(part) for part in paths])
    assert pq.read_table(path).to_pylist() == complete.to_pylist()
    assert pq.read_schema(path).equals(tables[0].schema)
    file = pq.ParquetFile(path)
    for number in range(file.num_row_groups):
        file.read_row_group(number)
    assert count_rows(path) == len(complete)


@pytest.fixture(scope="module")
def connection():
    with duckdb.connect() as opened:
        # As for the tables of runs: nullable columns whatever a part holds.
        opened.execute("SET disabled_optimizers = 'statistics_propagation'")
        yield opened


@given(
    tables=st.lists(
        st.lists(st.tuples(st.none() | SMALL, st.none() | st.text("ab", max_size=2)), max_size=9),
        min_size=1,
        max_size=4,
    ),
    number=SMALL,
    word=st.text("ab", max_size=2),
)
def test_filters_find_the_rows_of_all_parts(folder, connection, tables, number, word):
    paths = []
    for at, rows in enumerate(tables):
        paths.append(folder / f"duck-{at}.parquet")
        connection.execute("CREATE OR REPLACE TABLE t (n INTEGER, w VARCHAR)")
        if rows:
            connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
        connection.execute(f"COPY t TO '{paths[-1]}' (FORMAT parquet)")
    path = joined(paths, folder / "duck.parquet")
    read = connection.execute(
        f"SELECT n, w FROM '{path}' WHERE n >= ? OR w = ?", [number, word]
    ).fetchall()
    every = [row for rows in tables for row in rows]
    assert read == [(n, w) for n, w in every if (n is not None and n >= number) or w == word]


@given(footer=st.binary(max_size=60), cut=st.integers(0, 1 << 16))
def test_what_is_no_parquet_file_is_a_value_error(folder, footer, cut):
    path = folder / "damaged.parquet"
    pq.write_table(pa.table({"a": [1, 2, None], "b": [["x"], None, []]}), path)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    for broken in (
        data[: cut % len(data)],
        b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1",
        data[: -8 - cut % size] + (size - cut % size).to_bytes(4, "little") + b"PAR1",
    ):
        path.write_bytes(broken)
        if broken != data:
            with pytest.raises(ValueError, match="Parquet"):
                count_rows(path)
