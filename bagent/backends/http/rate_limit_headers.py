"""Rate limits of an account, from response headers.

Sources: OpenAI's ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` (durations such as
``6m0s``; also Azure, Groq and gateways); Anthropic's
``anthropic-ratelimit-{requests,input-tokens,output-tokens}-{limit,remaining,reset}`` (RFC 3339
times). Both are token buckets: the reset is when the bucket is full again. Gateways with fixed
windows report the window's end.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bagent.backends.http.retry_after import reset_seconds

MINUTE, DAY = 60.0, 86400.0

_NEAR = 0.1
"""Relative deviation within which a reset is a bucket's."""


class Allowance(msgspec.Struct, frozen=True):
    """One limit: how much of ``limit`` is ``remaining``, and in how many seconds it is whole again.

    ``reset`` is None if not reported, and accurate to ``slack`` seconds; ``header`` is the header
    of ``remaining``.
    """

    limit: float
    remaining: float
    reset: float | None = None
    """Seconds until the limit is whole again, None if not reported."""
    slack: float = 0.02
    """Accuracy of ``reset`` in seconds."""
    header: str = ""
    """The header of ``remaining``."""

    @property
    def period(self) -> float | None:
        """The seconds in which ``limit`` may be used, a minute or a day; None if unknown.

        Derived from a bucket's reset: the used part returns at ``limit`` a period. The end of a
        window does not reveal its length. Gateways without a reset count by the minute.
        """
        for period in (MINUTE, DAY):
            if self.is_bucket(period):
                return period
        return MINUTE if self.reset is None else None

    def is_bucket(self, period: float) -> bool:
        """Return whether the allowance refills at ``limit`` in ``period`` seconds."""
        if self.reset is None:
            return False
        refill_seconds = period * (self.limit - self.remaining) / self.limit
        return abs(self.reset - refill_seconds) <= self.slack + _NEAR * refill_seconds


class RateLimits(msgspec.Struct, frozen=True):
    """The limits that one answer reported, at Unix time ``at``; None where one was not reported.

    ``tokens`` are those of prompt and answer together; ``input`` and ``output`` are limits of
    their own.
    """

    at: float
    requests: Allowance | None = None
    tokens: Allowance | None = None
    input: Allowance | None = None
    output: Allowance | None = None


def read_rate_limits(headers: Mapping[str, str], now: float) -> RateLimits | None:
    """Parse the limits in ``headers`` (names in any case); None if there are none.

    ``now`` is Unix seconds. Values that are not numbers, and limits of 0 or less (Azure's -1), are
    ignored.
    """
    if (
        "anthropic-ratelimit-requests-limit" in headers
        or "anthropic-ratelimit-input-tokens-limit" in headers
    ):
        allowances = {
            field: _allowance(
                headers,
                tuple(f"anthropic-ratelimit-{name}-{part}" for part in _PARTS),
                now,
                1.5,  # RFC 3339 times have whole seconds, and clocks differ
            )
            for field, name in (
                ("requests", "requests"),
                ("input", "input-tokens"),
                ("output", "output-tokens"),
            )
        }
    elif "x-ratelimit-limit-requests" in headers or "x-ratelimit-limit-tokens" in headers:
        allowances = {
            name: _allowance(
                headers, tuple(f"x-ratelimit-{part}-{name}" for part in _PARTS), now, 0.02
            )
            for name in ("requests", "tokens")
        }
    else:
        return None
    return RateLimits(now, **allowances) if any(allowances.values()) else None


_PARTS = ("limit", "remaining", "reset")


def _allowance(
    headers: Mapping[str, str], names: tuple[str, ...], now: float, slack: float
) -> Allowance | None:
    limit, remaining, reset = (headers.get(name) for name in names)
    try:
        maximum, available = float(limit or ""), float(remaining or "")
    except ValueError:
        return None
    if not (0 < maximum < float("inf") and 0 <= available <= maximum):
        return None
    seconds = None if reset is None else reset_seconds(reset, now)
    if seconds is None and available == maximum:
        seconds = 0.0  # the reset is past: the limit is whole
    return Allowance(maximum, available, seconds, slack, names[1])
