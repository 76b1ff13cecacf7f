"""Errors as gateways and accounts put them in other words and other places."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.backends.failures import from_body_error, from_status
from bagent.types import Failure

OVERFLOW = "This model's maximum context length is 10 tokens"


def status(code: int, body: Any) -> Failure:
    return from_status(code, msgspec.json.encode(body).decode(), {})


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (429, {"error": {"error": {"message": "slow", "type": "t"}}}, "rate_limited", "slow"),
        (429, {"error": {"message": {"error": {"message": "slow"}}}}, "rate_limited", "slow"),
        (400, {"error": {"error": {"message": OVERFLOW}}}, "context_overflow", OVERFLOW),
        (400, {"message": {"error": {"message": OVERFLOW}}}, "context_overflow", OVERFLOW),
        (400, {"errors": {"message": "bad n"}}, "rejected", "bad n"),
        (400, {"Message": "bad n"}, "rejected", "bad n"),
        (400, {"error_message": "bad n", "code": 7}, "rejected", "bad n"),
        (400, {"msg": "bad n", "code": 7}, "rejected", "bad n"),
        (400, {"response": {"error": {"message": "bad n"}}}, "rejected", "bad n"),
        (400, {"body": {"error": {"message": "bad n"}}}, "rejected", "bad n"),
        (429, {"fault": {"faultstring": "slow", "detail": {"e": "x"}}}, "rate_limited", "slow"),
        (429, [{"error": {"error": {"message": "slow"}}}], "rate_limited", "slow"),
    ],
)
def test_an_error_is_found_wherever_a_gateway_puts_it(
    code: int, body: Any, kind: str, words: str
) -> None:
    found = status(code, body)
    assert (found.kind, found.message) == (kind, f"HTTP {code}: {words}")


@pytest.mark.parametrize(
    ("body", "code", "kind"),
    [
        ({"error": {"error": {"code": 503, "message": "x"}}}, 503, "overloaded"),
        ({"error": {"code": 429, "error": {"message": "x"}}}, 429, "rate_limited"),
        ({"code": 429, "msg": "slow"}, 429, "rate_limited"),
        ({"response": {"error": {"code": 400, "message": "x"}}}, 400, "rejected"),
    ],
)
def test_the_status_of_an_error_within_an_error_is_found(body: Any, code: int, kind: str) -> None:
    found = from_body_error(body, {})
    assert found is not None
    assert (found.status, found.kind) == (code, kind)


@pytest.mark.parametrize("body", [{"msg": "ok"}, {"response": {"error": None}}, {"body": {}}])
def test_a_body_that_only_looks_like_an_error_is_none(body: Any) -> None:
    assert from_body_error(body, {}) is None


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (429, "You have run out of credits. Please top up.", ""),
        (429, "Your prepaid credits have been depleted.", ""),
        (429, "Monthly spend limit reached for your organization.", ""),
        (429, "Your organization has exceeded its monthly usage limit.", ""),
        (429, "You've reached your hard limit. Please check your plan and billing details.", ""),
        (429, "Budget has been exceeded! Current cost: 12, Max budget: 10", ""),
        (429, "quota", "insufficient_quota"),
        (403, "Your trial credits have expired, billing must be enabled", ""),
        (403, "Out of call volume quota. Quota will be replenished in 12:34:56.", ""),
        (400, "Billing hard limit has been reached", "billing_limit_user_error"),
        (400, "This request would exceed your organization's monthly spend limit.", ""),
        (400, "x", "billing_error"),
    ],
)
def test_spent_money_is_known_in_many_words(code: int, message: str, kind: str) -> None:
    found = status(code, {"error": {"message": message, "type": kind}})
    assert (found.kind, found.passing) == ("budget", False)


@pytest.mark.parametrize(
    "message",
    [
        "This request would exceed your organization's rate limit of 10 input tokens per minute",
        "Number of requests has exceeded your rate limit. See the billing page for higher limits.",
        "Rate limit reached: total usage of tokens is 31000 of 30000 per minute",
        "Too many requests",
    ],
)
def test_a_limit_of_a_minute_is_no_spent_money(message: str) -> None:
    found = status(429, {"error": {"message": message, "type": "rate_limit_error"}})
    assert (found.kind, found.passing) == ("rate_limited", True)


@pytest.mark.parametrize(
    "text", ["messages.0: 'billing_error' is no role", "stop: your credit balance is no string"]
)
def test_a_refusal_that_repeats_the_users_words_is_no_spent_money(text: str) -> None:
    assert status(400, {"error": {"message": text, "type": "invalid"}}).kind == "rejected"
