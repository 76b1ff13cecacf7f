"""Rows of a job with stages that were edited, or left the input, between two starts."""

from __future__ import annotations

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results, write_rows
from support.replies import echo, status
from support.stage_jobs import RUN, run_stages

STEPS = [
    {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"},
    {"kind": "map", "name": "last", "prompt": "two id={{ id }} {{ first }}"},
]


def rows(**texts):
    return [{"id": name, "text": text} for name, text in texts.items()]


def run_twice(folder, before, after, stages, script=None, **keys):
    """Run a job on two inputs; return how both starts ended, and the requests of the second."""
    with FakeServer(script or {"*": [echo()]}, allow_faults=True) as server:
        first = run_stages(folder, server.url, before, stages, **keys)
        sent = len(server.requests)
        write_rows(folder / "rows.jsonl", after)
        second = run_bagent(RUN, folder)
        return first, second, len(server.requests) - sent


def by_stage(folder):
    """Return stage, id and text of the current results, in order."""
    return sorted((row["stage"], row["id"], row["text"]) for row in results(folder))


def test_a_row_that_was_edited_and_moved_is_replaced_in_all_stages(tmp_path):
    after = rows(new="n", r1="a", r2="EDITED")
    first, second, sent = run_twice(tmp_path, rows(r1="a", r2="b"), after, STEPS)
    assert (first.code, second.code, sent) == (0, 0, 4), second.err
    assert by_stage(tmp_path) == [
        ("first", "new", "one id=new n"),
        ("first", "r1", "one id=r1 a"),
        ("first", "r2", "one id=r2 EDITED"),
        ("last", "new", "two id=new one id=new n"),
        ("last", "r1", "two id=r1 one id=r1 a"),
        ("last", "r2", "two id=r2 one id=r2 EDITED"),
    ]


def test_good_answers_of_rows_that_left_the_input_stay_and_are_counted(tmp_path):
    before, after = rows(r1="a", r2="b", r3="c"), rows(r3="c")
    _, second, _ = run_twice(tmp_path, before, after, STEPS)
    assert second.code == 0, second.err
    assert "3 rows: 3 ok, 0 failed" in second.err
    assert "absent      no longer in the input, but counted: 2 rows of earlier starts" in second.err
    [state] = run_bagent(["status", "job", "--json"], tmp_path).lines()
    assert state["absent"] == 2
    write_rows(tmp_path / "rows.jsonl", before)
    with FakeServer({"*": [echo()]}) as server:
        again = run_bagent([*RUN, "--backend", server.url], tmp_path)
        assert (again.code, len(server.requests)) == (0, 0), again.err
    assert "absent" not in again.err


def test_a_shorter_text_leaves_no_old_parts_behind(tmp_path):
    stages = [
        {"kind": "expand", "name": "parts", "split": {"field": "text", "tokens": 8, "overlap": 0}},
        {"kind": "map", "name": "note", "prompt": "id={{ id }} {{ text }}"},
    ]
    long, short = "a word here. " * 12, "other words. " * 5
    kept = "not edited. " * 8
    before, after = rows(r1=long, r2=kept), rows(r1=short, r2=kept)
    _, second, _ = run_twice(tmp_path, before, after, stages)
    assert second.code == 0, second.err
    notes = [text for stage, _, text in by_stage(tmp_path) if stage == "note"]
    parts = [stage for stage, _, _ in by_stage(tmp_path) if stage == "parts"]
    assert len(notes) == len(parts)
    assert not [text for text in notes if "a word here" in text]
    assert "".join(t.removeprefix("id=r1 ") for t in notes if t.startswith("id=r1")) == short
    assert "".join(t.removeprefix("id=r2 ") for t in notes if t.startswith("id=r2")) == kept


def test_a_section_that_failed_stays_beside_its_finished_board(tmp_path):
    sections = [{"name": "good", "prompt": "id=g {{ id }}"}, {"name": "bad", "prompt": "id=b x"}]
    stages = [{"kind": "loop", "name": "plan", "sections": sections, "max_rounds": 1}]
    script = {"b": [status(400)], "*": [echo()]}
    both = rows(r1="a")
    first, second, sent = run_twice(tmp_path, both, both, stages, script)
    assert (first.code, second.code, sent) == (0, 0, 0), second.err
    assert {row["id"] for row in results(tmp_path)} == {"r1", "r1/1.good", "r1/1.bad"}
