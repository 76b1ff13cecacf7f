"""Streamed answers that end early, stall, or tell of an error."""

from __future__ import annotations

from support.jobs import parquet
from support.replies import delta, error_body, ok, stream, usage_chunk, wire
from support.run_outcomes import run_script

GOOD = ok("good")
HALF = [delta("half "), delta("an answer")]


def test_a_stream_that_breaks_off_is_never_a_whole_answer(fs, job_dir):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    event = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
    broken = {
        "closed": stream(HALF, end="close"),
        "cut": stream(HALF, end="cut"),
        "in-a-chunk": stream([*HALF, 'data: {"cho'], end="cut"),
        "end-mark": stream(HALF, end="done"),
        "null-reason": stream([*HALF, delta("", None)], end="done"),
        "unknown-reason": stream([*HALF, delta("", "abort")]),
        "nothing": stream([], end="close"),
        "counts": stream([*HALF, usage_chunk()], end="done"),
        "too-short": wire(head + b"Content-Length: 5000\r\n\r\n" + event),
        "bad-chunk": wire(head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + event),
        "no-json": stream(['data: {"choices": [}\n\n']),
    }
    script = {name: [reply, GOOD] for name, reply in broken.items()}
    done, found = run_script(fs, job_dir, script, stream=True)
    assert done.code == 0, done.err
    ends = {name: (row["text"], row["attempts"]) for name, row in found.items()}
    assert ends == dict.fromkeys(script, ("good", 2))


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


def test_a_stream_that_stalls_is_given_up_and_retried(fs, job_dir):
    stalled = [delta("half"), ": waiting\n\n", ": waiting\n\n"]
    limits = {"retries": 1, "timeout": {"idle": "0.5s", "total": "30s"}}
    steady = [*(delta(f"{n} ") for n in range(4)), delta("", "stop")]
    script = {"stalls": [stream(stalled, gap=2), GOOD], "slow": [stream(steady, gap=0.2)]}
    done, found = run_script(fs, job_dir, script, stream=True, limits=limits)
    assert done.code == 0, done.err
    assert (found["stalls"]["text"], found["stalls"]["attempts"]) == ("good", 2)
    assert (found["slow"]["text"], found["slow"]["attempts"]) == ("0 1 2 3 ", 1)
