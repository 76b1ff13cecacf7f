from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import msgspec
import pyarrow.parquet as pq
import pytest

from bagent.errors import InputError
from bagent.store.run_dir import RunDir, RunInfo
from bagent.store.tables.build import TableOptions, make_tables
from bagent.store.tables.schema import TABLES
from bagent.types import Row


def reader(rows: list[Row]) -> Callable[[], Iterator[list[Row]]]:
    return lambda: iter([rows[:2], rows[2:]])


def row_of(outcome, data: dict, **changes) -> Row:
    values = {"index": outcome.row, "key": int(outcome.key, 16), "id": outcome.id, "data": data}
    return Row(**{**values, "source": "rows.jsonl", "line": outcome.row + 1, **changes})


def build(store, *, rows: list[Row] | None = None, info: RunInfo | None = None, **options):
    if info is None and not (store.path / "run.json").exists():
        info = RunInfo("r", duckdb=False)
    if info is not None:
        RunDir.create(store.path).save(info)
    read = None if rows is None else reader(rows)
    return make_tables(store.path, TableOptions(read_input=read, **options), store.reports.append)


def table(store, name: str) -> list[dict]:
    return pq.read_table(store.path / f"{name}.parquet").to_pylist()


def ask(path: Path, sql: str) -> list[tuple]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute(sql).fetchall()


def test_rows_stand_in_input_order_with_their_current_outcome(store, outcome, failure):
    store.write(
        outcome(2), failure(0), outcome(1, answer=1), outcome(1), failure(3), outcome(0), failure(2)
    )
    build(store)
    rows = [(row["row"], row["answer"], row["status"]) for row in table(store, "results")]
    assert rows == [(0, 0, "ok"), (1, 0, "ok"), (1, 1, "ok"), (2, 0, "ok"), (3, 0, "failed")]


def test_ids_are_text_whatever_they_were(store, outcome):
    ids = ["a", 1, "1", 2.5, True, None, {"a": [1]}, 2**70]
    store.write(*(outcome(n, id=item) for n, item in enumerate(ids)))
    build(store)
    displayed = [row["id"] for row in table(store, "results")]
    assert displayed == ["a", "1", "1", "2.5", "true", None, '{"a":[1]}', str(2**70)]


def test_input_is_joined_by_key_also_when_lines_have_moved(store, outcome):
    outcomes = [outcome(n) for n in range(6)]
    store.write(*outcomes)
    moved = [row_of(item, {"d": n}) for n, item in enumerate(outcomes)]
    moved = [msgspec.structs.replace(r, index=i) for i, r in enumerate([*moved[3:], *moved[:3]])]
    build(store, rows=moved)
    displayed = [json.loads(row["input"]) for row in table(store, "results")]
    assert displayed == [{"d": n} for n in range(6)]


def test_answers_have_typed_columns_and_only_ok_rows(store, outcome, failure):
    raw = {"score": 3, "tags": ["a", "b"], "ID": "mine", "note": None, "Score": "x", "a/b": 1.5}
    wrong = {"score": "many", "tags": "no list", "extra": 1}
    store.write(
        outcome(0, output=msgspec.Raw(json.dumps(raw).encode())),
        failure(1),
        outcome(2, output=msgspec.Raw(json.dumps(wrong).encode())),
    )
    columns = [("score", "BIGINT"), ("tags", "VARCHAR[]"), ("ID", "VARCHAR")]
    columns += [("note", "VARCHAR"), ("Score", "VARCHAR"), ("a/b", "DOUBLE")]
    build(store, info=RunInfo("r", answer_columns=columns))
    first, second = table(store, "answers")
    assert list(first) == [
        "id", "stage", "answer", "score", "tags", "ID_2", "note", "Score_2", "a/b",
    ]  # fmt: skip
    assert list(first.values())[3:] == [3, ["a", "b"], "mine", None, "x", 1.5]
    assert list(second.values())[3:] == [None] * 6


def test_torn_and_broken_lines_are_counted_and_stop_nothing(store, outcome):
    store.write(outcome(0), outcome(1))
    with store.segment().open("ab") as file:
        file.write(b'{"key":"00"}\nrubbish\n' + b'{"key":"0000')
    build(store)
    assert len(table(store, "results")) == 2
    assert any("2 broken lines" in message for message in store.reports)


def test_what_failed_is_listed_once_per_row_and_unreadable_lines_apart(store, outcome, failure):
    bad = outcome(3, status="bad_input", error_kind="bad_input")
    again = [failure(1), failure(1, answer=1), failure(1, stage="two")]
    store.write(outcome(0), outcome(0, stage="two"), *again, failure(2), outcome(2), bad)
    rows = [row_of(outcome(n), {"id": f"r{n}", "t": "é"}) for n in range(3)]
    rows.append(row_of(outcome(3), {}, error="not JSON", raw=b"{oh \xff no\r\n"))
    build(store, rows=rows)
    failed = (store.path / "failed.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in failed] == [{"id": "r1", "t": "é"}]
    assert (store.path / "bad_lines.txt").read_bytes() == b"{oh \xff no\n"
    store.write(outcome(1), outcome(1, answer=1), outcome(1, stage="two"))
    build(store, rows=rows[:3])
    assert not (store.path / "failed.jsonl").exists()


def test_an_input_that_is_gone_is_a_note(store, outcome):
    store.write(outcome(0))

    def gone() -> Iterator[list[Row]]:
        raise InputError("rows.jsonl: no such file")
        yield []

    make_tables(store.path, TableOptions(read_input=gone), store.reports.append)
    assert table(store, "results")[0]["input"] is None
    assert any("rows.jsonl: no such file" in message for message in store.reports)


def test_only_stale_tables_are_made_anew(store, outcome):
    store.write(outcome(0))
    assert build(store, info=RunInfo("r")) == list(TABLES)
    assert build(store, only_stale=True) == []
    store.write(outcome(1))
    before = (store.path / "endpoints.parquet").stat().st_mtime_ns
    assert build(store, only_stale=True) == ["results", "answers"]
    assert (store.path / "endpoints.parquet").stat().st_mtime_ns == before
    assert ask(store.path / "run.duckdb", "select count(*) from results") == [(2,)]
    (store.path / "attempts.parquet").unlink()
    assert build(store, only_stale=True) == ["attempts"]
    (store.path / "run.duckdb").unlink()
    assert build(store, only_stale=True) == list(TABLES)
    assert (store.path / "run.duckdb").exists()


@pytest.mark.parametrize(("parquet", "database"), list(itertools.product([True, False], repeat=2)))
def test_only_the_kinds_of_tables_that_are_wanted_are_kept(store, outcome, parquet, database):
    store.write(outcome(0))
    build(store, info=RunInfo("r", parquet=parquet, duckdb=database))
    assert (store.path / "results.parquet").exists() == parquet
    assert (store.path / "run.duckdb").exists() == database
    assert build(store, only_stale=True) == []
    assert not list(store.path.glob(".tables-*"))


def test_a_database_that_another_program_writes_is_waited_for(store, outcome, monkeypatch):
    store.write(outcome(0))
    build(store, info=RunInfo("r"))
    store.write(outcome(1))
    waits = []
    monkeypatch.setattr("bagent.store.tables.build.is_written_by_another", lambda _: not waits)
    build(store, wait=waits.append)
    assert waits == [0.5]
    assert store.reports == []
    assert ask(store.path / "run.duckdb", "select count(*) from results") == [(2,)]


_NO_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
static int call(const char *name, int fd, int command, void *arg) {
  if (command == F_SETLK || command == F_SETLKW || command == F_GETLK ||
      command == F_OFD_SETLK || command == F_OFD_SETLKW) { errno = ENOLCK; return -1; }
  return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, name))(fd, command, arg);
}
#define WRAP(name) int name(int fd, int command, ...) { va_list list; va_start(list, command); \
  void *arg = va_arg(list, void *); va_end(list); return call(#name, fd, command, arg); }
WRAP(fcntl)
WRAP(fcntl64)
int flock(int fd, int operation) { (void)fd; (void)operation; errno = ENOSYS; return -1; }
"""


def test_where_nothing_can_be_locked_there_are_still_parquet_files(store, outcome, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to take locks away with")
    source, library = tmp_path / "locks.c", tmp_path / "locks.so"
    source.write_text(_NO_LOCKS)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    store.write(*(outcome(n) for n in range(100)))
    command = [sys.executable, "-m", "bagent.store.tables.build", str(store.path)]
    env = {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot lock" in done.stderr
    assert len(table(store, "results")) == 100
    assert not (store.path / "run.duckdb").exists()


def test_an_answer_that_is_no_object_stands_in_the_column_value(store, outcome):
    raws = (b'"yes"', b"7", b"[1,2]")
    store.write(*(outcome(n, output=msgspec.Raw(raw)) for n, raw in enumerate(raws)))
    build(store, info=RunInfo("r", answer_columns=[(None, "VARCHAR")]))
    assert [row["value"] for row in table(store, "answers")] == ["yes", "7", "[1,2]"]
