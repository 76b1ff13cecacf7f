"""When to retry, from a server's headers or error message.

Sources: RFC 9110 section 10.2.3 (Retry-After); the rate-limit headers of OpenAI (``1s``, ``6m0s``),
Anthropic (RFC 3339 times), Azure (``x-ms-retry-after-ms``), gateways (Unix time in seconds or
milliseconds) and the IETF's drafts of ``RateLimit``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from bagent.text.durations import LONG_PART, parse_duration

SKEW_SECONDS = 2.0
"""A server clock that differs more is considered wrong, and its own time is used."""

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?|\.\d+", re.ASCII)
_IN_WORDS = re.compile(
    rf"(?:try again|retry(?:ing)?|wait)(?: again)? (?:in|after|for) ((?:{LONG_PART}\s*)+)",
    re.IGNORECASE | re.ASCII,
)
_IN_MILLISECONDS = ("retry-after-ms", "x-ms-retry-after-ms", "x-retry-after-ms")
_IN_SECONDS = ("retry-after", "x-retry-after", "x-ratelimit-retry-after", "x-ratelimit-reset-after")
_SPENT = re.compile(r"\bremaining=0\b.*\breset=(\d+)", re.IGNORECASE)
_SPENT_ONE = re.compile(r";\s*r=0\b.*;\s*t=(\d+)", re.IGNORECASE)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait before a retry, None if the server named no usable time.

    Reads ``retry-after-ms`` and ``Retry-After`` (seconds, fractions, durations such as ``3s``, HTTP
    dates; of several the longest) and the names that gateways use for them, else the longest reset
    of the rate limits whose remaining count is 0. Times in the past, negative numbers and garbage
    are ignored. ``now`` is Unix seconds.
    """
    named = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    for name in _IN_MILLISECONDS:
        milliseconds = _number(named.get(name, ""))
        if milliseconds is not None and milliseconds > 0:
            return milliseconds / 1000
    value = next((named[name] for name in _IN_SECONDS if name in named), None)
    if value is not None:
        return _parse_retry_after(value, _base(named.get("date"), now))
    waits = [reset_seconds(named.get(name, ""), now) for name in _spent_limits(named)]
    waits += map(_number, _spent_in_one(named.get("ratelimit", "")))
    return max((wait for wait in waits if wait), default=None)


def _parse_retry_after(value: str, base: float) -> float | None:
    """Return the seconds of a Retry-After: a number, a date, or several joined by commas."""
    until = _until(value, base) if _number(value) is None else None
    if until is not None:  # a date contains a comma
        return until
    waits = [_number(part) or _duration(part) for part in value.split(",")]
    return max((wait for wait in waits if wait is not None and wait > 0), default=None)


def retry_after_in_text(text: str) -> float | None:
    """Return the seconds in a message such as ``Please try again in 1m2.5s``, or None."""
    match = _IN_WORDS.search(text)
    return (_duration(match.group(1)) or None) if match else None


def _spent_in_one(value: str) -> list[str]:
    """Return the resets of the exhausted limits of a ``RateLimit`` header.

    Both drafts are read: ``limit=10, remaining=0, reset=7`` and ``"name";r=0;t=7``.
    """
    matches = (
        [_SPENT.search(value)] if "remaining" in value else map(_SPENT_ONE.search, value.split(","))
    )
    return [match[1] for match in matches if match]


def _spent_limits(headers: Mapping[str, str]) -> list[str]:
    return [
        name.replace("remaining", "reset")
        for name, value in headers.items()
        if "ratelimit" in name.replace("rate-limit", "ratelimit")
        and "remaining" in name
        and _number(value) == 0
    ]


def reset_seconds(value: str, now: float) -> float | None:
    """Return the seconds until the time in a reset header, None if it is past or malformed.

    ``now`` is Unix seconds.
    """
    number = _number(value)
    if number is None:
        return _duration(value) or _until(value, now)
    if number > 1e8:  # Unix time; in milliseconds if it were after the year 5000
        number = (number / 1000 if number > 1e11 else number) - now
    return number if number > 0 else None


def _duration(text: str) -> float | None:
    try:
        return parse_duration(text, long_units=True)
    except ValueError:
        return None


def _number(value: str) -> float | None:
    value = value.strip()
    number = float(value) if _NUMBER.fullmatch(value) else None
    return None if number is None or math.isinf(number) else number


def _base(date: str | None, now: float) -> float:
    """Return the time to count from: the server's, if the two clocks differ."""
    served = _timestamp(date or "")
    if served is None:
        return now
    # HTTP dates have whole seconds: with the earlier clock no wait ends too soon.
    return served if abs(served - now) > SKEW_SECONDS else min(served, now)


def _until(value: str, now: float) -> float | None:
    when = _timestamp(value)
    return when - now if when is not None and when > now else None


def _timestamp(value: str) -> float | None:
    """Return the Unix seconds of an RFC 3339 or HTTP date, None if it is neither."""
    try:
        when = datetime.fromisoformat(value.strip())
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except (TypeError, ValueError, IndexError, OverflowError):
            return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return when.timestamp()
