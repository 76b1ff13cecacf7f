"""Bad HTTP answers as failures by kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagent.backends.failures import failure_from_body, failure_from_status, find_error


def status(code, body, headers=None):
    text = body if isinstance(body, str) else json.dumps(body)
    return failure_from_status(code, text, headers or {})


def openai(message, kind="invalid_request_error", code=None, param=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def typed(message, kind):
    return {"error": {"message": message, "type": kind}}


PASSING = {"overloaded", "rate_limited", "timeout"}

OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, your request has 5000 input"
    " tokens. Please reduce the length of the input messages."
)


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        # OpenAI
        (400, openai(OVERFLOW, code="context_length_exceeded"), "context_overflow"),
        (400, openai("Invalid value", param="temperature"), "rejected"),
        (401, openai("Incorrect API key provided: sk-1", code="invalid_api_key"), "auth"),
        (403, openai("Country not supported"), "auth"),
        (429, openai("Rate limit reached", "tokens", "rate_limit_exceeded"), "rate_limited"),
        (429, openai("Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested"
                     " 43000. The input or output tokens must be reduced in order to run"
                     " successfully.", "tokens", "rate_limit_exceeded"), "rejected"),
        (400, openai("The response was filtered due to Azure OpenAI's content management policy.",
                     code="content_filter"), "refused"),
        # vLLM
        (503, {"error": {"message": "The engine is currently busy and cannot accept new requests.",
                         "type": "Service Unavailable", "code": 503}}, "overloaded"),
        (501, {"error": {"message": "not supported", "type": "NotImplementedError"}}, "rejected"),
        # SGLang and Dynamo: flat
        (400, {"object": "error", "message": "The input (5000 tokens) is longer than the model's"
               " context length (4096 tokens).", "type": "BadRequestError", "code": 400},
         "context_overflow"),
        (404, {"message": "Model not found: x", "type": "Not Found", "code": 404}, "rejected"),
        (500, {"error": "Failed to generate completions"}, "overloaded"),
        # Anthropic
        (529, typed("Overloaded", "overloaded_error"), "overloaded"),
        (400, typed("prompt is too long: 210000 tokens > 200000 maximum", "invalid_request_error"),
         "context_overflow"),
        # FastAPI
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, "rejected"),
        # Google's compatible API answers a list
        (400, [{"error": {"code": 400, "message": "Invalid JSON payload",
                          "status": "INVALID_ARGUMENT"}}], "rejected"),
        # gateways
        (502, "<html><body><h1>502 Bad Gateway</h1></body></html>", "overloaded"),
        (524, "", "overloaded"),
        (409, "", "overloaded"),
        (425, "", "overloaded"),
        (408, "", "timeout"),
        (499, "", "timeout"),
        (504, "<html>timeout</html>", "timeout"),
        (407, "", "auth"),
        (418, "short and stout", "rejected"),
        # a prompt that is too long, in other words
        (400, openai("The input token count (1200000) exceeds the maximum number of tokens allowed"
                     " (1048575)."), "context_overflow"),
        (400, openai("This model's maximum prompt length is 131072 but the request contains 140000"
                     " tokens."), "context_overflow"),
        (400, openai("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096."),
         "context_overflow"),
        (400, openai("litellm.ContextWindowExceededError: BadRequestError"), "context_overflow"),
        (400, openai("Please reduce the length of the messages or completion."),
         "context_overflow"),
        (400, openai("max_new_tokens must be a number"), "rejected"),
        (400, openai("the length of stop exceeds 4"), "rejected"),
        # spent money
        (402, "", "budget"),
        (429, openai("You exceeded your current quota", "x", "insufficient_quota"), "budget"),
        (429, typed("You have run out of credits. Please top up.", ""), "budget"),
        (429, typed("Your prepaid credits have been depleted.", ""), "budget"),
        (429, typed("Monthly spend limit reached for your organization.", ""), "budget"),
        (429, typed("Your organization has exceeded its monthly usage limit.", ""), "budget"),
        (429, typed("Budget has been exceeded! Current cost: 12, Max budget: 10", ""), "budget"),
        (429, typed("quota", "insufficient_quota"), "budget"),
        (403, openai("Key limit exceeded (total limit)"), "budget"),
        (403, typed("Your trial credits have expired, billing must be enabled", ""), "budget"),
        (403, typed("Out of call volume quota. Quota will be replenished in 12:34.", ""), "budget"),
        (400, typed("Your credit balance is too low to access the Anthropic API.", ""), "budget"),
        (400, typed("Billing hard limit has been reached", "billing_limit_user_error"), "budget"),
        (400, typed("This request would exceed your organization's monthly spend limit.", ""),
         "budget"),
        (400, typed("x", "billing_error"), "budget"),
        # a limit of a minute
        (429, typed("This request would exceed your organization's rate limit of 10 input tokens"
                    " per minute", ""), "rate_limited"),
        (429, typed("Too many requests. See the billing page for higher limits.", ""),
         "rate_limited"),
        (429, typed("Rate limit reached: total usage of tokens is 31000 of 30000", ""),
         "rate_limited"),
        # a refusal that repeats the user's words
        (400, typed("messages.0: 'billing_error' is no role", "invalid"), "rejected"),
        (400, typed("stop: your credit balance is no string", "invalid"), "rejected"),
    ],
)  # fmt: skip
def test_each_servers_errors_are_classified(code, body, kind):
    failure = status(code, body)
    assert (failure.kind, failure.passing) == (kind, kind in PASSING)
    assert failure.status == code
    assert failure.message.startswith(f"HTTP {code}: ")


QUOTA = "You exceeded your current quota, please check your plan and billing details."
IN_WORDS = openai("Rate limit reached. Please try again in 6m0s.")


@pytest.mark.parametrize(
    ("code", "body", "headers", "kind", "wait", "busy"),
    [
        (429, IN_WORDS, {}, "rate_limited", 360.0, True),
        (429, IN_WORDS, {"Retry-After": "2"}, "rate_limited", 2.0, True),
        (500, IN_WORDS, {}, "overloaded", None, False),
        # a limit per minute is called a quota too, but passes at a time
        (429, [{"error": {"message": f"{QUOTA} Retry in 3s."}}], {}, "rate_limited", 3.0, True),
        (429, openai(QUOTA, "insufficient_quota"), {"Retry-After": "1"}, "budget", None, False),
        # a full server is told from a broken one
        (529, "", {}, "overloaded", None, True),
        (503, "", {"Retry-After": "4"}, "overloaded", 4.0, True),
        (503, openai("The request queue is full."), {}, "overloaded", None, True),
        (503, openai("Please try again later or elsewhere."), {}, "overloaded", None, True),
        (503, "", {}, "overloaded", None, False),
        (500, openai("overloaded"), {}, "overloaded", None, False),
    ],
)
def test_a_wait_that_the_server_names_and_whether_it_is_full(code, body, headers, kind, wait, busy):
    failure = status(code, body, headers)
    assert (failure.kind, failure.passing) == (kind, kind in PASSING)
    assert (failure.retry_after, failure.busy) == (wait, busy)


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
    ("body", "status_code", "kind"),
    [
        ({"error": {"code": 502, "message": "upstream"}}, 502, "overloaded"),
        ({"error": {"code": "401", "message": "who?"}}, 401, "auth"),
        ({"error": {"code": "rate_limit_exceeded", "message": "slow"}}, 429, "rate_limited"),
        ({"error": {"type": "rate_limit_error", "message": "slow"}}, 429, "rate_limited"),
        ({"error": "Too many requests"}, 429, "rate_limited"),
        ({"error": {"status": "RESOURCE_EXHAUSTED", "message": "q"}}, 429, "rate_limited"),
        ({"error": {"code": "insufficient_quota", "message": "q"}}, 429, "budget"),
        ({"error": {"code": "context_length_exceeded", "message": OVERFLOW}}, 400,
         "context_overflow"),
        ({"error": {"type": "BadRequestError", "message": "no"}}, 400, "rejected"),
        ({"error": {"code": "invalid_api_key", "message": "no"}}, 401, "auth"),
        ({"error": {"type": "permission_error", "message": "no"}}, 403, "auth"),
        ({"error": {"type": "not_found_error", "message": "no"}}, 404, "rejected"),
        ({"error": {"type": "timeout_error", "message": "late"}}, 504, "timeout"),
        ({"error": {"type": "overloaded_error", "message": "Overloaded"}}, 503, "overloaded"),
        ({"error": {"code": "content_filter", "message": "no"}}, 400, "refused"),
        ({"error": {"code": 1302, "message": "odd"}}, 502, "overloaded"),
        ({"error": True}, 502, "overloaded"),
        ({"error": {}}, 502, "overloaded"),
        ({"object": "error", "message": "gone", "code": 500}, 500, "overloaded"),
        ({"detail": "starting"}, 502, "overloaded"),
        ([{"error": {"code": 503, "message": "busy"}}], 503, "overloaded"),
        ({"error": {"code": 429, "error": {"message": "x"}}}, 429, "rate_limited"),
        ({"response": {"error": {"code": 400, "message": "x"}}}, 400, "rejected"),
    ],
)  # fmt: skip
def test_an_error_behind_200_counts_as_the_status_that_it_names(body, status_code, kind):
    failure = failure_from_body(body, {})
    assert (failure.kind, failure.passing) == (kind, kind in PASSING)
    assert failure.status == status_code
    assert failure.message.startswith("error behind HTTP 200: ")


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "error": None}, {"choices": [], "error": {}},
        {"choices": [], "error": "", "message": "hello"}, {"data": []}, [], [1], None,
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
    ("code", "body", "advice", "passing"),
    [
        (500, openai("words"), "false", False),
        (400, openai("words"), "true", True),
        (401, openai("words"), "true", False),
        (429, openai("words", code="insufficient_quota"), "true", False),
    ],
)
def test_the_servers_advice_goes_before_the_status_of_what_it_can_know(code, body, advice, passing):
    assert status(code, body, {"x-should-retry": advice}).passing is passing


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
        # words for people, whatever the body is
        (400, "   \n ", "rejected", "no text"),
        (400, "<h1>gateway</h1>", "rejected", "<h1>gateway</h1>"),
        (400, "\ufeff" + json.dumps({"error": "told"}), "rejected", "told"),
        (400, {"error": {"detail": "told"}}, "rejected", "told"),
        (400, {"error": {"message": {"en": "told"}}}, "rejected", '{"en":"told"}'),
        (400, {"error": {}}, "rejected", "{}"),
        (400, {"errors": [{"code": 10000, "message": "told"}]}, "rejected", "told"),
        (400, '"told"', "rejected", '"told"'),
        (400, '{"error":' * 5000, "rejected", ('{"error":' * 500)[:499] + "…"),
    ],
)
def test_an_error_is_found_wherever_a_gateway_puts_it(
    code: int, body: Any, kind: str, words: str
) -> None:
    found = status(code, body)
    assert (found.kind, found.message) == (kind, f"HTTP {code}: {words}")
