"""Integers of any size keep their digits in the tables."""

import csv
import json
from decimal import Decimal

import duckdb
import msgspec
import pyarrow.parquet as pq
import pytest

from bagent import open_run
from bagent.store.query import open_tables
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.build import TableOptions, make_tables

BIG = 2**63
BEYOND = 10**45 + 7


def build(store, outcome, **columns):
    """Make the tables of answers with these columns: their type, and a value for each row."""
    names, kinds = list(columns), [kind for kind, *_ in columns.values()]
    rows = zip(*(values for _, values, *_ in columns.values()), strict=True)
    outputs = [json.dumps(dict(zip(names, row, strict=True))).encode() for row in rows]
    store.write(*(outcome(n, output=msgspec.Raw(raw)) for n, raw in enumerate(outputs)))
    run = RunDir(store.path)
    run.save(RunInfo("r", answer_columns=[*zip(names, kinds, strict=True), ("w", "BIGINT")]))
    make_tables(store.path, TableOptions(), store.reports.append)
    return run


DIGITS = "12345678901234567890123"
COLUMNS = {
    "fits": ("BIGINT", [1, -5, BIG - 1, None], "BIGINT", int),
    "wide": ("BIGINT", [1, BIG, -BIG - 1, None], "DECIMAL(38,0)", Decimal),
    "beyond": ("BIGINT", [1, BEYOND, None, None], "VARCHAR", str),
    "list": ("BIGINT[]", [[1, 2], [BIG, None], [], None], "DECIMAL(38,0)[]", Decimal),
    "digits": ("BIGINT", [1, DIGITS, 2, None], "DECIMAL(38,0)", Decimal),
}
"""Of each column: the type that the schema has, values, and the type that they get."""


def test_a_column_of_integers_is_as_wide_as_its_values(store, outcome):
    run = build(store, outcome, **COLUMNS)

    def typed(value, cast):
        if isinstance(value, list):
            return [typed(item, cast) for item in value]
        return None if value is None else cast(value)

    written = pq.read_table(store.path / "answers.parquet")
    with duckdb.connect(store.path / "run.duckdb", read_only=True) as connection:
        described = connection.execute("describe answers").fetchall()
        types = {name: kind for name, kind, *_ in described}
        for name, (_, values, kind, cast) in COLUMNS.items():
            expected = [typed(value, cast) for value in values]
            assert types[name] == kind
            found = connection.execute(f'select "{name}" from answers').fetchall()
            assert [value for (value,) in found] == expected
            assert written[name].to_pylist() == expected
    before = (store.path / "answers.parquet").stat().st_mtime_ns
    with open_tables(run, store.reports.append) as connection:
        assert connection.execute("select count(*) from answers").fetchall() == [(4,)]
    assert (store.path / "answers.parquet").stat().st_mtime_ns == before
    assert store.reports == []


@pytest.mark.parametrize(
    ("form", "text"), [("jsonl", f'{{"v":[{BIG},1]}}\n'), ("csv", f'v\n"[{BIG},1]"\n')]
)
def test_wide_integers_are_printed_as_numbers(bagent, store, outcome, form, text):
    build(store, outcome, v=("BIGINT[]", [[BIG, 1]]))
    assert open_run(store.path).rows("select v from answers") == [{"v": [BIG, 1]}]
    done = bagent(["query", str(store.path), "select v from answers", "--format", form])
    assert done.out.replace("\r\n", "\n") == text


FINDINGS = 'STRUCT("line" BIGINT, "note" VARCHAR, "tags" VARCHAR[])[]'


def test_objects_of_answers_are_structs_and_what_they_lack_is_null(bagent, store, outcome):
    first = [{"line": 3, "note": "it's", "tags": ["a"]}, {"line": 4, "extra": {"x": 1}}]
    values = [first, [], None, "no list"]
    run = build(store, outcome, v=(FINDINGS, values))
    listed = [{"line": 3, "note": "it's", "tags": ["a"]}, {"line": 4, "note": None, "tags": None}]
    written = pq.read_table(store.path / "answers.parquet")["v"].to_pylist()
    assert written == [listed, [], None, None]
    before = (store.path / "answers.parquet").stat().st_mtime_ns
    with open_tables(run, store.reports.append) as connection:
        unnested = "select id, unnest(v, recursive := true) from answers"
        rows = connection.execute(unnested).fetchall()
    assert [row[1:3] for row in rows] == [(3, "it's"), (4, None)]
    assert (store.path / "answers.parquet").stat().st_mtime_ns == before
    done = bagent(["results", str(store.path), "--format", "csv", "--columns", "v"])
    assert json.loads(next(csv.reader(done.out.splitlines()[1:]))[0]) == listed
    assert store.reports == []


@pytest.mark.parametrize(("number", "is_struct"), [(BIG - 1, True), (BIG, False)])
def test_integers_of_objects_that_do_not_fit_leave_the_column_json(
    store, outcome, number, is_struct
):
    run = build(store, outcome, v=(FINDINGS, [[{"line": number, "note": DIGITS}]]))
    with open_tables(run, store.reports.append) as connection:
        ((kind, text),) = connection.execute("select typeof(v), v::varchar from answers").fetchall()
    assert kind.startswith("STRUCT") is is_struct
    assert str(number) in str(text)
