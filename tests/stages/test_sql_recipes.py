"""The ready queries, on tables as a stage sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.stages import sql_recipes
from bagent.stages.query import QueryResult, StageTable, run_query
from bagent.stages.sql import QueryCheck, validate_query

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
