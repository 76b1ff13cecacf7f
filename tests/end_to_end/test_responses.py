"""Answers with HTTP status 200 that are none, or not quite what the protocol says, and streams."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.jobs import parquet, results_by_id, write_job
from support.replies import (
    ABSENT,
    delta,
    error_body,
    ok,
    ok_reasoning,
    ok_tools,
    refused,
    stream,
    tool_call,
    usage_chunk,
)
from support.run_outcomes import NO_TABLES, RUN, run_script, statuses

GOOD = ok("good")


def test_token_counts_that_are_missing_are_unknown_and_not_zero(fs, job_dir):
    script = {
        "null": [ok("a", usage=None)],
        "half": [ok("b", usage={"prompt_tokens": 5, "completion_tokens": None})],
        "absent": [ok("c", usage=ABSENT)],
        "odd": [ok("d", usage={"prompt_tokens": "7", "completion_tokens": -1})],
        "whole": [ok("e", usage={"prompt_tokens": 10, "completion_tokens": 20})],
    }
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in script]
    write_job(job_dir, fs.url, rows, results=NO_TABLES, stream=False)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    found = results_by_id(job_dir)
    counts = {n: (r["prompt_tokens"], r["completion_tokens"]) for n, r in found.items()}
    assert counts["null"] == counts["absent"] == (None, None)
    assert counts["half"] == (5, None)
    assert counts["whole"] == (10, 20)
    tokens = next(line for line in done.err.splitlines() if line.startswith("tokens"))
    for part in ("15 prompt", "20 completion", "4 answers without full counts"):
        assert part in tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_only_a_finish_reason_of_a_good_end_is_ok(fs, job_dir, streamed):
    bad = ["abort", "error", None, "banana", "", 7]
    script = {f"bad{n}": [ok("[]", reason), GOOD] for n, reason in enumerate(bad)}
    script["length"] = [ok("half", "length")]
    script["filter"] = [ok("half", "content_filter")]
    script["refusal"] = [refused("I will not.")]
    script["end"] = [ok("good", "end_turn")]
    script["STOP"] = [ok("good", "STOP")]
    done, found = run_script(fs, job_dir, script, stream=streamed)
    assert done.code == 1
    for n, reason in enumerate(bad):
        row = found[f"bad{n}"]
        assert (row["status"], row["text"], row["attempts"]) == ("ok", "good", 2), reason
    assert (found["length"]["status"], found["length"]["attempts"]) == ("truncated", 1)
    assert statuses(found)["filter"] == statuses(found)["refusal"] == "refused"
    assert "I will not." in found["refusal"]["error"]
    assert statuses(found)["end"] == statuses(found)["STOP"] == "ok"


def test_an_answer_without_text_is_not_ok(fs, job_dir):
    script = {
        "null": [ok(None), GOOD],
        "blank": [ok("  \n"), GOOD],
        "thinking": [ok_reasoning("", "only thoughts"), GOOD],
        "never": [ok("")],
        "cut": [ok_reasoning("", "only thoughts", finish_reason="length")],
        "tool": [ok_tools(tool_call("search", "{}"))],
    }
    done, found = run_script(fs, job_dir, script, limits={"retries": 1, "concurrency": 50})
    assert done.code == 1
    assert {found[name]["status"] for name in ("null", "blank", "thinking")} == {"ok"}
    assert (found["never"]["status"], found["never"]["error_kind"]) == ("failed", "empty")
    assert found["cut"]["status"] == "truncated"
    assert found["tool"]["status"] == "failed"


# --- streams that end early or tell of an error ---------------------------------------------------


def test_an_error_in_the_middle_of_a_stream_is_that_error(fs, job_dir):
    half = [delta("half")]
    script = {
        "passing": [stream([*half, error_body(503)], end="done"), GOOD],
        "event": [stream([*half, 'event: error\ndata: {"message": "overloaded"}\n\n']), GOOD],
        "lasting": [stream([*half, error_body(400, "context_length_exceeded")], end="done"), GOOD],
    }
    done, found = run_script(fs, job_dir, script, stream=True)
    assert done.code == 1
    assert found["passing"]["text"] == found["event"]["text"] == "good"
    assert (found["lasting"]["status"], found["lasting"]["attempts"]) == ("failed", 1)
    assert found["lasting"]["error_kind"] == "context_overflow"


def test_two_attempts_of_a_streamed_row_are_never_mixed(fs, job_dir):
    first = [delta(None, reasoning="first thought "), delta("first "), usage_chunk(5, 99)]
    second = [delta(None, reasoning="second thought"), delta("second", "stop"), usage_chunk(5, 1)]
    script = {
        "r1": [stream(first, end="close"), stream(second)],
        "r2": [stream(first, end="cut"), stream(second)],
    }
    done, found = run_script(fs, job_dir, script, stream=True, results={"duckdb": False})
    assert done.code == 0, done.err
    for row in found.values():
        assert (row["text"], row["reasoning"]) == ("second", "second thought")
        assert row["finish_reason"] == "stop"
    attempts = parquet(job_dir / "runs/job", "attempts")
    assert sorted(str(one["error_kind"]) for one in attempts) == ["None"] * 2 + ["bad_response"] * 2
