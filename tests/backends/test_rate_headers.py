"""What providers say of limits in their headers, in each provider's own form."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from bagent.backends.rate_headers import DAY, MINUTE, Allowance, read_rate_limits

NOW = 1_700_000_000.0
OPENAI = {
    "x-ratelimit-limit-requests": "500",
    "x-ratelimit-limit-tokens": "30000",
    "x-ratelimit-remaining-requests": "499",
    "x-ratelimit-remaining-tokens": "25000",
    "x-ratelimit-reset-requests": "120ms",
    "x-ratelimit-reset-tokens": "10s",
}
ANTHROPIC = {
    "anthropic-ratelimit-requests-limit": "50",
    "anthropic-ratelimit-requests-remaining": "40",
    "anthropic-ratelimit-requests-reset": "2023-11-14T22:13:32Z",
    "anthropic-ratelimit-input-tokens-limit": "30000",
    "anthropic-ratelimit-input-tokens-remaining": "30000",
    "anthropic-ratelimit-input-tokens-reset": "2023-11-14T22:13:20Z",
    "anthropic-ratelimit-output-tokens-limit": "8000",
    "anthropic-ratelimit-output-tokens-remaining": "2000",
    "anthropic-ratelimit-output-tokens-reset": "2023-11-14T22:14:05Z",
    "anthropic-ratelimit-tokens-limit": "38000",
    "anthropic-ratelimit-tokens-remaining": "32000",
    "anthropic-ratelimit-tokens-reset": "2023-11-14T22:14:05Z",
}


def read(headers):
    return read_rate_limits(CIMultiDict(headers), NOW)


def test_openais_limits_are_of_requests_and_of_all_tokens():
    found = read(OPENAI)
    assert found.at == NOW
    assert (found.requests.limit, found.requests.left) == (500, 499)
    assert found.requests.reset == pytest.approx(0.12)
    assert (found.tokens.limit, found.tokens.left, found.tokens.reset) == (30000, 25000, 10)
    assert found.requests.period == found.tokens.period == MINUTE
    assert found.input is found.output is None


def test_anthropics_limits_are_of_requests_prompts_and_answers():
    found = read(ANTHROPIC)
    assert (found.requests.limit, found.requests.left) == (50, 40)
    assert found.requests.reset == pytest.approx(12, abs=0.01)
    assert (found.input.limit, found.input.left, found.input.reset) == (30000, 30000, 0)
    assert (found.output.limit, found.output.left) == (8000, 2000)
    assert found.requests.is_bucket(MINUTE)
    assert found.input.is_bucket(MINUTE)
    assert found.output.is_bucket(MINUTE)
    assert found.tokens is None, "whatever is scarcest stands there, under one name"


def test_headers_of_others_say_nothing():
    assert read({"Content-Type": "application/json", "Retry-After": "3"}) is None


@pytest.mark.parametrize(
    ("limit", "left"), [("-1", "0"), ("0", "0"), ("many", "1"), ("5", "7"), ("5", "nan"), ("", "")]
)
def test_numbers_that_can_be_no_limit_are_left_out(limit, left):
    headers = {"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": left}
    assert read(headers) is None
    found = read({**OPENAI, **headers})
    assert found.requests is None
    assert found.tokens is not None


@pytest.mark.parametrize(
    ("limit", "left", "reset", "period"),
    [
        (500, 499, 0.12, MINUTE),
        (14_400, 14_370, 180.0, DAY),
        (10_000, 9_999, 8.64, DAY),
        (10_000, 9_999, 0.006, MINUTE),
        (100, 90, 42.0, None),
        (1000, 900, 3000.0, None),
        (100, 50, None, MINUTE),
    ],
    ids=["bucket", "day", "first-of-a-day", "fast", "window", "window-of-an-hour", "untold"],
)
def test_the_period_of_a_limit_is_seen_by_how_it_fills(limit, left, reset, period):
    assert Allowance(limit, left, reset).period == period
