"""When a server wants to be asked again."""

from __future__ import annotations

import asyncio
from email.utils import formatdate

import msgspec
import pytest
from multidict import CIMultiDict

from bagent.backend_kinds import LIMITS
from bagent.backends.base import Exchange
from bagent.backends.http.rate_limit_headers import DAY, MINUTE, Allowance, read_rate_limits
from bagent.backends.http.retry_after import retry_after, retry_after_in_text
from bagent.backends.registry import unsupported_settings
from support.provider_calls import PROVIDERS, QUICK, Provider, call
from support.provider_protocols import ModelAnswer
from support.provider_server import Fault, serve

NOW = 1_700_000_000.0


def http_date(offset: float) -> str:
    return formatdate(NOW + offset, usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": " 2.5 "}, 2.5),
        ({"Retry-After": ".5"}, 0.5),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
        ({"retry-after-ms": "soon", "Retry-After": "9"}, 9.0),
        ({"retry-after-ms": "0", "Retry-After": "9"}, 9.0),
        ({"Retry-After": "Wednesday, 15-Nov-23 00:00:00 GMT"}, 6400.0),
        ({"Retry-After": "2023-11-14T23:13:25+01:00"}, 5.0),
        ({"Retry-After": "3s"}, 3.0),
        ({"Retry-After": "1m30s"}, 90.0),
        ({"Retry-After": "5, 10"}, 10.0),
        ({"RETRY_AFTER": "4"}, 4.0),
        ({"x-retry-after": "4"}, 4.0),
        ({"x-ms-retry-after-ms": "700"}, 0.7),
        ({"x-ratelimit-reset-after": "1.25"}, 1.25),
        ({"RateLimit": "limit=10, remaining=0, reset=7"}, 7.0),
        ({"RateLimit": '"a";r=0;t=7, "b";r=0;t=9, "c";r=5;t=60'}, 9.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1s"}, 1.0),
        ({"X-RateLimit-Remaining-Tokens": "0", "X-RateLimit-Reset-Tokens": "1h2m3.5s"}, 3723.5),
        ({"RateLimit-Remaining": "0", "RateLimit-Reset": "17"}, 17.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW + 20))}, 20.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(NOW + 20) * 1000)}, 20.0),
        ({"anthropic-ratelimit-requests-remaining": "0",
          "anthropic-ratelimit-requests-reset": "2023-11-14T22:13:40Z"}, 20.0),
        # garbage, zero and the past count as not named
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Thu, 01 Jan 1999 00:00:00 GMT"}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "-1"}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "5 parsecs"}, None),
    ],
)  # fmt: skip
def test_seconds_milliseconds_and_dates_are_read(headers, seconds):
    assert retry_after(headers, NOW) == (seconds and pytest.approx(seconds))


def test_a_date_is_counted_from_the_servers_own_clock_where_the_two_differ():
    behind = {"Retry-After": http_date(-297), "Date": http_date(-300)}
    ahead = {"Retry-After": http_date(303), "Date": http_date(300)}
    assert retry_after(behind, NOW) == pytest.approx(3)
    assert retry_after(ahead, NOW) == pytest.approx(3)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("Rate limit reached. Please try again in 6m0s. Visit https://x", 360.0),
        ("Please retry after 26 seconds.", 26.0),
        ("Please retry in 34.074824224s.", 34.074824224),
        ("Please try again later.", None),
        ("try again in 0s", None),
    ],
)
def test_a_wait_in_the_servers_words_is_read(words, seconds):
    assert retry_after_in_text(words) == seconds


OPENAI = {
    "x-ratelimit-limit-requests": "500", "x-ratelimit-limit-tokens": "30000",
    "x-ratelimit-remaining-requests": "499", "x-ratelimit-remaining-tokens": "25000",
    "x-ratelimit-reset-requests": "120ms", "x-ratelimit-reset-tokens": "10s",
}  # fmt: skip
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
}


def read(headers):
    return read_rate_limits(CIMultiDict(headers), NOW)


def test_openais_limits_are_of_requests_and_of_all_tokens():
    found = read(OPENAI)
    assert found.at == NOW
    assert (found.requests.limit, found.requests.remaining) == (500, 499)
    assert found.requests.reset == pytest.approx(0.12)
    assert (found.tokens.limit, found.tokens.remaining, found.tokens.reset) == (30000, 25000, 10)
    assert found.requests.period == found.tokens.period == MINUTE
    assert found.input is found.output is None


def test_anthropics_limits_are_of_requests_prompts_and_answers():
    found = read(ANTHROPIC)
    assert (found.requests.limit, found.requests.remaining) == (50, 40)
    assert found.requests.reset == pytest.approx(12, abs=0.01)
    assert (found.input.limit, found.input.remaining, found.input.reset) == (30000, 30000, 0)
    assert (found.output.limit, found.output.remaining) == (8000, 2000)
    assert found.requests.is_bucket(MINUTE)
    assert found.input.is_bucket(MINUTE)
    assert found.output.is_bucket(MINUTE)
    assert found.tokens is None, "whatever is scarcest stands there, under one name"


@pytest.mark.parametrize(("limit", "left"), [("-1", "0"), ("0", "0"), ("many", "1"), ("5", "7")])
def test_numbers_that_can_be_no_limit_are_left_out(limit, left):
    headers = {"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": left}
    assert read(headers) is None
    found = read({**OPENAI, **headers})
    assert found.requests is None
    assert found.tokens is not None


@pytest.mark.parametrize(
    ("limit", "left", "reset", "period"),
    [
        (500, 499, 0.12, MINUTE), (14_400, 14_370, 180.0, DAY), (10_000, 9_999, 8.64, DAY),
        (10_000, 9_999, 0.006, MINUTE), (100, 90, 42.0, None), (1000, 900, 3000.0, None),
        (100, 50, None, MINUTE),
    ],
    ids=["bucket", "day", "first-of-a-day", "fast", "window", "window-of-an-hour", "untold"],
)  # fmt: skip
def test_the_period_of_a_limit_is_seen_by_how_it_fills(limit, left, reset, period):
    assert Allowance(limit, left, reset).period == period


LIMIT_HEADERS = {"openai": OPENAI, "anthropic": ANTHROPIC}


def exchanges(
    provider: Provider, *script: ModelAnswer | Fault, own: bool = False, stream: bool = False
) -> list[Exchange]:
    """Two calls to a server that tells limits with every answer; ``own``: called an own engine."""

    async def main() -> list[Exchange]:
        async with serve(provider.wire(), *script) as server:
            server.response_headers = LIMIT_HEADERS.get(provider.kind, {})
            backend = provider.backend(server.url)
            to = msgspec.structs.replace(provider.endpoint(server.url), own=own)
            found = [await backend.send(to, [call(stream=stream)], QUICK) for _ in range(2)]
            await backend.close()
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.kind)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_brings_the_accounts_limits(provider: Provider, stream: bool) -> None:
    found = exchanges(provider, ModelAnswer(), stream=stream)[0].limits
    if LIMITS in unsupported_settings(provider.kind).not_reported:
        assert found is None, "it tells none: the fleet finds its pace by refusals"
        return
    expected = {"openai": (500, 499), "anthropic": (50, 40)}[provider.kind]
    assert (found.requests.limit, found.requests.remaining) == expected


def test_an_engine_of_ones_own_is_looked_at_only_once_it_has_refused() -> None:
    provider = PROVIDERS[0]
    assert [one.limits for one in exchanges(provider, ModelAnswer(), own=True)] == [None, None]
    after = exchanges(provider, Fault("throttled"), ModelAnswer(), own=True)
    assert [one.limits is not None for one in after] == [True, True]
