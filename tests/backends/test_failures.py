"""Bad HTTP answers as failures by kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagent.backends.failures import (
    failure_from_body,
    failure_from_status,
    find_error,
)


def status(code, body, headers=None):
    text = body if isinstance(body, str) else json.dumps(body)
    return failure_from_status(code, text, headers or {})


def openai(message, kind="invalid_request_error", code=None, param=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, your request has 5000 input"
    " tokens. Please reduce the length of the input messages."
)


@pytest.mark.parametrize(
    ("code", "body", "kind", "passing"),
    [
        # OpenAI
        (400, openai(OVERFLOW, code="context_length_exceeded"), "context_overflow", False),
        (400, openai("Invalid value", param="temperature"), "rejected", False),
        (401, openai("Incorrect API key provided: sk-1", code="invalid_api_key"), "auth", False),
        (403, openai("Country not supported"), "auth", False),
        (404, openai("The model `x` does not exist", code="model_not_found"), "rejected", False),
        (429, openai("Rate limit reached", "tokens", "rate_limit_exceeded"), "rate_limited", True),
        (429, openai("You exceeded your current quota, please check your plan and billing",
                     "insufficient_quota", "insufficient_quota"), "budget", False),
        (429, openai("Rate limit reached for x on requests per min. Please add a payment method at"
                     " https://platform.openai.com/account/billing", "requests",
                     "rate_limit_exceeded"), "rate_limited", True),
        (429, openai("Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested"
                     " 43000. The input or output tokens must be reduced in order to run"
                     " successfully.", "tokens", "rate_limit_exceeded"), "rejected", False),
        (400, openai("The response was filtered due to Azure OpenAI's content management policy.",
                     code="content_filter"), "refused", False),
        (500, openai("The server had an error", "server_error"), "overloaded", True),
        (402, {"error": {"message": "Insufficient Balance"}}, "budget", False),
        (402, "", "budget", False),
        (403, openai("Key limit exceeded (total limit)"), "budget", False),
        # vLLM
        (400, {"error": {"message": OVERFLOW, "type": "BadRequestError", "code": 400}},
         "context_overflow", False),
        (503, {"error": {"message": "The engine is currently busy and cannot accept new requests.",
                         "type": "Service Unavailable", "code": 503}}, "overloaded", True),
        (500, {"error": {"message": "EngineCore encountered an issue", "code": 500}},
         "overloaded", True),
        (501, {"error": {"message": "not supported", "type": "NotImplementedError"}},
         "rejected", False),
        # SGLang and Dynamo: flat
        (400, {"object": "error", "message": "The input (5000 tokens) is longer than the model's"
               " context length (4096 tokens).", "type": "BadRequestError", "code": 400},
         "context_overflow", False),
        (503, {"object": "error", "message": "The request queue is full.",
               "type": "service_unavailable", "code": 503}, "overloaded", True),
        (404, {"message": "Model not found: x", "type": "Not Found", "code": 404},
         "rejected", False),
        (500, {"error": "Failed to generate completions"}, "overloaded", True),
        # Anthropic
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
         "overloaded", True),
        (400, {"type": "error", "error": {"type": "invalid_request_error",
               "message": "Your credit balance is too low to access the Anthropic API."}},
         "budget", False),
        (400, {"type": "error", "error": {"type": "invalid_request_error",
               "message": "prompt is too long: 210000 tokens > 200000 maximum"}},
         "context_overflow", False),
        # FastAPI
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]},
         "rejected", False),
        (404, {"detail": "Not Found"}, "rejected", False),
        # Google's compatible API answers a list
        (400, [{"error": {"code": 400, "message": "Invalid JSON payload",
                          "status": "INVALID_ARGUMENT"}}], "rejected", False),
        # gateways
        (502, "<html><body><h1>502 Bad Gateway</h1></body></html>", "overloaded", True),
        (504, "<html>timeout</html>", "timeout", True),
        (524, "", "overloaded", True),
        (408, "", "timeout", True),
        (409, "", "overloaded", True),
        (425, "", "overloaded", True),
        (499, "", "timeout", True),
        (407, "", "auth", False),
        (413, "", "rejected", False),
        (400, {"error": {"message": "unknown parameter: timeout", "type": "BadRequestError",
               "code": 400}}, "rejected", False),
        (418, "short and stout", "rejected", False),
    ],
)  # fmt: skip
def test_each_servers_errors_are_classified(code, body, kind, passing):
    failure = status(code, body)
    assert (failure.kind, failure.passing) == (kind, passing)
    assert failure.status == code
    assert failure.message.startswith(f"HTTP {code}: ")


@pytest.mark.parametrize(
    "words",
    [
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048575).",
        "Prompt length (9000) exceeds maximum input length (8192)",
        "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
        "litellm.ContextWindowExceededError: BadRequestError",
        "the input length exceeds the context length",
        "Please reduce the length of the messages or completion.",
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_many_words(words):
    assert status(400, openai(words)).kind == "context_overflow"


@pytest.mark.parametrize(
    "words",
    ["max_new_tokens must be a number", "the length of stop exceeds 4", "input is required"],
)
def test_other_words_about_lengths_are_a_plain_refusal(words):
    assert status(400, openai(words)).kind == "rejected"


@pytest.mark.parametrize(
    ("code", "body", "headers", "busy"),
    [
        (429, "", {}, True),
        (529, "", {}, True),
        (503, "", {}, False),
        (503, "upstream connect error", {}, False),
        (503, "", {"Retry-After": "4"}, True),
        (503, openai("The request queue is full."), {}, True),
        (503, openai("The engine has reached its prefill token backlog limit."), {}, True),
        (503, openai("Please try again later or on a different instance."), {}, True),
        (500, openai("overloaded"), {}, False),
    ],
)
def test_a_full_server_is_told_from_a_broken_one(code, body, headers, busy):
    assert status(code, body, headers).busy is busy


def test_a_limit_per_minute_that_is_called_quota_passes_when_the_server_says_when():
    message = (
        "You exceeded your current quota, please check your plan and billing details."
        " Please retry in 34.07s."
    )
    failure = status(429, [{"error": {"code": 429, "message": message}}])
    assert (failure.kind, failure.passing, failure.retry_after) == ("rate_limited", True, 34.07)


def test_a_spent_quota_does_not_pass_whatever_the_headers_say():
    body = openai("You exceeded your current quota", "insufficient_quota", "insufficient_quota")
    assert status(429, body, {"Retry-After": "1"}).kind == "budget"


def test_the_wait_comes_from_headers_else_from_words():
    body = openai("Rate limit reached. Please try again in 6m0s.")
    assert status(429, body).retry_after == 360.0
    assert status(429, body, {"Retry-After": "2"}).retry_after == 2.0
    assert status(500, body).retry_after is None
    assert status(503, "", {"Retry-After": "2"}).retry_after == 2.0


def test_validation_errors_name_the_place_and_leave_out_the_input():
    body = {
        "detail": [
            {"loc": ["body", "top_k"], "msg": "Input should be a number", "input": "secret text"},
            {"loc": ["body"], "msg": "Field required", "input": {"messages": "secret text"}},
            "plain",
        ]
    }
    message = status(422, body).message
    assert message == (
        "HTTP 422: body.top_k: Input should be a number; body: Field required; plain"
    )


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("", "no text"),
        ("   \n ", "no text"),
        ("plain words", "plain words"),
        ("<h1>gateway</h1>", "<h1>gateway</h1>"),
        ("\ufeff" + json.dumps({"error": "told"}), "told"),
        (json.dumps({"error": {"detail": "told"}}), "told"),
        (json.dumps({"error": {"message": {"en": "told"}}}), '{"en":"told"}'),
        (json.dumps({"error": {"message": "lone \ud800"}}), "lone \ud800"),
        (json.dumps({"error": {}}), "{}"),
        (json.dumps({"error": ["a", "b"]}), '["a","b"]'),
        (json.dumps({"errors": [{"code": 10000, "message": "told"}]}), "told"),
        (json.dumps({"message": None}), "null"),
        (json.dumps(["told"]), '["told"]'),
        (json.dumps("told"), '"told"'),
        ("null", "null"),
        ("[" * 5000, "[" * 499 + "…"),
        ('{"error":' * 5000, ('{"error":' * 500)[:499] + "…"),
    ],
)
def test_any_body_gives_words_for_people(body, shown):
    assert status(400, body).message == f"HTTP 400: {shown}"


@pytest.mark.parametrize(
    ("body", "status_code", "kind", "passing"),
    [
        ({"error": {"code": 502, "message": "upstream"}}, 502, "overloaded", True),
        ({"error": {"code": "502", "message": "upstream"}}, 502, "overloaded", True),
        ({"error": {"code": 400, "message": "no"}}, 400, "rejected", False),
        ({"error": {"code": 429, "message": "slow down"}}, 429, "rate_limited", True),
        ({"error": {"code": 401, "message": "who?"}}, 401, "auth", False),
        ({"error": {"code": 408, "message": "late"}}, 408, "timeout", True),
        ({"error": {"code": "rate_limit_exceeded", "message": "slow"}}, 429, "rate_limited", True),
        ({"error": {"type": "rate_limit_error", "message": "slow"}}, 429, "rate_limited", True),
        ({"error": "Too many requests"}, 429, "rate_limited", True),
        ({"error": {"status": "RESOURCE_EXHAUSTED", "message": "q"}}, 429, "rate_limited", True),
        ({"error": {"code": "insufficient_quota", "message": "q"}}, 429, "budget", False),
        ({"error": {"code": "context_length_exceeded", "message": OVERFLOW}}, 400,
         "context_overflow", False),
        ({"error": {"type": "invalid_request_error", "message": "no"}}, 400, "rejected", False),
        ({"error": {"type": "BadRequestError", "message": "no"}}, 400, "rejected", False),
        ({"error": {"type": "authentication_error", "message": "no"}}, 401, "auth", False),
        ({"error": {"code": "invalid_api_key", "message": "no"}}, 401, "auth", False),
        ({"error": {"type": "permission_error", "message": "no"}}, 403, "auth", False),
        ({"error": {"type": "not_found_error", "message": "no"}}, 404, "rejected", False),
        ({"error": {"type": "timeout_error", "message": "late"}}, 504, "timeout", True),
        ({"error": {"type": "overloaded_error", "message": "Overloaded"}}, 503, "overloaded",
         True),
        ({"error": {"code": "content_filter", "message": "no"}}, 400, "refused", False),
        ({"error": {"code": 1302, "message": "odd"}}, 502, "overloaded", True),
        ({"error": {"message": "odd"}}, 502, "overloaded", True),
        ({"error": True}, 502, "overloaded", True),
        ({"error": {}}, 502, "overloaded", True),
        ({"object": "error", "message": "gone", "code": 500}, 500, "overloaded", True),
        ({"message": "forbidden", "code": "Forbidden"}, 403, "auth", False),
        ({"detail": "starting"}, 502, "overloaded", True),
        ([{"error": {"code": 503, "message": "busy"}}], 503, "overloaded", True),
        ({"error": {"error": {"code": 503, "message": "x"}}}, 503, "overloaded", True),
        ({"error": {"code": 429, "error": {"message": "x"}}}, 429, "rate_limited", True),
        ({"code": 429, "msg": "slow"}, 429, "rate_limited", True),
        ({"response": {"error": {"code": 400, "message": "x"}}}, 400, "rejected", False),
    ],
)  # fmt: skip
def test_an_error_behind_200_counts_as_the_status_that_it_names(body, status_code, kind, passing):
    failure = failure_from_body(body, {})
    assert failure is not None
    assert (failure.kind, failure.passing, failure.status) == (kind, passing, status_code)
    assert failure.message.startswith("error behind HTTP 200: ")


@pytest.mark.parametrize(
    "body",
    [
        {"choices": []}, {"choices": [], "error": None}, {"choices": [], "error": {}},
        {"choices": [], "error": ""}, {"choices": [], "message": "hello"},
        {"choices": [], "detail": "hello"}, {"data": []}, {}, [], [1], None, "x", 1,
    ],
)  # fmt: skip
def test_a_body_without_an_error_reports_none(body):
    assert find_error(body) is None
    assert failure_from_body(body, {}) is None


def test_the_wait_behind_200_comes_from_the_body_the_headers_or_the_words():
    inner = {"error": {"code": 429, "message": "q", "metadata": {"headers": {"Retry-After": "5"}}}}
    words = {"error": {"code": 429, "message": "Please try again in 7s"}}
    assert failure_from_body(inner, {"Retry-After": "9"}).retry_after == 5.0
    assert failure_from_body(words, {"Retry-After": "9"}).retry_after == 9.0
    assert failure_from_body(words, {}).retry_after == 7.0


@pytest.mark.parametrize(
    ("status", "advice", "passing"),
    [(429, "false", False), (500, "false", False), (400, "true", True), (422, "true", True)],
)
def test_the_servers_advice_goes_before_the_status(status: int, advice: str, passing: bool) -> None:
    found = failure_from_status(status, '{"error":{"message":"words"}}', {"x-should-retry": advice})
    assert found.passing is passing
    assert failure_from_status(status, '{"error":{"message":"words"}}', {}).passing is not passing


def test_no_advice_makes_a_wrong_key_right() -> None:
    assert not failure_from_status(401, "", {"x-should-retry": "true"}).passing
    spent = failure_from_status(
        429, '{"error":{"code":"insufficient_quota"}}', {"x-should-retry": "true"}
    )
    assert (spent.kind, spent.passing) == ("budget", False)


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
