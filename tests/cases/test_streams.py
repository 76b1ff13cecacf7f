"""Streamed answers that end early, come in odd pieces, or are no streams."""

from __future__ import annotations

import pytest

from support.jobs import write_job
from support.replies import delta, error_body, ok, status, stream, usage_chunk
from support.run_outcomes import NO_TABLES, run_rows

GOOD = ok("good")


@pytest.fixture
def answers(fs, job_dir):
    """Runs one streamed row for each list of replies; the end, and the result rows by name."""

    def run(script, **keys):
        fs.set_script(script)
        rows = [{"id": name, "text": "x"} for name in script]
        limits = {"retries": 2, "concurrency": 50}
        keys = {"results": NO_TABLES, "limits": limits, "stream": True} | keys
        write_job(job_dir, fs.url, rows, **keys)
        return run_rows(job_dir)

    return run


def test_a_stream_without_a_finish_reason_is_never_a_whole_answer(fs, answers):
    two = [delta("half "), delta("an answer")]
    script = {
        "closed": [stream(two, end="close"), GOOD],
        "cut": [stream(two, end="cut"), GOOD],
        "in-a-chunk": [stream([*two, 'data: {"cho'], end="close"), GOOD],
        "in-a-chunk-cut": [stream([*two, 'data: {"cho'], end="cut"), GOOD],
        "done": [stream(two, end="done"), GOOD],
        "null": [stream([*two, delta("", None)], end="done"), GOOD],
        "nothing": [stream([], end="close"), GOOD],
        "only-done": [stream([], end="done"), GOOD],
        "only-counts": [stream([*two, usage_chunk()], end="done"), GOOD],
    }
    done, found = answers(script)
    assert done.code == 0, done.err
    told = {name: (row["text"], row["attempts"]) for name, row in found.items()}
    assert told == dict.fromkeys(script, ("good", 2))
    assert all(fs.count(name) == 2 for name in script)


def test_a_cut_after_the_finish_reason_takes_nothing_away(fs, answers):
    whole = [delta("go"), delta("od", "stop")]
    script = {
        "cut": [stream(whole, end="cut")],
        "closed": [stream(whole, end="close")],
        "no-blank-line": [stream([*whole, "data: [DONE]"], end="close")],
        "counts": [stream([*whole, usage_chunk(5, 2)], end="close")],
        "half-counts": [stream([*whole, 'data: {"choices":[],"usa'], end="cut")],
    }
    done, found = answers(script)
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert {row["attempts"] for row in found.values()} == {1}
    assert found["counts"]["completion_tokens"] == 2
    assert found["cut"]["completion_tokens"] is None


def test_a_stream_that_always_breaks_fails_and_keeps_what_came(answers):
    done, found = answers({"r1": [stream([delta("half an answer")], end="close")]})
    assert done.code == 1
    row = found["r1"]
    assert (row["status"], row["error_kind"], row["attempts"]) == ("failed", "bad_response", 3)
    assert row["text"] == "half an answer"
    assert row["output"] is None


def test_an_error_in_the_middle_of_a_stream_is_that_error(answers):
    half = [delta("half")]
    script = {
        "passing": [stream([*half, error_body(503)], end="done"), GOOD],
        "event": [stream([*half, 'event: error\ndata: {"message": "overloaded"}\n\n']), GOOD],
        "lasting": [stream([*half, error_body(400, "context_length_exceeded")], end="done"), GOOD],
    }
    done, found = answers(script)
    assert done.code == 1
    assert found["passing"]["text"] == found["event"]["text"] == "good"
    assert (found["lasting"]["status"], found["lasting"]["attempts"]) == ("failed", 1)
    assert found["lasting"]["error_kind"] == "context_overflow"


def test_the_forms_that_event_streams_may_have_are_all_read(answers):
    first = '{"choices":[{"index":0,"delta":{"role":"assistant","content":"grün "}}]}'
    second = '{"choices":[{"index":0,"delta":{"content":"\U0001f33f"},"finish_reason":"stop"}]}'
    chunks = [delta("grün "), delta("\U0001f33f", "stop"), usage_chunk(5, 2)]
    script = {
        "crlf": [stream([f"data: {first}\r\n\r\ndata: {second}\r\n\r\n"])],
        "no-blank": [stream([f"data:{first}\n\ndata:{second}\n\n"])],
        "comments": [stream([f": ping\n\ndata: {first}\n\n: ping\n\ndata: {second}\n\n"])],
        "named": [
            stream([f"id: 1\nevent: message\nretry: 10\ndata: {first}\n\ndata: {second}\n\n"])
        ],
        "mark": [stream([f"\ufeffdata: {first}\n\ndata: {second}\n\n"])],
        "two-lines": [stream([f"data: {first[:12]}\ndata: {first[12:]}\n\ndata: {second}\n\n"])],
        "bytes": [stream(chunks, split=1)],
        "three-bytes": [stream(chunks, split=3)],
        "at-once": [stream([f"data: {first}\n\ndata: {second}\n\n"])],
    }
    done, found = answers(script)
    assert done.code == 0, done.err
    expected = dict.fromkeys(script, "grün \U0001f33f")
    assert {name: row["text"] for name, row in found.items()} == expected
    assert {row["attempts"] for row in found.values()} == {1}


def test_a_whole_answer_in_place_of_a_stream_is_read_too(fs, answers):
    choice = {"index": 0, "message": {"content": "good"}, "finish_reason": "stop"}
    done, found = answers({"r1": [status(200, {"choices": [choice]})]})
    assert done.code == 0, done.err
    assert (found["r1"]["text"], found["r1"]["attempts"]) == ("good", 1)


def test_a_stream_in_place_of_a_whole_answer_is_read_too(answers):
    chunks = [delta("go"), delta("od", "stop"), usage_chunk(5, 2)]
    done, found = answers({"r1": [stream(chunks)]}, stream=False)
    assert done.code == 0, done.err
    assert (found["r1"]["text"], found["r1"]["completion_tokens"]) == ("good", 2)


def test_a_stream_that_stalls_is_given_up_and_sent_again(answers):
    stalled = [delta("half"), ": waiting\n\n", ": waiting\n\n"]
    limits = {"retries": 1, "timeout": {"idle": "1s", "total": "30s"}}
    script = {
        "stalls": [stream(stalled, gap=3), GOOD],
        "slow": [stream([delta(f"{n} ") for n in range(4)] + [delta("", "stop")], gap=0.4)],
    }
    done, found = answers(script, limits=limits)
    assert done.code == 0, done.err
    assert (found["stalls"]["text"], found["stalls"]["attempts"]) == ("good", 2)
    assert (found["slow"]["text"], found["slow"]["attempts"]) == ("0 1 2 3 ", 1)


def test_thinking_in_a_stream_is_kept_apart_from_the_answer(answers):
    chunks = [
        delta(None, reasoning="let me "),
        delta(None, reasoning="think"),
        delta("good", "stop"),
    ]
    older = [delta(None, reasoning_content="let me think"), delta("good", "stop")]
    done, found = answers({"new": [stream(chunks)], "old": [stream(older)]})
    assert done.code == 0, done.err
    for row in found.values():
        assert (row["text"], row["reasoning"]) == ("good", "let me think")


def test_the_time_to_the_first_token_is_known_for_streamed_answers_only(fs, answers):
    _, found = answers({"r1": [ok("good", delay=0.3)]})
    assert found["r1"]["ttft_ms"] >= 250
    _, found = answers({"r1": [GOOD]}, stream=False, name="other")
    assert found["r1"]["ttft_ms"] is None
