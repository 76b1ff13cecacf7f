"""SQL from names, texts, paths and types that others wrote."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagent.duck import (
    Access,
    SqlError,
    column_type,
    connect,
    file_literal,
    literal,
    parse_type,
    quoted,
    single_query,
    type_sql,
)
from support.strategies import texts_of

HOSTILE = texts_of(
    *"'\"\\;%$*?[]{}()\n", "--", "/*", "*/", "''", "$$", "select", "; drop table t", "é"
)
TYPES = texts_of(
    "STRUCT(", ")", "[]", "[3]", ", ", '"a" ', '"a""b" ', "b ", "BIGINT", "VARCHAR", "JSON",
    "DECIMAL(38,0)", "DECIMAL(9, 2)", "HUGEINT", " ", "--", ";", "'", "MAP(", "ENUM('x')",
    odd=st.text(max_size=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def connection(folder):
    with connect(Access(folders=[folder])) as opened:
        yield opened


@given(text=HOSTILE)
def test_any_text_is_itself_in_sql(connection, text):
    assert connection.execute(f"SELECT {literal(text)}").fetchall() == [(text,)]


@given(name=HOSTILE.filter(bool))
def test_any_name_is_itself_in_sql(connection, name):
    connection.execute(f"SELECT 1 AS {quoted(name)}")
    assert connection.description[0][0] == name
    assert connection.execute(f"SELECT {quoted(name)} FROM (SELECT 7) t({quoted(name)})").fetchall()


@given(name=HOSTILE.filter(lambda name: len(name.encode()) < 200))
def test_any_path_names_one_file(connection, folder, name):
    # DuckDB takes a backslash for a separator of folders.
    path = Path(folder) / (name.translate({ord("/"): "|", ord("\\"): "|", 0: ""}) + ".csv")
    path.write_text("a\nright\n")
    rows = connection.execute(f"FROM read_csv({file_literal(path)}, header=true)").fetchall()
    path.unlink()
    assert rows == [("right",)]


@given(text=TYPES)
def test_any_type_is_understood_whole_or_not_at_all(connection, text):
    assert column_type(text) in (text, "JSON")
    kind = parse_type(text, bare_names=True)
    if kind is not None:
        sql = type_sql(kind)
        assert parse_type(sql) == kind
        connection.execute(f"SELECT NULL::{sql}, NULL::{column_type(text)}")


@given(
    query=texts_of(
        "select ", "1", "'x'", ";", " ", "\n", "-- ;\n", "/* ; */", "from t", "with a as (",
        "copy (select 1) to 'x'", "insert into t select 1", ")", ",", "(", "é", "union all ",
        "pivot ", "values (1)", "$1", "?",
    )
)  # fmt: skip
def test_any_sql_is_one_query_that_reads_or_is_refused(connection, query):
    try:
        sql = single_query(connection, query)
    except (SqlError, duckdb.Error):
        return
    assert not sql.endswith(";")
    assert single_query(connection, sql) == sql
    try:
        connection.execute(f"SELECT * FROM ({sql}\n) LIMIT 0")
    except duckdb.Error as error:
        assert "syntax error" not in str(error) or "$1" in sql or "?" in sql
