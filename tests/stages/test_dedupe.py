"""Equal requests: one is sent in a run, over all its starts, and the others copy its answer."""

from __future__ import annotations

import pytest

from support.jobs import results_by_id, write_job
from support.replies import echo
from support.stage_jobs import NO_TABLES, RUN

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
