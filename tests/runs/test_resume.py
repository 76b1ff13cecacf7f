"""What the same command sends again after a run has ended, and what the summary says to type."""

from __future__ import annotations

import json

import pytest

from support.jobs import results, results_by_id, rows, write_job, write_rows
from support.replies import echo, error_body, ok, ok_json, raw, refused, status
from support.run_outcomes import CUT, NO_TABLES, RUN, last_line, type_next

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (CUT, "truncated"),
        (refused(), "refused"),
        (ok_json({"score": "high"}), "schema"),
    ],
    ids=["truncated", "refused", "invalid"],
)
def test_a_lasting_failure_is_sent_again_only_where_the_next_line_is_typed(
    fs, job_dir, bagent, reply, kind
):
    fs.set_script({"r2": [reply], "*": [ok_json({"score": 1})]})
    output = {"schema": SCHEMA, "retries": 0, "enforce": "prompt"}
    write_job(job_dir, fs.url, 3, output=output)
    assert bagent(RUN).code == 1
    before = fs.count("r2")
    again = bagent(RUN)
    assert (again.code, fs.count("r2"), fs.count("r1")) == (1, before, 1)
    assert "the same command sends none of these rows again" in again.err
    assert f"--retry {kind}" in last_line(again)
    fs.set_script({"*": [ok_json({"score": 2})]})
    typed = type_next(bagent, again)
    assert typed.code == 0, typed.err
    assert fs.count("r1") == 1
    assert results_by_id(job_dir)["r2"]["output"] == {"score": 2}


@pytest.mark.parametrize("code", [0, 1], ids=["all ok", "one refused"])
def test_a_finished_run_needs_no_server_to_end_as_it_did(fs, job_dir, bagent, code):
    fs.set_script({"r2": [refused() if code else echo()], "*": [echo()]})
    write_job(job_dir, fs.url, 3, limits={"retries": 0}, results=NO_TABLES)
    assert bagent(RUN).code == code
    write_job(job_dir, "http://127.0.0.1:9/v1", 3, limits={"retries": 0}, results=NO_TABLES)
    again = bagent(RUN)
    assert again.code == code, again.err
    printed = bagent([*RUN, "-o", "-"])
    assert printed.code == code, printed.err
    assert printed.out.count("\n") == 3
    write_rows(job_dir / "rows.jsonl", 4)
    assert bagent([*RUN, "--wait-hosts", "1s"]).code == 75


def test_a_passing_failure_is_sent_again_by_the_same_command(fs, job_dir, bagent):
    fs.set_script({"r2": [raw("<h1>"), ok("now")], "r3": [CUT], "*": [echo()]})
    write_job(job_dir, fs.url, 3, limits={"retries": 0})
    first = bagent(RUN)
    assert first.code == 1
    lines = [line for line in first.err.splitlines() if line.startswith(("cause", "retry", "adv"))]
    assert lines == [
        "cause       1 answer ended at 64 tokens: raise sampling.max_tokens",
        "retry       bagent run job.yaml --progress plain --set sampling.max_tokens=128"
        " --on-change continue --retry truncated",
        "advice      the same command sends again what may come out otherwise: bad_response 1",
    ]
    typed = type_next(bagent, first)
    assert (typed.code, fs.count("r2"), fs.count("r3")) == (1, 2, 1)
    assert results_by_id(job_dir)["r2"]["text"] == "now"


def test_status_and_a_later_start_say_as_the_summary_that_the_context_was_full(fs, job_dir, bagent):
    full = ok("half", finish_reason="length", usage={"prompt_tokens": 990, "completion_tokens": 10})
    fs.set_script({"r1": [full], "*": [echo()]})
    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    cause = "1 answer ended at 10 tokens, though up to 64 were allowed: shorten the prompt"
    command = "bagent run job.yaml --progress plain --on-change continue --retry truncated"
    for done in (bagent(RUN), bagent(["status", "job"]), bagent(RUN)):
        lines = (done.out + done.err).splitlines()
        assert cause in next(line for line in lines if line.startswith("cause"))
        assert lines[-1].endswith(command)


@pytest.mark.tables
def test_accepted_truncated_answers_are_finished_and_exit_with_0(fs, job_dir, bagent):
    fs.set_script({"r1": [CUT], "*": [echo()]})
    write_job(job_dir, fs.url, 3, output={"truncated": "accept"})
    done = bagent(RUN)
    assert done.code == 0, done.err
    assert "rows        3 rows: 2 ok, 1 truncated (accepted), 0 failed" in done.err
    row = results_by_id(job_dir)["r1"]
    assert (row["status"], row["error_kind"], row["text"]) == ("truncated", None, "half")
    assert (
        not (job_dir / "runs/job/failed.jsonl").exists()
        or not (job_dir / "runs/job/failed.jsonl").read_text()
    )
    assert bagent([*RUN, "--retry", "all"]).code == 0
    assert fs.count("r1") == 1


def test_a_job_that_accepts_them_later_pays_for_none_again(fs, job_dir, bagent):
    fs.set_script({"r1": [CUT], "*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert bagent(RUN).code == 1
    done = bagent([*RUN, "--set", "output.truncated=accept"])
    assert (done.code, len(fs.requests)) == (0, 3)
    [state] = bagent(["status", "job", "--json"]).lines()
    assert (state["ok"], state["accepted"], state["failed"]) == (2, 1, 0)


def test_a_changed_job_sends_again_whatever_failed(fs, job_dir, bagent):
    fs.set_script({"r1": [status(400, error_body(400, "no")), ok("now")], "*": [echo()]})
    write_job(job_dir, fs.url, 3)
    assert bagent(RUN).code == 1
    changed = [*RUN, "--set", "sampling.top_p=0.5", "--on-change", "continue"]
    assert bagent(changed).code == 0
    assert (fs.count("r1"), len(fs.requests)) == (2, 4)


def test_rows_mended_edited_or_removed_leave_nothing_of_what_they_were(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, results=NO_TABLES)
    values = rows(6)
    values[1] = {"id": "r2"}
    values[2] = {"id": "r3"}
    path = write_rows(job_dir / "rows.jsonl", values)
    path.write_bytes(path.read_bytes() + b'{"id": "r7", "text": "cut o\n')
    assert bagent(RUN).code == 1
    assert len(fs.requests) == 4

    values[1]["text"] = "mended"
    del values[2]
    values[-1]["text"] = "edited"
    write_rows(path, [*values, {"id": "r7", "text": "cut off"}])
    ended = bagent(RUN)
    assert ended.code == 0, ended.err
    assert len(fs.requests) == 7
    assert [row["text"] for row in results(job_dir) if row["id"] == "r6"] == ["id=r6 edited"]
    values[-1]["text"] = "edited again"
    write_rows(path, [*values, {"id": "r7", "text": "cut off"}])
    assert bagent(RUN).code == 0
    assert len(fs.requests) == 8
    texts = {
        name: [row["text"] for row in results(job_dir) if row["id"] == name]
        for name in ("r2", "r3", "r6", "r7")
    }
    edited = {"r6": ["id=r6 edited again"], "r7": ["id=r7 cut off"]}
    assert texts == {"r2": ["id=r2 mended"], "r3": [], **edited}


def test_finished_rows_that_left_the_input_are_counted_and_can_be_listed(fs, job_dir, bagent):
    values = [{"text": f"t{n}"} for n in range(4)]
    write_job(job_dir, fs.url, values, prompt="{{ text }}", results=NO_TABLES)
    first = bagent(RUN)
    assert (first.code, "absent" in first.err) == (0, False)
    write_rows(job_dir / "rows.jsonl", [{"text": text} for text in ("t0", "new", "t2", "t3", "t4")])
    text = (
        "absent      no longer in the input, but counted: 1 row of earlier starts; bagent results"
        ' runs/job --where "input is null" shows them, "input is not null" the others'
    )
    assert text in bagent(RUN).err
    assert text in bagent(["status", "job"]).out
    for condition, count in (("input is null", 1), ("input is not null", 5)):
        assert len(bagent(["results", "--where", condition]).lines()) == count
    assert "absent" not in bagent([*RUN, "--limit", "2"]).err
    write_rows(job_dir / "rows.jsonl", [{"text": "t1"}])
    assert "counted: 5 rows of earlier starts" in bagent(RUN).err


def test_an_edited_row_has_one_answer_wherever_it_stands(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    values = rows(6)
    write_job(job_dir, fs.url, values, results=NO_TABLES)
    assert bagent(RUN).code == 0
    values = [rows(7)[6], *reversed(values)]
    values[3]["text"] = values[5]["text"] = "edited"
    write_rows(job_dir / "rows.jsonl", values)
    # The first of these starts ends before the last edited row, and compares nothing.
    assert bagent([*RUN, "--limit", "5"]).code == 0
    assert bagent(RUN).code == 0
    assert len(fs.requests) == 6 + 1 + 2
    texts = {row["id"]: row["text"] for row in results(job_dir)}
    assert (len(results(job_dir)), sum("edited" in text for text in texts.values())) == (7, 2)
    assert json.loads(bagent(["status", "job", "--json"]).out)["by_status"] == {"ok": 7}


def test_stdout_has_the_current_answers_of_the_rows_of_the_input(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    values = rows(4)
    write_job(job_dir, fs.url, values, results=NO_TABLES)
    assert bagent(RUN).code == 0
    values[2]["text"] = "edited"
    write_job(job_dir, fs.url, values[1:], results=NO_TABLES)
    for _ in range(2):
        printed = bagent([*RUN, "-o", "-"])
        assert printed.code == 0, printed.err
        lines = printed.lines()
        assert {line["id"]: line["text"] for line in lines}["r3"] == "id=r3 edited"
        assert sorted((line["id"], line["input"]["id"]) for line in lines) == [
            (name, name) for name in ("r2", "r3", "r4")
        ]
