from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagent.analysis.compare import mcnemar
from support.jobs import write_job, write_rows
from support.stored_runs import make_run, stored

QUICK = "?speedup=50&output_tokens=6&output_spread=fixed"


def answer(row: int, value: Any, **changes: Any) -> Any:
    raw = json.dumps(value)
    parts = {"output": msgspec.Raw(raw.encode()), "text": raw, "prompt_sha256": f"{row:064x}"}
    return stored(row, **{**parts, **changes})


def make(job_dir: Path, name: str, outcomes: list[Any], *properties: str) -> None:
    """Make the run of this name, with columns for properties of its answers."""
    columns = [(one, "VARCHAR") for one in properties]
    make_run(job_dir / "runs" / name, outcomes, answer_columns=columns)


def compared(bagent, *args: str) -> Any:
    done = bagent(["compare", *args, "--format", "json"])
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_runs_of_one_seed_are_the_same_output_and_those_of_another_are_not(bagent, job_dir):
    job = {"model": "auto", "sampling": {"temperature": 0, "max_tokens": 64, "seed": 7}}
    write_job(job_dir, "sim://" + QUICK, 6, **job)
    for name in ("one", "two"):
        assert bagent(["run", "job.yaml", "--name", name, "--progress", "none"]).code == 0
    other = ["--set", "sampling.seed=8", "--name", "three", "--progress", "none"]
    assert bagent(["run", "job.yaml", *other]).code == 0
    same = compared(bagent, "one", "two")
    assert (same["claim"], same["why_not"]) == ("the same output, byte for byte", [])
    assert same["numbers"]["same_output"] is True
    assert same["numbers"]["same_text"] == same["numbers"]["same_prompt"] == 6
    differ = compared(bagent, "one", "three")
    assert differ["numbers"]["same_text"] == 0
    assert differ["claim"] == "not the same output"
    assert bagent(["compare", "one", "three", "--fail-if", "same_text < joined"]).code == 1
    assert bagent(["compare", "one", "two", "--fail-if", "same_text < joined"]).code == 0


@pytest.fixture
def pair(job_dir: Path) -> Path:
    runs = job_dir / "runs"
    first = [
        answer(0, {"a": 1, "b": [1, 2]}),
        answer(1, {"a": 1}, text="one  two"),
        answer(2, {"a": 5, "b": "x"}, latency_ms=100.0, cost_usd=0.5),
        answer(3, {"a": True}),
        answer(4, {"a": 0}),
    ]
    second = [
        answer(0, {"b": [1.0, 2], "a": 1}),
        answer(1, {"a": 1}, text="one two "),
        answer(2, {"a": 5, "b": "y"}, latency_ms=300.0, cost_usd=0.1),
        answer(3, {"a": 1}),
        stored(4, status="failed", error_kind="timeout", error="too late", text=None),
        answer(5, {"a": 0}),
    ]
    make_run(runs / "a", first)
    make_run(runs / "b", second)
    return runs


def test_every_sort_of_equality_is_counted_on_its_own(bagent, pair):
    sql = "a.output->>'a' = b.output->>'a'"
    found = compared(bagent, "a", "b", "--on", "a", "--sql", sql)
    n = found["numbers"]
    assert (n["rows_a"], n["rows_b"], n["joined"], n["only_b"]) == (5, 6, 5, 1)
    assert (n["same_text"], n["same_normal"]) == (0, 1)
    assert n["same_json"] == 2  # the order of keys and 1.0 mean nothing, true is not 1
    assert (n["both_ok"], n["same_on"], n["same_sql"]) == (4, 3, 3)
    assert (n["status_changes"], n["same_prompt"], n["unknown_prompt"]) == (1, 4, 1)
    assert found["changes"] == [{"status_a": "ok", "status_b": "failed", "rows": 1}]
    assert (n["latency_p50_a"], n["latency_p50_b"]) == (100.0, 300.0)
    assert (n["cost_usd_a"], n["cost_usd_b"]) == (0.5, 0.1)
    assert found["rows"][0]["id"] == "r4"
    assert {row["id"] for row in found["rows"]} == {f"r{n}" for n in range(6)}


def test_each_field_has_its_line_and_a_table_of_its_few_values(bagent, job_dir):
    reason = "a long text of its own that no table of values can hold"
    for name, moods in (("x", "ppnn"), ("y", "pnn?")):
        outcomes = [
            answer(n, {"mood": mood, "topic": "t", "reason": f"{reason} {n}"})
            for n, mood in enumerate(moods)
        ]
        make_run(job_dir / "runs" / name, outcomes)
    on = ["--on", "mood", "--on", "topic", "--on", "reason"]
    found = compared(bagent, "x", "y", *on)
    numbers = found["numbers"]
    assert (numbers["same_on"], numbers["same_on_mood"], numbers["same_on_topic"]) == (2, 2, 4)
    mood, topic, reasons = found["fields"]
    pairs = [tuple(value.values()) for value in mood["values"]]
    assert pairs == [("n", "?", 1), ("n", "n", 1), ("p", "n", 1), ("p", "p", 1)]
    assert topic["values"] == [{"a": "t", "b": "t", "rows": 4}]
    assert reasons["values"] == []
    lines = [line.split() for line in bagent(["compare", "x", "y", *on]).out.splitlines()]
    assert ["both", "ok", "and", "equal", "in", "mood", "2", "50.00", "%"] in lines
    at = lines.index(["mood:", "A", "down,", "B", "across"])
    assert lines[at + 1] == ["?", "n", "p"]
    assert lines[at + 3 : at + 5] == [["n", "1", "1", "0"], ["p", "0", "1", "1"]]


def test_rows_of_one_id_and_several_answers_are_each_joined_with_their_own(bagent, job_dir):
    for name in ("x", "y"):
        twice = [answer(n, {"n": n}, id="same") for n in range(2)]
        make(job_dir, name, [*twice, *(answer(5, {"n": n}, answer=n) for n in range(3))])
    n = compared(bagent, "x", "y")["numbers"]
    assert (n["joined"], n["same_text"]) == (5, 5)


def test_examples_come_status_first_and_then_in_input_order(bagent, job_dir):
    rows = range(60)
    failed = {"status": "failed", "error_kind": "timeout", "error": "too late", "text": None}
    make(job_dir, "x", [answer(n, {"a": n}) for n in rows])
    second = [answer(n, {"a": n + 1}, **(failed if n % 20 == 7 else {})) for n in reversed(rows)]
    make(job_dir, "y", second)
    found = compared(bagent, "x", "y", "--rows", "40")["rows"]
    wanted = sorted(rows, key=lambda n: (n % 20 != 7, n))[:40]
    assert [row["id"] for row in found] == [f"r{n}" for n in wanted]


def test_rows_that_no_model_was_asked_about_are_compared_by_their_output(bagent, job_dir):
    """The vote of a second run says something else, and neither has a text."""
    for winner in ("yes", "no"):
        vote = answer(0, {"winner": winner}, stage="vote", text=None, prompt_sha256=None)
        make(job_dir, winner, [answer(0, {"said": "yes"}, stage="first", endpoint="e"), vote])
    found = compared(bagent, "yes", "no")
    assert found["why_not"] == ["1 answers differ (1 as JSON)"]
    assert [(row["stage"], row["a"]) for row in found["rows"]] == [("vote", '{"winner":"yes"}')]
    assert found["numbers"]["without_prompt"] == 1
    assert compared(bagent, "yes", "yes")["claim"] == "the same output, byte for byte"


def test_rows_without_an_answer_in_either_run_are_not_counted_as_the_same(bagent, job_dir):
    sent, unsent = {"text": None, "output": None}, {"prompt_sha256": None, "endpoint": None}
    bad = {**sent, **unsent, "status": "bad_input", "error_kind": "bad_input"}
    text = {"text": '{"label": "a"}', "output": None}
    outcomes = [
        answer(0, {"a": 1}),
        answer(1, 0, **text),
        answer(2, 0, **sent),
        answer(3, 0, **bad),
    ]
    make(job_dir, "x", outcomes)
    found = compared(bagent, "x", "x", "--on", "text")
    n = found["numbers"]
    assert (n["joined"], n["both_ok"], n["without_output"]) == (4, 3, 2)
    assert (n["same_text"], n["same_normal"], n["without_json"], n["same_on"]) == (2, 2, 1, 2)
    assert (n["same_json"], n["other_json"]) == (1, 0)
    assert [field["same"] for field in found["fields"]] == [2]
    assert (n["unknown_prompt"], n["same_output"], found["why_not"]) == (0, True, [])
    claim = "the same output, byte for byte; 2 rows have no output in either run"
    assert found["claim"] == claim


def test_copied_rows_are_counted_and_failed_ones_show_their_error(bagent, job_dir):
    failed = {"status": "invalid", "error_kind": "schema", "error": "no label", "text": '{"a": "'}
    make_run(job_dir / "runs" / "x", [answer(0, 1, copied_from="r9"), answer(1, 1)])
    make_run(job_dir / "runs" / "y", [answer(0, 1), stored(1, **failed)])
    found = compared(bagent, "x", "y")
    assert (found["numbers"]["copied_a"], found["numbers"]["copied_b"]) == (1, 0)
    assert [row["b"] for row in found["rows"]] == ["no label"]
    shown = bagent(["compare", "x", "y"]).out
    assert "copied: from equal requests; latency and tokens are of the rows that were sent" in shown


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_gold_file_gives_accuracy_with_failures_as_wrong(bagent, job_dir, suffix):
    """Rows without an expected value are left out."""
    outcomes = [answer(n, {"label": "pos", "score": n}) for n in range(4)]
    failed = stored(4, status="failed", error_kind="timeout", text=None)
    columns = [("label", "VARCHAR"), ("score", "DOUBLE")]
    make_run(job_dir / "runs" / "r", [*outcomes, failed], answer_columns=columns)
    labels, scores = ["pos", "neg", None, None, "neg", "neg"], [0, 1, 2, None, 4, 5]
    gold = [
        {"id": f"r{n}", "label": label, "score": score}
        for n, (label, score) in enumerate(zip(labels, scores, strict=True))
    ]
    path = job_dir / f"gold.{suffix}"
    if suffix == "csv":
        lines = [",".join("" if v is None else str(v) for v in row.values()) for row in gold]
        path.write_text("\n".join(["id,label,score", *lines]) + "\n")
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(gold), path)
    else:
        write_rows(path, [{k: v for k, v in row.items() if v is not None} for row in gold])
    found = compared(bagent, "r", path.name)
    n = found["numbers"]
    assert (n["rows"], n["answered"], n["not_ok"], n["missing"], n["unlabelled"]) == (5, 3, 1, 1, 1)
    assert (n["accuracy"], n["accuracy_label"], n["accuracy_score"]) == (0.4, 0.25, 0.6)
    label = next(field for field in found["fields"] if field["field"] == "label")
    assert (label["right"], label["wrong"], label["unanswered"]) == (1, 1, 2)
    assert {"known": "neg", "given": "pos", "rows": 1} in label["confusion"]
    assert {"known": "neg", "given": None, "rows": 2} in label["confusion"]
    assert {row["id"] for row in found["worst"]} == {"r1", "r4", "r5"}
    shown = bagent(["compare", "r", path.name, "--on", "label", "--fail-if", "accuracy < 0.5"])
    assert shown.code == 1
    assert "(no answer)" in shown.out
    assert "left out: 2 rows of the file without an expected value" in shown.out


def test_known_answers_of_each_answer_and_null_are_expected_values(bagent, job_dir):
    make(job_dir, "r", [answer(0, {"a": n or None}, answer=n) for n in range(3)], "a")
    gold = [{"id": "r0", "answer": n, "a": value} for n, value in enumerate([None, 1, None])]
    write_rows(job_dir / "gold.jsonl", gold)
    numbers = compared(bagent, "r", "gold.jsonl")["numbers"]
    assert (numbers["rows"], numbers["unlabelled"]) == (3, 0)
    assert numbers["accuracy"] == pytest.approx(2 / 3, abs=1e-6)


def test_a_property_named_like_a_column_is_meant_as_the_property(bagent, job_dir):
    for name, value in (("x", 0), ("y", 1)):
        make(job_dir, name, [answer(0, {"answer": value})])
    assert compared(bagent, "x", "y", "--on", "answer")["numbers"]["same_on"] == 0
    assert compared(bagent, "x", "y", "--on", "stage")["numbers"]["same_on"] == 1
    write_rows(job_dir / "gold.jsonl", [{"id": "r0", "answer": 0}])
    for name, accuracy in (("x", 1.0), ("y", 0.0)):
        assert compared(bagent, name, "gold.jsonl")["numbers"]["accuracy"] == accuracy


def test_known_answers_are_held_against_the_last_stage_unless_another_is_named(bagent, job_dir):
    stages = [answer(0, {"a": value}, stage=stage) for stage, value in (("one", "x"), ("two", "y"))]
    info = {"stages": ["one", "two"], "answer_columns": [("a", "VARCHAR")]}
    make_run(job_dir / "runs" / "r", stages, **info)
    write_rows(job_dir / "gold.jsonl", [{"id": "r0", "a": "y"}])
    assert compared(bagent, "r", "gold.jsonl")["numbers"]["accuracy"] == 1.0
    first = compared(bagent, "r", "gold.jsonl", "--stage", "one")
    assert first["numbers"]["accuracy"] == 0.0
    assert "--stage third" in bagent(["compare", "r", "gold.jsonl", "--stage", "third"]).err
    make(job_dir, "old", stages, "a")  # its run.json tells no stages
    assert "stages one, two" in bagent(["compare", "old", "gold.jsonl"]).err


def test_a_field_that_no_answer_has_is_refused_with_the_nearest_name(bagent, job_dir):
    make(job_dir, "r", [answer(0, {"verdict": "yes", "in": {"deep": 1}})], "verdict")
    found = compared(bagent, "r", "r", "--on", "in.deep", "--on", "text")
    assert found["numbers"]["same_on"] == 1
    gold = {"id": "r0", "label": "yes", "output": {"verdict": "yes"}}
    write_rows(job_dir / "gold.jsonl", [gold])
    known = ["r", "gold.jsonl", "--on"]
    for more in (["verdict"], ["verdict", "--gold-field", "label"]):
        assert compared(bagent, *known, *more)["numbers"]["accuracy"] == 1.0
    nearest = "--on verdit: no answer has this field (did you mean verdict?)"
    for words, message in (
        (["r", "r", "--on", "verdit"], nearest),
        ([*known, "verdit", "--gold-field", "label"], "--on verdit"),
        ([*known, "verdict", "--gold-field", "lable"], "has no field lable"),
    ):
        assert message in bagent(["compare", *words]).err


def test_two_runs_against_one_gold_file_are_tested_as_a_pair(bagent, job_dir):
    columns = [("label", "VARCHAR")]
    right_b = [True] * 17 + [False] * 3
    for name, right in (("a", [n < 8 for n in range(20)]), ("b", right_b)):
        outcomes = [answer(n, {"label": "x" if ok else "y"}) for n, ok in enumerate(right)]
        make_run(job_dir / "runs" / name, outcomes, answer_columns=columns)
    gold = "".join(json.dumps({"id": f"r{n}", "expected": "x"}) + "\n" for n in range(20))
    (job_dir / "gold.jsonl").write_text(gold)
    on = ["--on", "label", "--gold-field", "expected"]
    found = compared(bagent, "a", "b", "gold.jsonl", *on)
    (label,) = found["fields"]
    assert (label["accuracy_a"], label["accuracy_b"], label["difference"]) == (0.4, 0.85, 0.45)
    assert label["interval_a"] == [0.218807, 0.613418]  # (0.4961 -+ 0.2352) / 1.1921
    assert (label["only_a"], label["only_b"]) == (0, 9)
    assert label["p"] == pytest.approx(0.00390625)  # 2 * 0.5 ** 9
    low, high = label["interval"]
    assert 0.1 < low < 0.45 < high < 0.7
    shown = bagent(["compare", "a", "b", "gold.jsonl", *on, "--fail-if", "p < 0.05"])
    assert shown.code == 1
    assert "the difference is significant at 5 %" in shown.out
    alone = compared(bagent, "a", "gold.jsonl", *on)
    assert alone["fields"][0]["interval"] == [0.218807, 0.613418]
    assert alone["numbers"]["accuracy_low"] == 0.218807


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (0, 6, 0.03125), (10, 25, 0.0166783), (4900, 5200, 0.00293)],
)
def test_the_p_of_mcnemar_is_that_of_the_binomial_distribution(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == pytest.approx(p, rel=2e-3)


def test_wrong_questions_are_told_in_one_line(bagent, pair, job_dir):
    (job_dir / "gold.csv").write_text("name,a\nr0,1\n")
    (job_dir / "twice.csv").write_text("id,a\nr0,1\nr0,2\n")
    wrong = (
        (["a", "b", "--sql", "nonsense ="], "--sql"),
        (["a", "b", "--sql", "a.nothing = b.text"], "a and b have id, row, "),
        (["a", "b", "--fail-if", "nothing > 1"], "same_text"),
        (["a", "gold.csv", "--on", "a"], "--id NAME"),
        (["a", "gold.csv", "--id", "name", "--on", "z"], "has no field z"),
        (["a", "twice.csv", "--on", "a"], "twice"),
        (["a", "twice.csv", "--gold-field", "a"], "one for each"),
        (["a", "b", "--gold-field", "a"], "for known answers"),
        (["a", "b", "runs"], "no file of known answers"),
        (["a", "missing"], "no such run"),
    )
    for args, words in wrong:
        done = bagent(["compare", *args])
        assert done.code == 2, args
        assert words in done.err
        assert done.err.count("\n") == 1
