"""One line of an answer file, in every shape that servers write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagent.batches.openai_service import read_batch, read_line
from bagent.batches.service import number_of
from bagent.types import Failure, Reply
from support.batch_services import chat_body


def line(response: Any, error: Any = None) -> bytes:
    return json.dumps(
        {"id": "r", "custom_id": "a-1", "response": response, "error": error}
    ).encode()


def test_a_success_is_a_reply() -> None:
    name, reply = read_line(line({"status_code": 200, "body": chat_body("hi")}))
    assert name == "a-1"
    assert isinstance(reply, Reply)
    assert (reply.text, reply.finish_reason, reply.usage.prompt) == ("hi", "stop", 7)


@pytest.mark.parametrize(
    ("response", "error", "kind", "passing", "words"),
    [
        ({"status_code": 400, "body": {"error": {"message": "bad"}}}, None,
         "rejected", False, "bad"),
        ({"status_code": 200, "body": {"error": {"message": "down", "code": 503}}}, None,
         "overloaded", True, "down"),
        ({"status_code": 200, "body": chat_body("hi")}, {"code": "x", "message": "odd"},
         "overloaded", True, "odd"),
        ({"status_code": 200, "body": None}, None, "bad_response", True, "no choices"),
        ({"status_code": 429, "body": {"error": {"message": "slow down"}}}, None,
         "rate_limited", True, "slow down"),
        ({"status_code": 404, "request_id": "vllm-1"}, {"message": "no model", "code": 404},
         "rejected", False, "no model"),
        ({"status_code": 500, "request_id": "vllm-1", "body": None}, "engine died",
         "overloaded", True, "engine died"),
        (None, {"code": "batch_expired", "message": "too late"}, "timeout", True, "expired"),
        (None, {"code": "batch_cancelled", "message": "stopped"}, "timeout", True, "cancelled"),
        (None, None, "bad_response", True, "neither"),
    ],
)  # fmt: skip
def test_failures_are_told_apart(
    response: Any, error: Any, kind: str, passing: bool, words: str
) -> None:
    _, failure = read_line(line(response, error))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing) == (kind, passing)
    assert words in failure.message


def test_lone_surrogates_come_through() -> None:
    raw = line({"status_code": 200, "body": chat_body("half \ud83d")})
    _, reply = read_line(raw)
    assert isinstance(reply, Reply)
    assert reply.text == "half \ud83d"


@pytest.mark.parametrize("raw", [b"{", b"[]", b"{}", b'{"custom_id": 3}', b"null"])
def test_what_is_no_line_is_said(raw: bytes) -> None:
    with pytest.raises(ValueError):
        read_line(raw)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("b0-all-1-7", 7), ("00000000012", 12), ("b0-all-2-7", None), ("b0-all-1-x", None),
        ("", None),
    ],
)  # fmt: skip
def test_names_of_requests_are_numbers_of_one_batch(name: str, number: int | None) -> None:
    assert number_of(name, "b0-all-1") == number


def test_a_batch_object_without_a_status_is_no_batch() -> None:
    assert isinstance(read_batch({"id": "batch_1"}), Failure)
    look = read_batch({"status": "failed", "errors": None})
    assert not isinstance(look, Failure)
    assert look.over
    assert look.faults[0].line is None
