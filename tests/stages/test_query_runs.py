"""The sql stage as a user runs it, and the ready queries on tables as a stage sees them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.stages import sql_recipes
from bagent.stages.query import QueryResult, StageTable, run_query
from bagent.stages.sql import QueryCheck, validate_query
from support.cli import Running, run_bagent
from support.fake_server import FakeServer
from support.jobs import results
from support.replies import echo
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages, write_stages

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}


def query(text: str) -> dict[str, str]:
    return {"kind": "sql", "name": "ask", "query": text}


def test_a_query_that_fails_on_its_rows_stops_with_duckdbs_message_and_keeps_them(tmp_path):
    wrong = "SELECT CAST(text AS INTEGER) FROM first"
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, query(wrong)])
        assert done.code == 76
        assert "stage ask:" in done.err
        assert "Could not convert string" in done.err
        write_stages(tmp_path, server.url, 3, [FIRST, query("SELECT id, text FROM first")])
        again = run_bagent([*RUN, "--on-change", "continue"], tmp_path)
        assert again.code == 0, again.err
        assert len(server.requests) == 3
    assert [line["output"]["text"] for line in outcomes(tmp_path, "ask")] == [
        f"one id=r{n} text number {n}" for n in (1, 2, 3)
    ]


def test_a_changed_query_replaces_its_rows_and_each_counts_once(tmp_path):
    first = "SELECT id, row AS n, CASE WHEN row = 0 THEN 'no' END AS error FROM first"
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, query(first)])
        assert done.code == 1, done.err
        write_stages(tmp_path, server.url, 3, [FIRST, query("SELECT id, 1 - row AS n FROM first")])
        again = run_bagent([*RUN, "--on-change", "continue"], tmp_path)
    assert again.code == 0, again.err
    assert "stage ask: 3 ok" in again.err
    assert "3 rows: 3 ok, 0 failed" in again.err
    assert [row["output"]["n"] for row in results(tmp_path) if row["stage"] == "ask"] == [1, 0, -1]


def test_ids_are_text_in_every_table(tmp_path):
    rows = [{"id": name, "text": "x"} for name in (20240101, "2024-01-02")]
    text = "SELECT i.id, i.row FROM first f JOIN input i USING (id) ORDER BY i.row"
    run_scripted(tmp_path, rows, [FIRST, query(text)])
    found = [line["output"]["id"] for line in outcomes(tmp_path, "ask")]
    assert found == ["20240101", "2024-01-02"]


def test_a_query_joins_stages_and_the_input_and_its_rows_go_on(tmp_path):
    text = (
        "SELECT f.id, upper(i.text) AS loud FROM first f JOIN input i USING (id)"
        " WHERE f.status = 'ok' ORDER BY f.row DESC LIMIT 2"
    )
    tell = {"kind": "map", "name": "tell", "prompt": "{{ loud }} of {{ ask.id }}"}
    with FakeServer({"*": [echo()]}) as server:
        for _ in range(2):  # a later start sends nothing again
            assert run_stages(tmp_path, server.url, 3, [FIRST, query(text), tell]).code == 0
        assert len(server.requests) == 3 + 2
    assert [line["id"] for line in outcomes(tmp_path, "ask")] == ["r3", "r2"]
    told = {line["id"]: line["text"] for line in outcomes(tmp_path, "tell")}
    assert told == {"r3": "TEXT NUMBER 3 of r3", "r2": "TEXT NUMBER 2 of r2"}


def test_a_query_that_finds_nothing_says_so(tmp_path):
    with FakeServer({"*": [echo()]}) as server:
        nothing = query("SELECT id FROM first WHERE false")
        done = run_stages(tmp_path, server.url, 2, [FIRST, nothing])
    assert done.code == 0
    assert "stage ask: the query gave no rows" in done.err


@pytest.mark.process("signal")
def test_a_long_query_ends_with_the_run(tmp_path):
    slow = "SELECT sum(a.range * b.range) AS n FROM range(10000000) a, range(10000000) b, first"
    with FakeServer({"*": [echo()]}) as server:
        write_stages(tmp_path, server.url, 2, [FIRST, query(slow)])
        with Running(RUN, tmp_path) as running:
            server.wait_for(2, "finished")
            running.wait_for_err("results in")
            running.send(signal.SIGTERM)
            assert running.finish(timeout=30).code == 75


ROWS: list[tuple[str, int, int, str, Any]] = [
    ("a", 0, 0, "ok", {"score": 3, "tags": ["x", "y"], "name": "one"}),
    ("a", 0, 1, "ok", {"score": "9", "tags": ["y"], "name": "two"}),
    ("a", 0, 2, "failed", None),
    ("b", 1, 0, "ok", {"score": "none", "tags": [], "name": "two"}),
    ("b", 1, 1, "ok", {"score": 4.5, "tags": ["z"], "name": "two"}),
    ("b", 1, 2, "ok", {"score": "NaN", "name": "one"}),
]
AGAIN = [("a", 7, answer, "ok", {"score": 1, "name": "three"}) for answer in range(3)]
"""A second row of the id ``a``."""


@pytest.fixture
def ask(tmp_path: Path):
    path = tmp_path / "table.jsonl"
    names = ("id", "row", "answer", "status", "output", "error", "error_kind")

    def run(query: str, rows: list[tuple[str, int, int, str, Any]] = ROWS) -> list[QueryResult]:
        errors = {"ok": (None, None), "failed": ("timed out", "timeout")}
        lines = [dict(zip(names, (*one, *errors[one[3]]), strict=True)) for one in rows]
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        columns = [("score", "DOUBLE"), ("name", "VARCHAR")]
        found = run_query(query, [StageTable("s", columns, path)], tmp_path)
        assert not isinstance(found, str), found
        return found

    return run


def test_the_majority_with_its_fraction(ask):
    found = {one.values["id"]: one for one in ask(sql_recipes.majority("s", "name"))}
    assert found["b"].values["winner"] == "two"
    assert found["b"].values["fraction"] == pytest.approx(2 / 3)
    # Equal votes: the answer that was given first.
    assert (found["a"].values["winner"], found["a"].values["failed"]) == ("one", 1)
    assert found["b"].parents == ("s:b:0", "s:b:1", "s:b:2")


def test_the_best_of_each_row_and_the_top_of_all(ask):
    best = ask(sql_recipes.best_of("s", "score"))
    assert [(one.values["id"], one.values["score"]) for one in best] == [("a", 9.0), ("b", 4.5)]
    top = ask(sql_recipes.top_k("s", "score", 2))
    assert [(one.values["id"], one.values["answer"]) for one in top] == [("a", 1), ("b", 1)]
    assert top[0].parents == ("s:a:1",)


def test_lists_are_merged_with_counts(ask):
    found = ask(sql_recipes.merge_lists("s", "tags"))
    times = {one.values["item"]: one.values["times"] for one in found}
    assert times == {"x": 1, "y": 2, "z": 1}


def test_statistics_skip_and_count_what_is_no_number(ask):
    [found] = ask(sql_recipes.statistics("s", "score"))
    wanted = {"rows": 6, "failed": 1, "not_numbers": 2, "numbers": 3, "least": 3.0, "greatest": 9.0}
    assert {key: found.values[key] for key in wanted} == wanted
    assert found.values["mean"] == pytest.approx(5.5)
    assert found.parents == ("s:*",)


def test_a_failure_report_names_each_reason(ask):
    [found] = ask(sql_recipes.failure_report("s"))
    wanted = {"error_kind": "timeout", "rows": 1, "first_id": "a"}
    assert {name: found.values[name] for name in wanted} == wanted


def test_the_queries_of_the_guide_can_be_asked():
    text = (Path(__file__).parents[2] / "bagent" / "guides" / "stages.md").read_text()
    block = next(part for part in text.split("```sql\n")[1:] if "-- majority vote" in part)
    queries = [line for line in block.split("```")[0].splitlines() if not line.startswith("--")]
    assert len(queries) == 6
    first = StageTable("first", [("label", "VARCHAR"), ("score", "DOUBLE")])
    for query in queries:
        found = validate_query(query, [first], [])
        assert isinstance(found, QueryCheck) and found.columns, (query, found)


def test_rows_of_one_id_vote_apart(ask):
    majorities = ask(sql_recipes.majority("s", "name"), ROWS + AGAIN)
    votes = [(one.values["id"], one.values["row"], one.values["votes"]) for one in majorities]
    assert votes == [("a", 0, 1), ("b", 1, 2), ("a", 7, 3)]
    best = ask(sql_recipes.best_of("s", "score"), ROWS + AGAIN)
    scores = [(one.values["row"], one.values["score"]) for one in best]
    assert scores == [(0, 9.0), (1, 4.5), (7, 1.0)]
