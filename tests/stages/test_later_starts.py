"""Rows of several starts: equal ones are sent once, edited ones anew, those that left stay out."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results, results_by_id, write_job, write_rows
from support.replies import echo, status
from support.stage_jobs import NO_TABLES, RUN, run_stages

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


def test_failures_of_a_row_that_left_the_input_count_no_more(tmp_path):
    script = {"bad": [status(400)], "*": [echo()]}
    before, after = rows(r1="a", bad="b", r3="c"), rows(r1="a", r3="c")
    first, second, sent = run_twice(tmp_path, before, after, STEPS, script)
    assert (first.code, second.code, sent) == (1, 0, 0), second.err
    assert "rows        2 rows: 2 ok, 0 failed" in second.err
    assert {name for _, name, _ in by_stage(tmp_path)} == {"r1", "r3"}


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


SAME = [{"id": f"r{n}", "text": "same"} for n in range(1, 7)]
PROMPT = "say {{ text }}"


def sources(folder):
    return [row.get("copied_from") for row in results_by_id(folder).values()]


def test_equal_requests_of_two_starts_are_sent_once(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, SAME, prompt=PROMPT, results=NO_TABLES)
    assert bagent([*RUN, "--limit", "2"]).code == 0
    again = bagent(RUN)
    assert again.code == 0
    assert "6 rows: 6 ok, 0 failed; this start: 0 sent, 4 copied from equal requests" in again.err
    assert len(fs.requests) == 1
    assert sources(job_dir) == [None, *["r1"] * 5]


def test_an_answer_to_an_earlier_prompt_is_not_copied(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, SAME, prompt=PROMPT, results=NO_TABLES)
    assert bagent([*RUN, "--limit", "2"]).code == 0
    write_job(job_dir, fs.url, prompt="now say {{ text }}", results=NO_TABLES)
    assert bagent([*RUN, "--on-change", "continue"]).code == 0
    assert [request.prompts[0] for request in fs.requests] == ["say same", "now say same"]
    assert sources(job_dir) == [None, "r1", None, "r3", "r3", "r3"]


@pytest.mark.parametrize("keys", [{"dedupe": False}, {"sampling": {"temperature": 1}}])
def test_what_is_not_deduplicated_is_sent_again_by_a_later_start(fs, job_dir, bagent, keys):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, SAME, prompt=PROMPT, results=NO_TABLES, **keys)
    assert bagent([*RUN, "--limit", "2"]).code == 0
    assert bagent(RUN).code == 0
    assert len(fs.requests) == 6


def test_equal_requests_of_a_stage_are_sent_once_over_two_starts(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    stages = [
        {"kind": "map", "name": "first", "prompt": PROMPT},
        {"kind": "map", "name": "second", "prompt": "check {{ first }} of {{ id }}"},
    ]
    write_job(job_dir, fs.url, SAME, prompt=None, stages=stages, results=NO_TABLES)
    assert bagent([*RUN, "--limit", "2"]).code == 0
    assert bagent(RUN).code == 0
    prompts = [request.prompts[0].split()[0] for request in fs.requests]
    assert (prompts.count("say"), prompts.count("check")) == (1, 6)
