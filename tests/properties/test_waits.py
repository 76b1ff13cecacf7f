"""Durations and the waits that servers name."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagent.backends.http.rate_limit_headers import read_rate_limits
from bagent.backends.http.retry_after import retry_after, retry_after_in_text
from bagent.text.durations import parse_duration, time_by
from support.strategies import texts_of

NOW = 1_700_000_000.0
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
VALUES = texts_of(
    *"0123456789.-+:,;= ", *UNITS, "ſ", "e5", "inf", "nan", "9" * 400, "secs", "minutes",
    "Wed, 15 Nov 2023 00:00:00 GMT", "2023-11-14T22:13:25Z", "+23:59", "0001-01-01T00:00:00",
    "9999-12-31T23:59:59", "remaining=0", "reset=", ";r=0;t=", "T", "Z", "GMT", "٣",
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "Retry-After", "RETRY_AFTER", "retry-after-ms", "x-ms-retry-after-ms", "x-retry-after",
        "x-ratelimit-reset-after", "RateLimit", "Date",
        "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "anthropic-ratelimit-input-tokens-limit", "anthropic-ratelimit-input-tokens-remaining",
        "anthropic-ratelimit-input-tokens-reset",
    ]
)  # fmt: skip


@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"Retry-After": "5ſ"})
@example({"RateLimit": "limit=1, remaining=0, reset=" + "9" * 400})
def test_whatever_headers_say_a_wait_is_a_finite_time_to_come(headers):
    seconds = retry_after(headers, NOW)
    assert seconds is None or 0 < seconds < math.inf
    limits = read_rate_limits(headers, NOW)
    for allowance in (limits.requests, limits.tokens, limits.input) if limits else ():
        assert allowance is None or 0 <= allowance.remaining <= allowance.limit < math.inf
        assert allowance is None or allowance.reset is None or 0 <= allowance.reset < math.inf


@given(st.sampled_from(["try again in ", "Retry after ", "wait for "]), VALUES, st.text(max_size=5))
def test_whatever_a_message_says_a_wait_is_a_finite_time_to_come(before, value, after):
    seconds = retry_after_in_text(before + value + after)
    assert seconds is None or 0 < seconds < math.inf


@given(st.integers(1, 10**8), st.sampled_from(["http", "iso", "seconds"]))
def test_a_time_to_come_is_read_in_each_form(seconds, form):
    when = datetime.fromtimestamp(NOW, UTC) + timedelta(seconds=seconds)
    forms = {
        "http": format_datetime(when, usegmt=True),
        "iso": when.isoformat(),
        "seconds": str(seconds),
    }
    assert retry_after({"Retry-After": forms[form]}, NOW) == pytest.approx(seconds)


@given(VALUES, st.booleans())
@example("5ſ", False)
def test_any_text_is_a_duration_or_a_value_error(text, long_units):
    try:
        seconds = parse_duration(text, long_units=long_units)
    except ValueError:
        return
    assert 0 <= seconds < math.inf


@given(VALUES)
def test_any_text_is_a_time_to_come_or_a_value_error(text):
    try:
        at = time_by(text, NOW)
    except ValueError:
        return
    assert NOW < at < math.inf


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(UNITS))), min_size=1))
def test_a_duration_is_the_sum_of_its_parts(parts):
    expected = sum(amount * UNITS[unit] for amount, unit in parts)
    for text in ("".join(f"{n}{u}" for n, u in parts), " ".join(f"{n} {u}" for n, u in parts)):
        assert parse_duration(text) == pytest.approx(expected)
