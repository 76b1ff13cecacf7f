"""DuckDB is opened in one place, reaches what it was given, and runs one query that reads."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from bagent.duck import (
    Access,
    SqlError,
    column_type,
    connect,
    file_literal,
    file_source,
    nested_value,
    parse_type,
    single_query,
    type_sql,
)
from support.sources import texts

OPENS = re.compile(r"duckdb\s*\.\s*(connect|execute|sql|query|read_\w+)\b|import connect.*duckdb")
PATH_IN_SQL = re.compile(r"(read_(?!duckdb)\w+|parquet_\w+|glob)\(\[?('|\{literal)")


def test_only_one_module_opens_duckdb_and_puts_paths_into_reading_sql() -> None:
    result = {
        path: pattern.pattern
        for path, text in texts().items()
        for pattern in (OPENS, PATH_IN_SQL)
        if pattern.search(text)
    }
    assert list(result) == ["duck.py"]


def test_a_folder_called_as_a_column_replaces_none(tmp_path: Path) -> None:
    folder = tmp_path / "a=wrong"
    folder.mkdir()
    (folder / "t.csv").write_text("a\nright\n")
    (folder / "t.json").write_text('{"a": "right"}')
    duckdb.sql("SELECT 'right' AS a").write_parquet(str(folder / "t.parquet"))
    with connect(Access(folders=[folder])) as connection:
        for function in ("read_csv", "read_json", "read_parquet"):
            path = folder / f"t.{function.removeprefix('read_')}"
            rows = connection.execute(f"FROM {function}({file_source(path, path)})").fetchall()
            assert rows == [("right",)] * 2


@pytest.mark.parametrize("name", ["v[1]", "v*", "it's", "[!a]", 'q"x;--'])
def test_a_path_is_never_a_pattern(tmp_path: Path, name: str) -> None:
    for folder, value in ((name, "right"), ("v1", "wrong"), ("b", "wrong")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.csv").write_text(f"a\n{value}\n")
    path = tmp_path / name / "t.csv"
    for access in (Access(files=[path]), Access(folders=[path.parent]), Access(everything=True)):
        with connect(access) as connection:
            rows = connection.execute(f"FROM read_csv({file_literal(path)})").fetchall()
        assert rows == [("right",)]


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_text('{other}')",
        "FROM read_text('{folder}/../other.txt')",
        "FROM read_text('{folder}/link.txt')",
        "FROM glob('{folder}/../*')",
        "COPY (SELECT 1) TO '{other}'",
        "WITH x AS (COPY (SELECT 1) TO '{other}') FROM x",
        "EXPORT DATABASE '{other}.folder'",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['{other}']",
        "SELECT getenv('HOME')",
        "FROM read_csv('http://127.0.0.1:9/x.csv')",
    ],
)
def test_a_connection_reaches_nothing_that_it_was_not_given(tmp_path: Path, sql: str) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    other = tmp_path / "other.txt"
    other.write_text("secret")
    (folder / "link.txt").symlink_to(other)
    with connect(Access(folders=[folder])) as connection, pytest.raises(duckdb.Error):
        connection.execute(sql.format(folder=folder, other=other))
    assert other.read_text() == "secret"


def test_plain_types_are_types_and_others_become_json() -> None:
    plain = ("VARCHAR", "BIGINT", "BIGINT[]", "DOUBLE[3]", "FLOAT[]", "DECIMAL(38,0)", "JSON")
    assert [column_type(kind) for kind in plain] == list(plain)
    others = (
        "",
        "INT) --",
        "STRUCT(a INT)",
        "VARCHAR; COPY",
        "DECIMAL(1,1)) x",
        "x'y",
        "VARCHAR\n",
    )
    assert {column_type(kind) for kind in others} == {"JSON"}


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ('STRUCT("line" BIGINT, "a""b" VARCHAR[])[]', 'STRUCT("line" BIGINT, "a""b" VARCHAR[])[]'),
        ('struct("a" DOUBLE, "b" STRUCT("c" JSON))', 'STRUCT("a" DOUBLE, "b" STRUCT("c" VARCHAR))'),
        ('STRUCT("a" HUGEINT, "b" DECIMAL(38,0))', 'STRUCT("a" DECIMAL(38,0), "b" DECIMAL(38,0))'),
    ],
)
def test_nested_types_are_written_from_what_was_understood(text: str, sql: str) -> None:
    kind = parse_type(text)
    assert kind is not None
    assert type_sql(kind) == sql
    with connect(Access()) as connection:
        value = nested_value("'{\"a\": 1}'", text)
        described = connection.execute(f"SELECT typeof({value}), typeof(NULL::{sql})").fetchall()
    assert described[0][0] == described[0][1]


@pytest.mark.parametrize(
    "text",
    [
        "STRUCT()",
        "STRUCT(a)",
        "STRUCT(a DATE) --",
        "STRUCT(a DATE); COPY x",
        "STRUCT(a DATE, A DATE)",
        "STRUCT(a DATE",
        'STRUCT("a DATE)',
        "STRUCT(a ENUM('x'))",
        "MAP(a)",
        "STRUCT(a " * 9 + "DATE" + ")" * 9,
        "STRUCT(a DATE, " + ", ".join(f"b{n} DATE" for n in range(3000)) + ")",
    ],
)
def test_what_is_no_nested_type_is_not_understood(text: str) -> None:
    assert parse_type(text, bare_names=True) is None


def test_names_without_quotes_are_read_only_where_duckdb_wrote_them() -> None:
    assert parse_type("STRUCT(a DATE)") is None
    assert parse_type("STRUCT(a DATE)", bare_names=True) == {"a": "DATE"}


@pytest.mark.parametrize(
    ("sql", "query"),
    [
        ("select 1;", "select 1"),
        (";; /* é; */ select 1", "/* é  */ select 1"),
        ("select ';' -- ; é\n;; /* ; */", "select ';'"),
        ("from (values (1)) t(a)", "from (values (1)) t(a)"),
        ("pivot (select 1 a, 2 b) on a using sum(b)", None),
        ("with c as (select 'copy' as copy) from c", None),
    ],
)
def test_one_query_that_reads_is_taken(sql: str, query: str | None) -> None:
    with connect(Access()) as connection:
        assert single_query(connection, sql) == query or sql


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "-- nothing",
        "select 1; select 2",
        "copy (select 1) to 'x'",
        "install httpfs",
        "call pragma_version()",
        "with x as (copy (select 1) to 'x') select 1",
        "select (with x as (copy (select 1) to 'x') select count(*) from x)",
        "with x as (copy (select 1) to 'x') pivot (select 1 a) on a",
    ],
)
def test_what_is_not_one_query_that_reads_is_refused(sql: str) -> None:
    with connect(Access()) as connection, pytest.raises(SqlError):
        single_query(connection, sql)
