"""Questions to DuckDB that can read what the job lists, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bagent.errors import UsageError
from bagent.tools import ToolResult
from bagent.tools.builtin.sql import Sql, table_name
from support.jumping_loop import in_event_loop
from support.tool_pools import ENV, abandoned_runs, answers, asked, once, opened

ENDLESS = "SELECT count(*) FROM range(10000000000) a, range(10000000000) b WHERE a.range > b.range"
LOOKUP = "SELECT id, name FROM ships WHERE id IN $id ORDER BY name"

NOT_SELECT = [
    "INSERT INTO ships VALUES (1, 'x')",
    "DROP TABLE ships",
    "COPY ships TO '{base}/out.csv'",
    "COPY (SELECT 1) TO '{base}/crew.csv'",
    "WITH x AS (COPY (SELECT 1) TO '{base}/crew.csv') SELECT 1",
    "SELECT (WITH x AS (COPY (SELECT 1) TO '{base}/crew.csv') SELECT count(*) FROM x)",
    "EXPORT DATABASE '{base}/out'",
    "INSTALL httpfs",
    "LOAD '{base}/x.so'",
    "SET memory_limit = '100GB'",
    "PRAGMA database_list",
    "SELECT 1; SELECT 2",
    "",
    "SELEC 1",
]
OUTSIDE = [
    "SELECT * FROM read_text('{base}/secret.csv')",
    "SELECT * FROM '{base}/secret.csv'",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')",
    "SELECT * FROM parquet_metadata('{base}/secret.csv')",
    "SELECT getenv('SECRET')",
    "SELECT * FROM query('COPY ships TO ''{base}/out.csv''')",
]


@pytest.fixture(scope="module")
def ships(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that tests copy."""
    path = tmp_path_factory.mktemp("ships") / "ships.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE ships AS SELECT range AS id, 's' || range AS name FROM range(5000)"
        )
    return path


@pytest.fixture
def base(tmp_path: Path, ships: Path) -> Path:
    (tmp_path / "secret.csv").write_text("word\nsecret\n")
    (tmp_path / "crew.csv").write_text("name,age\nann,30\nbob,40\n")
    shutil.copy(ships, tmp_path)
    return tmp_path


def ask(base: Path, query: str, **keys: Any) -> ToolResult:
    source = keys if "files" in keys else {"database": "ships.duckdb", **keys}
    return once(base, {"builtin": "sql", "max_tokens": 1_000_000, **source}, {"query": query})


def ask_all(base: Path, queries: list[str], files: list[str] | None) -> list[ToolResult]:
    """The results of many queries, one after the other."""
    source = {"files": files} if files else {"database": "ships.duckdb"}

    async def main() -> list[ToolResult]:
        async with opened(base, {"builtin": "sql", **source}) as pool:
            return [await pool.call(asked("sql", query=one.format(base=base))) for one in queries]

    return asyncio.run(main())


def test_every_type_becomes_json(base: Path) -> None:
    query = (
        "SELECT DATE '2024-02-29' AS d, 1.50::DECIMAL(9,2) AS n, NULL AS z, [1, 2] AS l,"
        " {'a': 'é'} AS s, MAP {1: 'x'} AS m, 'nan'::DOUBLE AS f, '\\xAA'::BLOB AS b,"
        " 170141183460469231731687303715884105727 AS h, INTERVAL 1 DAY AS i"
    )
    (row,) = json.loads(ask(base, query).text)
    assert row["d"] == "2024-02-29"
    assert (row["n"], row["z"], row["l"], row["s"]) == ("1.50", None, [1, 2], {"a": "é"})
    assert (row["m"], row["f"]) == ({"1": "x"}, "nan")
    assert row["h"] == "170141183460469231731687303715884105727"


@in_event_loop
async def test_the_model_reads_which_tables_there_are(base: Path) -> None:
    async with opened(base, {"builtin": "sql", "database": "ships.duckdb"}) as pool:
        assert "ships(id BIGINT, name VARCHAR)" in json.dumps(pool.definitions)


@pytest.mark.parametrize("files", [None, ["crew.csv"]])
def test_only_one_select_is_asked(base: Path, files: list[str] | None) -> None:
    before = sorted(path.name for path in base.iterdir())
    crew = (base / "crew.csv").read_text()
    for result in ask_all(base, NOT_SELECT, files):
        assert result.error == "failed", result.text
    assert sorted(path.name for path in base.iterdir()) == before
    assert (base / "crew.csv").read_text() == crew


@pytest.mark.parametrize("files", [None, ["crew.csv"]])
def test_nothing_else_is_read(base: Path, files: list[str] | None) -> None:
    for result in ask_all(base, OUTSIDE, files):
        assert result.error == "failed", result.text
        assert "word" not in result.text
        assert "s3cret" not in result.text


def test_files_are_tables_named_by_their_names(base: Path) -> None:
    for number in (1, 2):
        (base / f"logs-{number}.jsonl").write_text(f'{{"n": {number}}}\n')
    duckdb.execute(f"COPY (SELECT 7 AS seven) TO '{base}/seven.parquet'")
    query = "SELECT (SELECT sum(age) FROM crew) + (SELECT sum(n) FROM logs) + seven AS s FROM seven"
    result = ask(base, query, files=["crew.csv", "logs-*.jsonl", "seven.parquet"])
    assert json.loads(result.text) == [{"s": 80}]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("crew list.v2.csv.gz", "crew_list"),
        ("part-*.parquet", "part"),
        ("data/*.csv", "data"),
        ("/*.csv", "data"),
        ("2024.csv", "t2024"),
        ("Größe.csv", "größe"),
    ],
)
def test_a_table_is_named_by_its_file_or_its_folder(path: str, name: str) -> None:
    assert table_name(path) == name


def test_rows_and_bytes_are_bounded(base: Path) -> None:
    rows = ask(base, "SELECT * FROM ships ORDER BY id").text
    assert rows.endswith("[cut: the first 1,000 rows; there are more]")
    assert len(json.loads(rows.partition("\n[cut")[0])) == 1000
    (long,) = json.loads(ask(base, "SELECT repeat('x', 1000000) AS x").text)
    assert long["x"].endswith("x[cut: 934,464 more]") and len(long["x"]) < 70_000
    wide = ask(base, "SELECT repeat('x', 60000) AS a, repeat('x', 60000) AS b FROM ships").text
    assert wide.endswith("[cut: the first 2 rows; there are more]")


def test_memory_is_bounded(base: Path) -> None:
    result = ask(base, "SELECT list(repeat('x', 1000000) || range) FROM range(10000)")
    assert result.error == "failed"
    assert "memory" in result.text.lower()


@in_event_loop
async def test_a_query_is_interrupted_at_its_time_limit_and_ends(base: Path) -> None:
    entry = {"builtin": "sql", "database": "ships.duckdb", "timeout": 0.5}
    async with opened(base, entry) as pool:
        result = await pool.call(asked("sql", query=ENDLESS))
        async with asyncio.timeout(20):
            while abandoned_runs(pool, "sql"):
                await asyncio.sleep(0.01)
    assert result.error == "timeout"


# --- fixed statements -------------------------------------------------------------------------


def test_a_fixed_statement_has_an_argument_for_each_name(base: Path) -> None:
    query = "SELECT name FROM ships WHERE id >= $low AND id < $high ORDER BY id"
    entry = {"builtin": "sql", "name": "between", "database": "ships.duckdb", "query": query}
    result = once(base, entry, {"low": 1, "high": 3})
    assert json.loads(result.text) == [{"name": "s1"}, {"name": "s2"}]
    assert once(base, entry, {"low": 1}).error == "bad_arguments"
    assert once(base, entry, {"query": "SELECT 1"}).error == "bad_arguments"
    assert once(base, entry, {"low": "1 OR true --", "high": 3}).error == "failed"


@in_event_loop
async def test_calls_that_come_together_are_one_statement_and_each_gets_its_rows(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    ask = Sql._ask

    async def counted(self: Sql, query: str, values: Any, calls: int) -> Any:
        sizes.append(calls)
        return await ask(self, query, values, calls)

    monkeypatch.setattr(Sql, "_ask", counted)
    entry = {"builtin": "sql", "database": "ships.duckdb", "query": LOOKUP, "batch": "id"}
    async with opened(base, entry) as pool:
        calls: list[dict[str, Any]] = [{"id": [number, number + 1]} for number in range(50)]
        calls.append({"id": [999_999]})
        calls.append({"id": ["7"]})
        results = await answers(pool, "sql", calls)
    # Keys of another type than the column's are that call's own fault.
    assert sizes == [51, 1]
    for number, result in enumerate(results[:50]):
        assert {row["id"] for row in json.loads(result.text)} == {number, number + 1}
    assert results[50].text == "[]"
    assert results[51].error == "failed"


@pytest.mark.parametrize(
    ("column", "type_", "keys"),
    [
        ("id", "BIGINT", [["01"], ["2"]]),
        ("day", "DATE", [["2024-1-1"], ["2024-01-02"]]),
        ("id", "BIGINT", [[1.0]]),
    ],
)
@in_event_loop
async def test_a_key_written_otherwise_than_its_column_finds_its_row_together_as_alone(
    base: Path, column: str, type_: str, keys: list[list[Any]]
) -> None:
    (base / "t.csv").write_text("id,day,price,name\n1,2024-01-01,1.5,one\n2,2024-01-02,2.5,two\n")
    query = (
        f"SELECT {column}::{type_} AS {column}, name FROM t"
        f" WHERE list_contains(${column}::{type_}[], {column}::{type_})"
    )
    entry = {"builtin": "sql", "files": ["t.csv"], "query": query, "batch": column}
    async with opened(base, entry) as pool:
        results = await answers(pool, "sql", [{column: key} for key in keys])
    names = [row["name"] for one in results for row in json.loads(one.text)]
    assert names == ["one", "two"][: len(keys)]


@in_event_loop
async def test_calls_that_differ_in_more_than_their_keys_are_asked_apart(base: Path) -> None:
    query = "SELECT id, $word AS word FROM ships WHERE id IN $id"
    entry = {"builtin": "sql", "database": "ships.duckdb", "query": query, "batch": "id"}
    calls = [{"id": [1], "word": "a"}, {"id": [1], "word": "b"}, {"id": [2], "word": "a"}]
    async with opened(base, entry) as pool:
        results = await answers(pool, "sql", calls)
    rows = [(one["id"], one["word"]) for result in results for one in json.loads(result.text)]
    assert rows == [(1, "a"), (1, "b"), (2, "a")]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"database": "ships.duckdb", "files": ["crew.csv"]}, "either database or files"),
        ({"database": "crew.csv"}, "sql:"),
        ({"database": "ships.duckdb", "batch": "id"}, "batch needs a query"),
        ({"database": "nope.duckdb"}, "no such file"),
        ({"files": ["nope-*.csv"]}, "no such file"),
        ({"files": ["notes.txt"]}, "cannot read notes.txt"),
        ({"files": ["crew.csv", "crew.json"]}, "two tables would be named crew"),
        ({"database": "ships.duckdb", "query": "DROP TABLE ships"}, "only one SELECT"),
        ({"database": "ships.duckdb", "query": "SELECT 1", "batch": "id"}, "no $id"),
    ],
)
def test_what_cannot_work_is_found_before_the_run(
    base: Path, keys: dict[str, Any], words: str
) -> None:
    (base / "notes.txt").write_text("x")
    (base / "crew.json").write_text("[]")
    with pytest.raises(UsageError) as caught:
        once(base, {"builtin": "sql", **keys}, {}, env=ENV)
    assert words in str(caught.value)
