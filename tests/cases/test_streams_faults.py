"""Streamed answers that break in the less usual places."""

from __future__ import annotations

import pytest

from support.jobs import parquet, write_job
from support.replies import delta, ok, ok_json, stream, usage_chunk, wire
from support.run_outcomes import NO_TABLES, run_rows

pytestmark = pytest.mark.slow

GOOD = ok("good")
LIMITS = {"retries": 2, "concurrency": 50}


def run_script(fs, folder, script, **keys):
    """Run one streamed row for each list of replies."""
    fs.set_script(script)
    values = [{"id": name, "text": "x"} for name in script]
    write_job(
        folder,
        fs.url,
        values,
        **{"results": NO_TABLES, "limits": LIMITS, "stream": True} | keys,
    )
    return run_rows(folder)


def test_two_tries_of_a_streamed_row_are_never_mixed(fs, job_dir):
    thought = [delta(None, reasoning="first thought "), delta("first ")]
    second = [delta(None, reasoning="second thought"), delta("second", "stop"), usage_chunk(5, 1)]
    script = {
        "r1": [stream([*thought, usage_chunk(5, 99)], end="close"), stream(second)],
        "r2": [stream(thought, end="cut"), stream(thought, end="cut"), stream(second)],
    }
    done, found = run_script(fs, job_dir, script, results={"duckdb": False})
    assert done.code == 0, done.err
    for row in found.values():
        assert (row["text"], row["reasoning"]) == ("second", "second thought")
        assert row["finish_reason"] == "stop"
    attempts = parquet(job_dir / "runs/job", "attempts")
    kinds = sorted(str(one["error_kind"]) for one in attempts)
    assert kinds.count("None") == 2
    assert len(attempts) == 5


def test_a_cut_stream_that_happens_to_be_valid_is_still_cut(fs, job_dir):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    script = {
        "whole-object": [stream([delta('{"a": 1}')], end="close"), ok_json({"a": 2})],
        "half-number": [stream([delta('{"a": 1')], end="cut"), ok_json({"a": 2})],
    }
    done, found = run_script(fs, job_dir, script, output={"schema": schema})
    assert done.code == 0, done.err
    assert [row["output"] for row in found.values()] == [{"a": 2}] * 2
    assert {row["attempts"] for row in found.values()} == {2}


def test_a_stream_that_says_length_is_truncated_and_not_sent_again(fs, job_dir):
    script = {"r1": [stream([delta("half "), delta("", "length")], end="cut")]}
    done, found = run_script(fs, job_dir, script)
    assert done.code == 1
    assert (found["r1"]["status"], found["r1"]["text"]) == ("truncated", "half ")
    assert fs.count("r1") == 1


@pytest.mark.parametrize("reason", ["error", "abort", "banana"])
def test_a_stream_that_ends_for_an_unknown_reason_is_sent_again(fs, job_dir, reason):
    script = {"r1": [stream([delta("half"), delta("", reason)]), GOOD]}
    done, found = run_script(fs, job_dir, script)
    assert done.code == 0, done.err
    assert (found["r1"]["text"], found["r1"]["attempts"]) == ("good", 2)


def test_bytes_that_are_no_stream_at_all_are_sent_again(fs, job_dir):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    text = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
    script = {
        "binary": [stream([b"data: \xff\xfe\xfa\n\n"]), GOOD],
        "half-json": [stream(['data: {"choices": [}\n\n']), GOOD],
        "too-short": [wire(head + b"Content-Length: 5000\r\n\r\n" + text), GOOD],
        "bad-chunk": [wire(chunked + b"zz\r\n" + text), GOOD],
        "no-length": [wire(head + b"\r\n" + text), GOOD],
        "list": [stream(["data: [1, 2]\n\n"]), GOOD],
        "null-choices": [stream([{"choices": None}], end="done"), GOOD],
    }
    done, found = run_script(fs, job_dir, script)
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert {name: row["attempts"] for name, row in found.items()} == dict.fromkeys(script, 2)
