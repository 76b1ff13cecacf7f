"""Answers with HTTP status 200 that are none, or not quite what the protocol says."""

from __future__ import annotations

import msgspec
import pytest

from support.cli import run_bagent
from support.jobs import results_by_id, write_job
from support.replies import (
    ABSENT,
    error_body,
    ok,
    ok_reasoning,
    ok_tools,
    raw,
    refused,
    status,
    stream,
    tool_call,
    usage_chunk,
)
from support.run_outcomes import NO_TABLES, RUN, run_rows, statuses

GOOD = ok("good")
QUICK = {"retries": 3, "concurrency": 50}


@pytest.fixture
def answers(fs, job_dir):
    """Runs one row for each list of replies; returns the end and the result rows by name."""

    def run(script, **keys):
        fs.set_script(script)
        rows = [{"id": name, "text": "x"} for name in script]
        write_job(job_dir, fs.url, rows, **{"results": NO_TABLES, "limits": QUICK} | keys)
        return run_rows(job_dir)

    return run


def body(**keys):
    """A whole answer, less or with what ``keys`` say."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "good"}}
    return status(200, {"model": "m", "choices": [choice | {"finish_reason": "stop"}]} | keys)


def test_errors_behind_status_200_are_sent_again_when_they_may_pass(fs, answers):
    passing = {
        "gateway": [
            status(200, {"error": {"code": 502, "message": "upstream"}}),
            raw("<h1>gateway</h1>", "text/html"),
        ],
        "number-as-text": [status(200, {"error": {"code": "503", "message": "busy"}})],
        "word": [status(200, {"error": {"code": "rate_limit_exceeded", "message": "slow"}})],
        "text": [status(200, {"error": "upstream connect error"})],
        "in-the-choice": [
            body(choices=[{"index": 0, "error": {"code": 502, "message": "x"}, "message": {}}])
        ],
        "no-choices": [body(choices=None)],
        "empty-choices": [body(choices=[])],
        "empty-body": [raw("")],
        "half-a-body": [raw('{"choices": [{"message": {"content": "go')],
        "array": [raw("[]")],
        "nothing": [raw("null")],
    }
    done, found = answers({name: [*bad, GOOD] for name, bad in passing.items()})
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert {name: row["attempts"] for name, row in found.items()} == {
        name: len(bad) + 1 for name, bad in passing.items()
    }


def test_errors_behind_status_200_that_last_are_sent_once(fs, answers):
    lasting = {
        "code": status(200, {"error": {"code": 400, "message": "no such thing"}}),
        "type": status(200, {"error": {"type": "invalid_request_error", "message": "wrong"}}),
        "key": status(200, error_body(401, "bad key")),
        "flat": status(200, {"object": "error", "message": "wrong", "code": 400}),
    }
    done, found = answers({name: [reply, GOOD] for name, reply in lasting.items()})
    assert done.code == 1
    assert set(statuses(found).values()) == {"failed"}
    assert all(fs.count(name) == 1 for name in lasting)
    assert found["key"]["error_kind"] == "auth"
    assert "no such thing" in found["code"]["error"]


def test_what_stood_behind_status_200_is_kept_for_people(answers):
    page = "<h1>Bad gateway</h1>" + "x" * 5000
    done, found = answers({"r1": [raw(page, "text/html")]}, limits={"retries": 1})
    assert done.code == 1
    assert found["r1"]["error_kind"] == "bad_response"
    assert "<h1>Bad gateway</h1>" in found["r1"]["error"]
    assert len(found["r1"]["error"]) < 400
    assert found["r1"]["attempts"] == 2


def test_an_error_of_null_beside_good_choices_is_no_error(answers):
    done, found = answers({"a": [body(error=None)], "b": [body(error={})], "c": [body()]})
    assert done.code == 0, done.err
    assert {row["attempts"] for row in found.values()} == {1}


def test_token_counts_that_are_missing_are_unknown_and_not_zero(fs, job_dir, bagent):
    fs.set_script(
        {
            "null": [ok("a", usage=None)],
            "half": [ok("b", usage={"prompt_tokens": 5, "completion_tokens": None})],
            "absent": [ok("c", usage=ABSENT)],
            "odd": [ok("d", usage={"prompt_tokens": "7", "completion_tokens": -1})],
            "whole": [ok("e", usage={"prompt_tokens": 10, "completion_tokens": 20})],
        }
    )
    rows = [{"id": name, "text": ""} for name in ("null", "half", "absent", "odd", "whole")]
    write_job(job_dir, fs.url, rows, results=NO_TABLES, stream=False)
    done = bagent(RUN)
    assert done.code == 0, done.err
    found = results_by_id(job_dir)
    counts = {n: (r["prompt_tokens"], r["completion_tokens"]) for n, r in found.items()}
    assert counts["null"] == counts["absent"] == (None, None)
    assert counts["half"] == (5, None)
    assert counts["whole"] == (10, 20)
    tokens = next(line for line in done.err.splitlines() if line.startswith("tokens"))
    assert "15 prompt" in tokens
    assert "20 completion" in tokens
    assert "4 answers without full counts" in tokens


def test_a_streamed_answer_gets_its_counts_from_the_last_chunk(fs, answers):
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "go"}}]},
        {"choices": [{"index": 0, "delta": {"content": "od"}, "finish_reason": "stop"}]},
    ]
    script = {
        "last": [stream([*chunks, usage_chunk(5, 3)])],
        "null": [stream([*chunks, {"choices": [], "usage": None}])],
        "none": [stream(chunks)],
    }
    done, found = answers(script, stream=True)
    assert done.code == 0, done.err
    assert all(seen.body["stream_options"] == {"include_usage": True} for seen in fs.requests)
    assert (found["last"]["prompt_tokens"], found["last"]["completion_tokens"]) == (5, 3)
    assert found["null"]["prompt_tokens"] is None
    assert found["none"]["prompt_tokens"] is None


@pytest.mark.parametrize("streamed", [False, True])
def test_only_a_finish_reason_of_a_good_end_is_ok(fs, answers, streamed):
    bad = ["abort", "error", None, "banana", "", "cancelled", 7]
    script = {f"bad{n}": [ok("[]", reason), GOOD] for n, reason in enumerate(bad)}
    script["length"] = [ok("half", "length")]
    script["filter"] = [ok("half", "content_filter")]
    script["refusal"] = [refused("I will not.")]
    script["end"] = [ok("good", "end_turn")]
    script["STOP"] = [ok("good", "STOP")]
    done, found = answers(script, stream=streamed)
    assert done.code == 1
    for n, reason in enumerate(bad):
        row = found[f"bad{n}"]
        assert (row["status"], row["text"], row["attempts"]) == ("ok", "good", 2), reason
    assert statuses(found)["length"] == "truncated"
    assert statuses(found)["filter"] == statuses(found)["refusal"] == "refused"
    assert "I will not." in found["refusal"]["error"]
    assert found["length"]["attempts"] == 1
    assert statuses(found)["end"] == statuses(found)["STOP"] == "ok"


def test_a_finish_reason_that_stays_bad_is_told(answers):
    done, found = answers({"r1": [ok("partial words", "abort")]}, limits={"retries": 2})
    assert done.code == 1
    row = found["r1"]
    assert (row["status"], row["error_kind"], row["attempts"]) == ("failed", "bad_response", 3)
    assert "abort" in row["error"]
    assert row["finish_reason"] == "abort"
    assert row["output"] is None


def test_a_missing_finish_reason_is_no_good_end(fs, job_dir):
    fs.set_script({"r1": [ok("[]"), GOOD]})
    answered = []

    def edit(whole, seen):
        if not answered:
            del whole["choices"][0]["finish_reason"]
        answered.append(seen)
        return whole

    fs.server.edit = edit
    write_job(job_dir, fs.url, 1, stream=False, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert (found["r1"]["text"], found["r1"]["attempts"]) == ("good", 2)


def test_text_in_unusual_places_and_forms_is_read(answers):
    parts = [{"type": "text", "text": "go"}, {"type": "text", "text": "od"}]
    script = {
        "parts": [ok(None, message={"content": parts})],
        "reasoning": [ok_reasoning("good", "let me think")],
        "older": [ok_reasoning("good", "let me think", "reasoning_content")],
        "tags": [ok("<think>let me think</think>\n\ngood")],
        "type": [raw(msgspec.json.encode(body().body), "text/plain; charset=utf-8")],
        "mark": [raw(b"\xef\xbb\xbf" + msgspec.json.encode(body().body))],
        "blanks": [raw(b"\n\n  " + msgspec.json.encode(body().body))],
    }
    done, found = answers(script, stream=False)
    assert done.code == 0, done.err
    assert {name: row["text"] for name, row in found.items()} == dict.fromkeys(script, "good")
    for name in ("reasoning", "older", "tags"):
        assert found[name]["reasoning"].strip() == "let me think"


def test_an_answer_without_text_is_not_ok(answers):
    script = {
        "null": [ok(None), GOOD],
        "blank": [ok("  \n"), GOOD],
        "thinking": [ok_reasoning("", "only thoughts"), GOOD],
        "never": [ok("")],
        "cut": [ok_reasoning("", "only thoughts", finish_reason="length")],
        "tool": [ok_tools(tool_call("search", "{}"))],
    }
    done, found = answers(script)
    assert done.code == 1
    assert (
        statuses(found)["null"] == statuses(found)["blank"] == statuses(found)["thinking"] == "ok"
    )
    assert (found["never"]["status"], found["never"]["error_kind"]) == ("failed", "empty")
    assert found["cut"]["status"] == "truncated"


def test_odd_text_in_an_answer_is_stored_as_valid_utf_8(job_dir, fs):
    script = {
        "half": [raw(rb'{"choices":[{"message":{"content":"a\ud800b"},"finish_reason":"stop"}]}')],
        "nul": [ok("a\x00b")],
        "line": [ok("a\u2028b\u0085c\r\nd")],
        "long": [ok("x" * 2_000_000)],
        "latin": [raw(b'{"choices":[{"message":{"content":"caf\xe9"},"finish_reason":"stop"}]}')],
    }
    fs.set_script(script)
    write_job(job_dir, fs.url, [{"id": name, "text": ""} for name in script], stream=False)
    done = run_bagent(RUN, job_dir)
    assert "Traceback" not in done.err
    found = results_by_id(job_dir)
    assert found["half"]["text"] == "a\\ud800b"
    assert found["nul"]["text"] == "a\x00b"
    assert found["line"]["text"] == "a\u2028b\u0085c\r\nd"
    assert len(found["long"]["text"]) == 2_000_000
    from support.jobs import parquet

    table = {row["id"]: row for row in parquet(job_dir / "runs/job")}
    assert table["half"]["text"] == "a\\ud800b"
    assert len(table["long"]["text"]) == 2_000_000
