"""Rows through OpenAI's batches, in every state that a batch can take."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.batches.openai import OpenAIBatches, read_line
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.types import Reply
from support.batch_runs import SCHEMA, Options, assert_ok, row, run_rows, run_through, statuses
from support.batch_services import (
    Answer,
    Course,
    OpenAIServer,
    by_row,
    good,
    never_asked,
    nothing,
    refused,
)
from support.provider_calls import call
from support.provider_protocols import ModelAnswer, ResponsesWire


def test_rows_go_in_one_file_and_come_back_judged(tmp_path: Path) -> None:
    server = OpenAIServer()
    run = run_through(tmp_path, server, 5)
    assert_ok(run, 5)
    assert (server.uploads, len(server.made), server.looks) == (1, 1, 4)
    assert server.complaints == []
    assert {line["group"] for line in run.lines} == {"batch_1"}
    assert {(one["group"], one["group_size"]) for one in run.attempts} == {("batch_1", 5)}
    assert [record.state for record in run.records] == ["done"]
    assert run.files == []
    assert server.made[0]["metadata"] == {"bagent": "b0-all-1"}


def test_errors_inside_the_response_and_in_the_error_file_are_both_read(tmp_path: Path) -> None:
    answer = by_row(
        good(),
        r0=refused(400, "this prompt is not for us"),
        r1=refused(500, "internal"),
        r2=never_asked("server_error"),
        r3=refused(400, "flagged by the content filter", code="content_filter"),
    )
    server = OpenAIServer(Course(answer=answer), Course())
    run = run_through(tmp_path, server, 6)
    assert run.error is None
    assert statuses(run) | {"r0": "failed", "r3": "refused"} == statuses(run)
    assert run.outcomes["r0"]["error_kind"] == "rejected"
    assert run.outcomes["r0"]["attempts"] == 1
    assert run.outcomes["r1"]["status"] == run.outcomes["r2"]["status"] == "ok"
    assert run.outcomes["r1"]["attempts"] == 2
    assert [len(batch["lines"]) for batch in server.made] == [6, 2]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        (
            "expired",
            by_row(good(), r0=never_asked("batch_expired"), r1=never_asked("batch_expired")),
        ),
        ("cancelled", by_row(good(), r0=nothing, r1=never_asked("batch_cancelled"))),
        ("completed", by_row(good(), r0=nothing, r1=nothing)),
    ],
)
def test_rows_that_a_batch_left_out_are_taken_up_again(
    tmp_path: Path, word: str, answer: Answer
) -> None:
    server = OpenAIServer(Course(("in_progress", word), answer), Course())
    run = run_through(tmp_path, server, 4)
    assert_ok(run, 4)
    assert [len(batch["lines"]) for batch in server.made] == [4, 2]


def test_lines_that_fail_validation_fail_alone_and_the_others_are_sent_again(
    tmp_path: Path,
) -> None:
    fault = {"code": "invalid_json_line", "message": "This line is not valid", "line": 2}
    server = OpenAIServer(Course(("validating", "failed"), faults=[fault]), Course())
    run = run_through(tmp_path, server, 3)
    assert run.error is None
    assert statuses(run) == {"r0": "ok", "r1": "failed", "r2": "ok"}
    assert "This line is not valid" in run.outcomes["r1"]["error"]
    assert run.outcomes["r0"]["attempts"] == 1
    assert [len(batch["lines"]) for batch in server.made] == [3, 2]


QUOTA = {
    "code": "token_limit_exceeded",
    "message": "Enqueued token limit reached for m-1 in organization org-1. Limit: 90,000 enqueued"
    " tokens. Please try again once some in_progress batches have been completed.",
}


def test_a_full_queue_is_waited_for_and_the_file_is_not_sent_again(tmp_path: Path) -> None:
    full = Course(("validating", "failed"), faults=[QUOTA])
    server = OpenAIServer(full, full, Course())
    run = run_through(tmp_path, server, 3)
    assert_ok(run, 3)
    assert {line["attempts"] for line in run.lines} == {1}
    assert (server.uploads, len(server.made)) == (1, 3)
    assert run.waited > 120


def test_a_batch_that_is_more_than_the_quota_ever_takes_is_divided(tmp_path: Path) -> None:
    told = {**QUOTA, "message": "Enqueued token limit reached. Limit: 120 enqueued tokens."}
    server = OpenAIServer(Course(("failed",), faults=[told]), Course())
    run = run_through(tmp_path, server, 20)
    assert_ok(run, 20)
    assert len(server.made[0]["lines"]) == 20
    assert len(server.made) == 4
    assert {line["attempts"] for line in run.lines} == {1}


def test_invalid_answers_go_into_a_second_batch_with_the_validators_words(tmp_path: Path) -> None:
    answer = by_row(good('{"score": 1}'), r1=good('{"score": "high"}'))
    server = OpenAIServer(Course(answer=answer), Course(answer=good('{"score": 2}')))
    run = run_through(tmp_path, server, 3, Options(schema=SCHEMA))
    assert_ok(run, 3)
    (line,) = server.made[1]["lines"]
    words = [message["content"] for message in line["body"]["messages"]]
    assert words[0].startswith("id=r1") and "high" in words[1] and "score" in words[2]
    asked = run.outcomes["r1"]
    assert (asked["turns"], asked["attempts"], asked["first_try_valid"]) == (2, 2, False)
    assert asked["prompt_tokens"] == 14
    assert run.outcomes["r0"]["first_try_valid"] is True


def test_a_refused_parameter_name_costs_one_round_and_no_try(tmp_path: Path) -> None:
    words = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."
    server = OpenAIServer(Course(answer=refused(400, words)), Course())
    run = run_through(tmp_path, server, 3, Options(retries=0))
    assert_ok(run, 3)
    bodies = [line["body"] for line in server.made[1]["lines"]]
    assert all(body["max_completion_tokens"] == 64 and "max_tokens" not in body for body in bodies)


MADE = Course(create=(504, {"message": "gateway timeout"}), made=True)
BUSY = Course(create=(503, {"message": "later"}))
FULL = Course(create=(429, {"message": "Rate limit reached for batches"}))


@pytest.mark.parametrize(
    ("courses", "tries", "settings"),
    [
        ([MADE], 1, {}),
        ([MADE], 1, {"keeps_metadata": False}),
        ([MADE], 1, {"list_troubles": [503, 200]}),
        ([MADE], 1, {"list_troubles": [429, 503, 429]}),
        ([BUSY, FULL, Course()], 3, {}),
    ],
)
def test_a_batch_is_made_once_whatever_is_answered_to_its_creation(
    tmp_path: Path, courses: list[Course], tries: int, settings: dict[str, Any]
) -> None:
    """It is looked for in the list of batches, which may come late or not at all."""
    server = OpenAIServer(*courses)
    for name, value in settings.items():
        setattr(server, name, value)
    run = run_through(tmp_path, server, 3)
    assert_ok(run, 3)
    assert (server.tries, len(server.made), server.uploads) == (tries, 1, 1)


def test_a_provider_that_is_out_of_reach_ends_the_run_to_go_on_later(tmp_path: Path) -> None:
    run = asyncio.run(run_rows(tmp_path, "http://127.0.0.1:9", [row(0)]))
    assert isinstance(run.error, StoppedEarly)
    assert run.waited > 1800
    again = run_through(tmp_path, OpenAIServer(), 1)
    assert statuses(again) == {"r0": "ok"}


def test_rows_with_odd_text_come_through(tmp_path: Path) -> None:
    rows = [row(0, text="lone \ud83d half", number=float("nan")), row(1, text="line\nbreak \u2028")]
    server = OpenAIServer()
    run = run_through(tmp_path, server, rows)
    assert_ok(run, 2)
    words = [line["body"]["messages"][0]["content"] for line in server.made[0]["lines"]]
    assert words == ["id=r0 lone \ufffd half", "id=r1 line\nbreak \u2028"]


def test_request_bodies_for_several_models_go_in_a_batch_each(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    rows = [
        row(n, custom_id=f"c{n}", url=f"/v1/{url}", body=body)
        for n, (url, body) in enumerate(
            [("chat/completions", chat)] * 2 + [("completions", {"prompt": "once"})]
        )
    ]
    server = OpenAIServer()
    run = run_through(tmp_path, server, rows, Options(own_bodies=True))
    assert run.error is None
    assert server.complaints == []
    assert sorted(len(batch["lines"]) for batch in server.made) == [1, 2]


BILLING = {"code": "billing_hard_limit_reached", "message": "Billing hard limit has been reached"}
SPENT = refused(429, "You exceeded your current quota", code="insufficient_quota")
STOPS = {
    "a batch refused for good": (
        Course(("failed",), faults=[BILLING]), "Billing hard limit", {}, [4, 4],
    ),
    "rows that the account cannot pay": (
        Course(answer=by_row(good(), r1=SPENT, r2=SPENT)),
        "quota", {"r0": "ok", "r3": "ok"}, [4, 2],
    ),
    "a key that is refused": (
        Course(create=(401, {"message": "bad key k-secret-1"})), "bad key", {}, [4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_what_only_a_person_can_mend_stops_the_run_until_the_next_start(
    tmp_path: Path, name: str
) -> None:
    course, words, statuses_before, sizes = STOPS[name]
    server = OpenAIServer(course, Course())
    run = run_through(tmp_path, server, 4)
    assert isinstance(run.error, NeedsPerson)
    assert words in str(run.error)
    assert "k-secret-1" not in str(run.error)
    assert statuses(run) == statuses_before
    again = run_through(tmp_path, server, 4)
    assert again.error is None
    assert statuses(again) == {f"r{n}": "ok" for n in range(4)}
    assert [len(batch["lines"]) for batch in server.made] == sizes


def test_a_batch_of_responses_has_their_route_bodies_and_answers() -> None:
    service = OpenAIBatches(
        Endpoint("here", "http://127.0.0.1:1/v1"),
        None,
        own=True,
        api="responses",
        enforce="auto",
        notice=lambda _: None,
    )
    request = call(max_tokens=64)
    line = json.loads(service.line(request, service.form(request), "b0-all-1-0"))
    assert service.group(request) == "/v1/responses m-1"
    assert line["url"] == "/v1/responses"
    assert line["body"] == {
        "model": "m-1",
        "store": False,
        "input": [{"role": "user", "content": "Say hello."}],
        "max_output_tokens": 64,
    }
    body = ResponsesWire().whole(ModelAnswer())
    answer = {"custom_id": "b0-all-1-0", "response": {"status_code": 200, "body": body}}
    name, reply = read_line(json.dumps(answer).encode(), "/responses")
    assert isinstance(reply, Reply)
    assert (name, reply.text, reply.usage.completion) == ("b0-all-1-0", "hello world", 7)
