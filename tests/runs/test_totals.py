"""The summary, status, progress and the exit code tell the same totals: those of the whole run."""

from __future__ import annotations

import json

import pytest

from support.jobs import write_job
from support.replies import echo, error_body, raw, status
from support.stage_jobs import NO_TABLES, RUN

REFUSED = [status(400, error_body(400, "no"))]
BROKEN = [raw("<h1>gateway</h1>")]


def summary(done):
    """The lines of the summary by their label."""
    pairs = (line.split(maxsplit=1) for line in done.err.splitlines() if line[:1].isalpha())
    return {label: text for label, text in pairs if label in ("rows", "failed", "ended")}


def events(done):
    return [json.loads(line) for line in done.err.splitlines()]


@pytest.mark.parametrize("more", [[], ["--workers", "2"]], ids=["one process", "workers"])
def test_after_a_resume_every_output_tells_the_totals_of_the_whole_run(fs, job_dir, bagent, more):
    fs.set_script(
        {"r1": REFUSED, "r2": BROKEN, "r3": [*BROKEN, echo()], "r7": REFUSED, "*": [echo()]}
    )
    write_job(job_dir, fs.url, 10, limits={"retries": 0})
    first = bagent(["run", "job.yaml", "--limit", "5", "--progress", "plain"])
    assert summary(first)["rows"] == "5 rows: 2 ok, 3 failed"
    done = bagent(["run", "job.yaml", "--progress", "json", "--skip-failed", *more])
    end, closing = (e for e in events(done) if e["event"] in ("end", "summary"))
    assert (first.code, done.code, closing["exit_code"]) == (1, 1, 1)
    assert closing["lines"][0] == "rows        10 rows: 6 ok, 4 failed; this start: 5 sent"
    assert closing["lines"][1] == (
        "failed      by status: failed 4; by kind: bad_response 2, rejected 2"
    )
    assert [end[name] for name in ("total", "ok", "failed", "remaining")] == [10, 6, 4, 0]
    assert end["this_start"] == {
        "done": 5, "ok": 4, "failed": 1, "sent": 5, "copied": 0,
        "by_status": {"ok": 4, "failed": 1},
    }  # fmt: skip
    [state] = bagent(["status", "job", "--json"]).lines()
    for name in ("total", "ok", "failed", "remaining", "by_status", "by_kind"):
        assert state[name] == end[name]
    table = bagent(["status", "job"]).out.splitlines()
    assert table[2].split(maxsplit=1) == ["rows", "10 rows: 6 ok, 4 failed"]
    if more:
        return  # with workers one resume is enough: they take a second each to start
    again = bagent(["run", "job.yaml", "--progress", "plain", "--retry", "bad_response"])
    assert summary(again)["rows"] == "10 rows: 7 ok, 3 failed; this start: 2 sent"
    assert again.code == 1


def test_summary_status_and_report_tell_one_speed_without_the_pause(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 8)
    bagent(["run", "job.yaml", "--limit", "4"])
    path = job_dir / "runs" / "job" / "run.json"
    info = json.loads(path.read_bytes())
    start = info["starts"][0]
    start["at"], start["ended_at"] = start["at"] - 1000, start["at"] - 996
    path.write_text(json.dumps(info))
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    (line,) = (x for x in done.err.splitlines() if x.startswith("time "))
    whole, own = line.split("; ")
    speed = whole.split()[-2]
    assert 0.05 < float(speed) <= 2.0, "8 rows in 4 s and a little; 0.008 with the pause"
    assert own.endswith("(this start)")
    assert f"{bagent(['status', 'job', '--json']).lines()[0]['rows_per_s']:.2f}" == speed
    assert ["rows_per_s", speed] in [x.split() for x in bagent(["status", "job"]).out.splitlines()]
    assert bagent(["report", "job", "-o", "page.html"]).code == 0
    page = (job_dir / "page.html").read_text()
    assert speed in page[page.index("rows a second") - 200 : page.index("rows a second") + 200]


def test_where_a_run_stopped_it_tells_what_remains(fs, job_dir, bagent):
    fs.set_script({"r1": REFUSED, "r2": REFUSED, "*": [echo()]})
    limits = {"concurrency": 1, "retries": 0, "stop_after_failures": 2}
    write_job(job_dir, fs.url, 6, limits=limits)
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    [state] = bagent(["status", "job", "--json"]).lines()
    assert (done.code, state["state"], state["total"], state["failed"]) == (76, "stopped", 6, 2)
    assert state["remaining"] == 6 - 2 - state["ok"] > 0
    assert summary(done)["rows"] == (
        f"6 rows: {state['ok']} ok, 2 failed, {state['remaining']} remaining"
    )
    write_job(job_dir, fs.url, 6, limits={"concurrency": 1, "retries": 0})
    again = bagent(["run", "job.yaml", "--progress", "json"])
    first = next(event for event in events(again) if event["event"] in ("progress", "end"))
    assert first["total"] == 6


def test_the_summary_says_how_many_of_the_sent_rows_have_no_value_for_the_prompt(
    fs, job_dir, bagent
):
    values = [{"id": f"r{n}", "text": "" if n % 2 else "t", "note": None} for n in range(6)]
    values[4] = {"id": "", "text": None, "note": "x"}
    prompt = {"user": "id={{ id }} {{ text }}{% if note %}{{ note }}{% endif %}"}
    write_job(job_dir, fs.url, values, id="id", prompt=prompt, results=NO_TABLES)
    first = bagent([*RUN, "--limit", "1"])
    done = bagent(RUN)
    assert (first.code, done.code) == (0, 0)
    assert "an empty" not in first.err
    line = "empty       4 rows have an empty text; 1 row has an empty id (this start)"
    assert line in done.err.splitlines()


SECTIONS = [{"name": name, "prompt": "id={{ id }} {{ board }}"} for name in ("one", "two")]


def test_the_speed_of_a_job_with_several_stages_is_not_that_of_its_rows(fs, job_dir, bagent):
    board = {"name": "blackboard", "sections": SECTIONS, "max_rounds": 2}
    write_job(job_dir, fs.url, 4, topology=board, prompt=None, results=NO_TABLES)
    done = bagent(RUN)
    assert "rows        4 rows: 4 ok, 0 failed" in done.err
    assert "results/s of all stages" in done.err
