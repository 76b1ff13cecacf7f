"""Streamed answers that end early, stall, or tell of an error."""

from __future__ import annotations

from support.jobs import parquet
from support.replies import delta, error_body, ok, stream, usage_chunk
from support.run_outcomes import run_script

GOOD = ok("good")


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
