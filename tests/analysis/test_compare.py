"""Runs held against runs and known answers: what is joined, what is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.analysis.accuracy import GoldFile, score_run
from bagent.analysis.compare import Question, Sameness, compare_runs
from bagent.cli.commands.compare import SETTINGS
from bagent.duck import Access
from bagent.errors import UsageError
from bagent.store.query import open_tables
from bagent.store.run_dir import RunDir
from bagent.store.tables.build import TableOptions, make_tables
from support.stored_runs import make_run, stored


def answer(row: int, value: Any, **changes: Any) -> Any:
    raw = json.dumps(value)
    parts = {"output": msgspec.Raw(raw.encode()), "text": raw, "prompt_sha256": f"{row:064x}"}
    return stored(row, **{**parts, **changes})


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def make(name: str, outcomes: list[Any], properties: str = "") -> Path:
        columns = [(one, "BIGINT") for one in properties.split()]
        make_run(tmp_path / name, outcomes, answer_columns=columns, duckdb=False)
        make_tables(tmp_path / name, TableOptions(), print)
        return tmp_path / name

    return make


def compared(first: Path, second: Path, *on: str) -> Sameness:
    with open_tables([RunDir(first), RunDir(second)], print, settings=SETTINGS) as connection:
        return compare_runs(connection, first, second, Question(on), 10)


def accuracy(run: Path, gold: list[dict[str, Any]], stage: str | None = None) -> float:
    path = run / "gold.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in gold))
    with open_tables(RunDir(run), print, access=Access(files=[path])) as connection:
        return float(score_run(connection, run, GoldFile(path), stage, 10).numbers["accuracy"])


def test_rows_that_no_model_was_asked_about_are_compared_by_their_output(run):
    """The vote of a second run says something else, and neither has a text."""
    runs = []
    for winner in ("yes", "no"):
        vote = answer(0, {"winner": winner}, stage="vote", text=None, prompt_sha256=None)
        first = answer(0, {"said": "yes"}, stage="first", endpoint="e")
        runs.append(run(winner, [first, vote]))
    found = compared(*runs)
    assert found.why_not == ["1 answers differ (1 as JSON)"]
    assert [(row["stage"], row["a"]) for row in found.rows] == [("vote", '{"winner":"yes"}')]
    assert found.numbers["without_prompt"] == 1
    assert compared(runs[0], runs[0]).claim == "the same output, byte for byte"


def test_examples_come_status_first_and_then_in_input_order(run):
    rows = range(400)
    first = run("first", [answer(n, {"a": n}) for n in rows])
    failed = {"status": "failed", "error_kind": "timeout", "error": "too late", "text": None}
    second = run(
        "second",
        [answer(n, {"a": n + 1}, **(failed if n % 20 == 7 else {})) for n in reversed(rows)],
    )
    with open_tables([RunDir(first), RunDir(second)], print, settings=SETTINGS) as connection:
        found = compare_runs(connection, first, second, Question(), 300).rows
    wanted = sorted(rows, key=lambda n: (n % 20 != 7, n))[:300]
    assert [row["id"] for row in found] == [f"r{n}" for n in wanted]


def test_a_property_named_like_a_column_is_meant_as_the_property(run):
    first, second = (run(f"r{n}", [answer(0, {"answer": n})]) for n in range(2))
    assert compared(first, second, "answer").numbers["same_on"] == 0
    assert compared(first, second, "stage").numbers["same_on"] == 1
    assert accuracy(first, [{"id": "r0", "answer": 0}]) == 1.0
    assert accuracy(second, [{"id": "r0", "answer": 0}]) == 0.0


def test_known_answers_of_several_answers_are_joined_by_their_number(run):
    made = run("r", [answer(0, {"a": n}, answer=n) for n in range(2)], "a")
    gold = [{"id": "r0", "answer": 0, "a": 0}, {"id": "r0", "answer": 1, "a": 5}]
    assert accuracy(made, gold) == 0.5


def test_known_answers_are_held_against_one_stage(run):
    outcomes = [answer(0, {"a": 1}, stage="first"), answer(0, {"a": 2}, stage="second")]
    made = run("r", outcomes, "a")
    with pytest.raises(UsageError, match="stages first, second"):
        accuracy(made, [{"id": "r0", "a": 2}])
    assert accuracy(made, [{"id": "r0", "a": 2}], "second") == 1.0
    with pytest.raises(UsageError, match="--stage third"):
        accuracy(made, [{"id": "r0", "a": 2}], "third")


def test_a_field_that_no_answer_has_is_refused_with_the_nearest_name(run):
    made = run("r", [answer(0, {"verdict": "yes", "in": {"deep": 1}})], "verdict")
    with pytest.raises(UsageError, match="--on verdit: no answer has this field") as refused:
        compared(made, made, "verdit")
    assert refused.value.hint == "did you mean verdict?"
    assert compared(made, made, "in.deep", "text").numbers["same_on"] == 1
    gold = made / "gold.jsonl"
    gold.write_text('{"id": "r0", "label": "yes", "output": {"verdict": "yes"}}\n')

    def score(field: str, *column: str) -> Any:
        with open_tables(RunDir(made), print, access=Access(files=[gold])) as connection:
            known = GoldFile(gold, "id", (field,), column)
            return score_run(connection, made, known, None, 1).numbers["accuracy"]

    assert score("verdict") == score("verdict", "label") == 1.0
    with pytest.raises(UsageError, match="--on verdit"):
        score("verdit", "label")
    with pytest.raises(UsageError, match="has no field lable"):
        score("verdict", "lable")


def test_rows_that_failed_in_both_runs_are_not_called_equal_outputs(run):
    failed = {"status": "failed", "error_kind": "timeout", "text": None, "output": None}
    made = run("r", [answer(0, {"a": 1}), answer(1, None, **failed)], "a")
    found = compared(made, made)
    numbers = found.numbers
    assert (numbers["same_json"], numbers["other_json"], numbers["without_output"]) == (1, 0, 1)
    claim = "the same output, byte for byte; 1 rows have no output in either run"
    assert (found.claim, found.why_not) == (claim, [])


def test_rows_without_an_answer_in_either_run_are_not_counted_as_the_same(run):
    sent, unsent = {"text": None, "output": None}, {"prompt_sha256": None, "endpoint": None}
    bad = {**sent, **unsent, "status": "bad_input", "error_kind": "bad_input"}
    text = {"text": '{"label": "a"}', "output": None}
    made = run("r", [answer(0, {"a": 1}), answer(1, 0, **text), answer(2, 0, **sent),
                     answer(3, 0, **bad)])  # fmt: skip
    found = compared(made, made, "text")
    n = found.numbers
    assert (n["joined"], n["both_ok"], n["without_output"]) == (4, 3, 2)
    assert (n["same_text"], n["same_normal"], n["without_json"], n["same_on"]) == (2, 2, 1, 2)
    assert [field.same for field in found.fields] == [2]
    assert (n["unknown_prompt"], n["same_output"], found.why_not) == (0, True, [])
    assert found.claim == "the same output, byte for byte; 2 rows have no output in either run"
