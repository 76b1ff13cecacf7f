"""A job that changes between two starts: what was finished before it is kept, and said to be so."""

from __future__ import annotations

import json

from support.jobs import rows, write_job, write_rows
from support.replies import echo
from support.stage_jobs import NO_TABLES, RUN

CONTINUE = [*RUN, "--on-change", "continue"]


def start(bagent, job_dir, fs, prompt, *options):
    write_job(job_dir, fs.url, 6, prompt=prompt, results=NO_TABLES)
    return bagent([*RUN, *options])


def test_status_and_report_tell_which_rows_an_earlier_prompt_made(fs, job_dir, bagent):
    assert start(bagent, job_dir, fs, "first id={{ id }}", "--limit", "4").code == 0
    done = start(bagent, job_dir, fs, "second id={{ id }}", "--on-change", "continue")
    assert "prompt changed; 4 finished rows are kept as they are" in done.err
    for ended in (done, bagent(RUN)):
        assert ended.code == 0
        assert "\nchanged     prompt; 4 rows finished before that and kept\n" in ended.err
    state = bagent(["status", "job"]).out
    [line] = [line for line in state.splitlines() if line.startswith("prompt changed")]
    assert line.endswith("4 rows finished before it and kept")
    [change] = json.loads(bagent(["status", "job", "--json"]).out)["changes"]
    assert (change["changed"], change["finished"]) == (["prompt"], 4)
    assert bagent(["report", "job", "-o", "page.html"]).code == 0
    page = (job_dir / "page.html").read_text()
    assert "4 of 6 rows ended before it" in page
    assert "first id={{ id }}" in page
    assert "second id={{ id }}" in page


def test_the_earlier_text_of_a_prompt_file_is_not_made_up(fs, job_dir, bagent):
    (job_dir / "p.txt").write_text("first id={{ id }}")
    prompt = {"user": {"file": "p.txt"}}
    assert start(bagent, job_dir, fs, prompt, "--limit", "4").code == 0
    (job_dir / "p.txt").write_text("second id={{ id }}")
    assert start(bagent, job_dir, fs, prompt, "--on-change", "continue").code == 0
    assert bagent(["report", "job", "-o", "page.html"]).code == 0
    page = (job_dir / "page.html").read_text()
    assert "p.txt: what it held then is not kept" in page
    assert page.count("second id={{ id }}") == 1


def test_each_shard_accepts_a_change_once(fs, job_dir, bagent):
    shards = [["--shard", "1/2"], ["--shard", "2/2"]]
    for shard in shards:
        assert start(bagent, job_dir, fs, "first id={{ id }}", *shard).code == 0
    write_rows(job_dir / "rows.jsonl", rows(12))
    write_job(job_dir, fs.url, prompt="second id={{ id }}", results=NO_TABLES)
    for shard in shards:
        refused = bagent([*RUN, *shard])
        assert (refused.code, "prompt changed since" in refused.err) == (2, True)
        assert bagent([*CONTINUE, *shard]).code == 0
        assert bagent([*RUN, *shard]).code == 0
    prompts = [request.prompts[0].split()[0] for request in fs.requests]
    assert (prompts.count("first"), prompts.count("second")) == (6, 6)
    [change] = json.loads(bagent(["status", "job", "--json"]).out)["changes"]
    assert (change["changed"], change["finished"]) == (["prompt"], 6)


def test_another_field_as_the_id_is_refused_like_another_prompt(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    values = [{"id": row["id"], "name": f"n{row['id']}", "text": row["text"]} for row in rows(6)]

    def again(*options, **keys):
        write_job(job_dir, fs.url, values, prompt="id={{ id }}", results=NO_TABLES, **keys)
        return bagent([*RUN, *options])

    assert again().code == 0
    assert again(id="id").code == 0  # the default of these rows
    refused = again(id="name")
    assert refused.code == 2
    assert "id changed since " in refused.err
    assert "so each row counts as a new one" in refused.err
    for choice in ("--on-change continue", "--fresh", "--name"):
        assert choice in refused.err
    assert len(fs.requests) == 6
    assert again("--on-change", "continue", id="name").code == 0


def test_another_model_is_refused_though_all_rows_are_finished(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 2, model="first", results=NO_TABLES)
    assert bagent(RUN).code == 0
    refused = bagent([*RUN, "--model", "second"])
    assert (refused.code, "model changed since " in refused.err) == (2, True)
    kept = bagent([*CONTINUE, "--model", "second"])
    assert (kept.code, "model changed; 2 finished rows are kept" in kept.err) == (0, True)
    assert bagent([*RUN, "--model", "second"]).code == 0
    assert bagent([*RUN, "--model", "first"]).code == 2
    assert len([request for request in fs.requests if request.prompts]) == 2


def test_answers_that_are_no_longer_asked_for_are_counted_as_such(fs, job_dir, bagent):
    prompt, results = "id={{ id }}", {"duckdb": False, "parquet": False}
    write_job(job_dir, fs.url, 3, prompt=prompt, results=results, answers=3)
    assert bagent(RUN).code == 0
    write_job(job_dir, fs.url, 3, prompt=prompt, results=results, answers=1)
    done = bagent(CONTINUE)
    assert done.code == 0, done.err
    [line] = [line for line in done.err.splitlines() if line.startswith("absent")]
    assert line.endswith("or asked for, but counted: 6 answers of earlier starts")
