import base64
import json
import struct

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagent.errors import InputError
from bagent.rows import RowsConfig, open_rows
from bagent.rows.formats.duckdb_source import duration_units

COLUMNS = {
    "id": ("1::INTEGER", 1),
    "big": ("9223372036854775807::BIGINT", 2**63 - 1),
    "unsigned": ("18446744073709551615::UBIGINT", 2**64 - 1),
    "null": ("NULL::VARCHAR", None),
    "single": ("1.1::FLOAT", 1.1),
    "single_nan": ("'nan'::FLOAT", "NaN"),
    "singles": ("[1.1, NULL]::FLOAT[]", [1.1, None]),
    "vector": ("[1.1, 3]::FLOAT[2]", [1.1, 3.0]),
    "nan": ("'nan'::DOUBLE", "NaN"),
    "inf": ("'-inf'::DOUBLE", "-Infinity"),
    "cents": ("1.50::DECIMAL(5,2)", "1.50"),
    "whole": ("5::DECIMAL(9,0)", 5),
    "exact": ("12345678901234567890123.45::DECIMAL(38,2)", "12345678901234567890123.45"),
    "day": ("DATE '2024-01-02'", "2024-01-02"),
    "never": ("DATE 'infinity'", "infinity"),
    "at": ("TIMESTAMP '2024-01-02 03:04:05.5'", "2024-01-02T03:04:05.5"),
    "ns": ("TIMESTAMP_NS '2024-01-01 00:00:00.123456789'", "2024-01-01T00:00:00.123456789"),
    "zoned": ("TIMESTAMPTZ '2024-01-02 03:04:05+02'", "2024-01-02T01:04:05+00"),
    "clock": ("TIME '01:02:03'", "01:02:03"),
    "blob": (r"'\xFF\x00'::BLOB", base64.b64encode(b"\xff\x00").decode()),
    "struct": (
        "{'a': DATE '2024-01-01', 'b': {'c': 'nan'::DOUBLE}}",
        {"a": "2024-01-01", "b": {"c": "NaN"}},
    ),
    "map": ("map{1: 'x'}", {"1": "x"}),
    "uuid": (
        "'fb41ac72-28ad-4880-86b4-f04fb9d44cc2'::UUID",
        "fb41ac72-28ad-4880-86b4-f04fb9d44cc2",
    ),
    'we"ird, name': ("1::TINYINT", 1),
}


def query_of(columns: dict) -> str:
    quoted = {name.replace('"', '""'): sql for name, (sql, _) in columns.items()}
    return "SELECT " + ", ".join(f'{sql} AS "{name}"' for name, sql in quoted.items())


def write(path, query: str):
    duckdb.sql(query).write_parquet(str(path))
    return path


def rows_at(tmp_path, source, **settings):
    source = open_rows(RowsConfig((source,), tmp_path, **settings))
    return [row for batch in source.batches() for row in batch]


def test_values_of_parquet_and_sql_become_json(tmp_path):
    path = write(tmp_path / "in.parquet", query_of(COLUMNS))
    for source, name in ((str(path), "in.parquet"), ({"sql": query_of(COLUMNS)}, "sql")):
        (row,) = rows_at(tmp_path, source)
        assert row.data == {name: value for name, (_, value) in COLUMNS.items()}
        json.dumps(row.data, allow_nan=False)
        assert (row.id, row.line, row.source) == (1, 1, name)


def test_folders_named_like_partitions_are_columns(tmp_path):
    folder = (
        tmp_path / "year=2024" / "city=New%20York" / "y=007" / "kind=__HIVE_DEFAULT_PARTITION__"
    )
    folder.mkdir(parents=True)
    write(folder / "in.parquet", "SELECT 1 AS id, 5 AS year")
    (row,) = rows_at(tmp_path, "**/*.parquet")
    assert row.data == {"year": 5, "city": "New York", "y": "007", "kind": None, "id": 1}
    assert rows_at(tmp_path, "**/*.parquet", where="city = 'Rome'") == []


def test_durations_and_nanoseconds_of_arrow_keep_their_meaning(tmp_path):
    columns = {
        "id": pa.array([1, 2, 3]),
        "s": pa.array([1, None, 0], pa.duration("s")),
        "ms": pa.array([1500, -90_061_000, 3_600_000], pa.duration("ms")),
        "ns": pa.array([1, 60 * 10**9, 0], pa.duration("ns")),
        "at": pa.array([1_700_000_000_123_456_789] * 3, pa.timestamp("ns", "Europe/Berlin")),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    rows = [row.data for row in rows_at(tmp_path, "in.parquet")]
    assert [row["s"] for row in rows] == ["PT1S", None, "PT0S"]
    assert [row["ms"] for row in rows] == ["PT1.5S", "-PT25H1M1S", "PT1H"]
    assert [row["ns"] for row in rows] == ["PT0.000000001S", "PT1M", "PT0S"]
    assert rows[0]["at"] == "2023-11-14T22:13:20.123456789+00"


@pytest.mark.parametrize("size", [4, 100])
def test_a_broken_schema_of_arrow_names_no_durations(size):
    schema = pa.schema([("s", pa.duration("us"))]).serialize().to_pybytes()
    assert duration_units(base64.b64encode(schema)) == {"s": "us"}
    assert duration_units(base64.b64encode(schema[:size])) == {}
    assert duration_units(b"!") == {}


def texts(*values: bytes) -> pa.Array:
    """Texts of any bytes, as a careless program writes them."""
    ends = [sum(map(len, values[:n])) for n in range(len(values) + 1)]
    offsets = struct.pack(f"<{len(ends)}i", *ends)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def test_a_cell_that_is_not_utf8_spoils_its_row_only(tmp_path):
    count = 3000
    values = [b"text %d" % n for n in range(count)]
    values[2500] = b"a\xffb"
    other = texts(*[b"\xff" if n == 2000 else b"x" for n in range(count)])
    nested = pa.StructArray.from_arrays([other], ["x"])
    table = pa.table({"id": list(range(count)), "text": texts(*values), "nested": nested})
    path = "hive_partitioning/in.parquet"  # the name of an option of DuckDB
    (tmp_path / path).parent.mkdir()
    pq.write_table(table, tmp_path / path, row_group_size=1000)
    rows = rows_at(tmp_path, path)
    assert [row.id for row in rows] == list(range(count))
    assert [row.line for row in rows] == list(range(1, count + 1))
    errors = {row.id: row.error for row in rows if row.error}
    assert errors == {2000: "not UTF-8: nested", 2500: "not UTF-8: text"}
    assert rows[2500].data == {"id": 2500, "nested": {"x": "x"}}
    assert len({row.key for row in rows}) == count


def test_what_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    for content in (b"", b'{"id":1}', b"PAR1" + b"x" * 100 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(
            InputError, match=f"^{path}: the Parquet file cannot be read: "
        ) as caught:
            rows_at(tmp_path, str(path))
        assert str(caught.value).count(str(path)) == 1
        assert "is it Parquet, and whole?" in str(caught.value)


def test_sql_finds_files_from_the_base_folder(tmp_path):
    (tmp_path / "in.csv").write_text("id,b\n7,x\n8,y\n")
    rows = rows_at(tmp_path, {"sql": "select * from read_csv('in.csv') order by id desc;"})
    assert [row.data for row in rows] == [{"id": 8, "b": "y"}, {"id": 7, "b": "x"}]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select * from nope", "nope does not exist"),
        ("create table t (a int)", "a query is a SELECT, this is CREATE"),
        ("with x as (copy (select 1) to 'out.csv') select 1", "only reads, this holds COPY"),
    ],
)
def test_wrong_sql_is_refused_before_any_row(tmp_path, query, words):
    with pytest.raises(InputError, match=words):
        open_rows(RowsConfig(({"sql": query},), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_sql_that_fails_on_the_way_is_an_input_error(tmp_path):
    query = "select (case when i = 2000 then 'x' else '1' end)::int as id from range(3000) r(i)"
    source = open_rows(RowsConfig(({"sql": query},), tmp_path))
    with pytest.raises(InputError, match="the sql of the input: Conversion Error"):
        list(source.batches())
