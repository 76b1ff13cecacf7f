"""Rate limits of a provider account: requests and tokens per minute, over all its endpoints.

Pure objects; times are seconds on any monotonic clock, passed to each call.
"""

from __future__ import annotations

import msgspec

from bagent.backends.http.rate_limit_headers import DAY, MINUTE, Allowance, RateLimits
from bagent.fleet.limits.pacing import RequestPacer

ROUNDING = 0.001
"""Seconds added to a wait, so that a rounding error does not end it too soon."""

MAX_CONTRADICTIONS = 4
"""Consecutive accepted requests with the same small remaining amount after which it is ignored. A
true counter at 0 is followed by a refusal."""

SMALL = 10
"""Only a remaining amount below this can contradict the answers."""

MAX_BUCKET_SCORE = 20
"""Bound on how much the latest answers outweigh others in telling buckets from windows."""


class RateQuota:
    """Keeps requests within the remaining amount that a provider reports.

    Amounts are requests or tokens. A ``total`` is the amount started since the account began.

    Args:
        longest: seconds for which one report may delay requests; then one is sent to get another.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._limit = float("inf")
        self._remaining = float("inf")
        self._total = float("-inf")
        self._reported_at = 0.0
        self._until = float("-inf")
        self._refill = 0.0  # per second
        self._bucket_score = 0
        self._repeats = 0
        self._repeated = float("inf")
        self._repeat_total = float("-inf")
        self.ignored = False

    def contradicts(
        self, allowance: Allowance, started: float, total: float, *, per_request: bool
    ) -> bool:
        """Record an accepted request's report; return whether the quota is ignored from now on.

        Args:
            allowance: the report.
            started: the total when the request was started.
            total: the total now.
            per_request: the amount is requests. Tokens are counted when an answer ends, so for
                them only requests count that were started after the previous report.
        """
        bucket = any(map(allowance.is_bucket, (MINUTE, DAY)))
        if bucket or allowance.remaining >= min(SMALL, allowance.limit):
            self._repeats = 0
            return False
        if allowance.remaining != self._repeated or self._repeats == 0:
            self._repeats, self._repeated = 1, allowance.remaining
        elif per_request or started > self._repeat_total:
            self._repeats += 1
        else:
            return False
        self._repeat_total = total
        if self._repeats < MAX_CONTRADICTIONS or self.ignored:
            return False
        self.ignored = True
        return True

    def on_refusal(self) -> None:
        """Record that a limit refused a request: the reports may be true."""
        self._repeats = 0

    def update(self, at: float, allowance: Allowance, started: float) -> None:
        """Record a report of time ``at``; ``started`` is the total when its request began.

        Reports of earlier requests that arrive later are ignored.
        """
        if started < self._total:
            return
        self._limit, self._remaining = allowance.limit, allowance.remaining
        self._total, self._reported_at = started, at
        reset = min(MINUTE if allowance.reset is None else allowance.reset, self._longest)
        self._until = at + reset + ROUNDING
        period = next((each for each in (MINUTE, DAY) if allowance.is_bucket(each)), None)
        # The end of a window looks like a bucket now and then.
        score = self._bucket_score + (1 if period else -1)
        self._bucket_score = max(-MAX_BUCKET_SCORE, min(MAX_BUCKET_SCORE, score))
        if self._bucket_score < 0:
            period = None
        self._refill = allowance.limit / period if period else 0.0
        if period == MINUTE:
            self._until = float("inf")  # the bucket's level stays predictable

    def wait(self, now: float, total: float, amount: float) -> float:
        """Return the seconds until ``amount`` more may be started; 0 for at once."""
        until = self._until - now
        if until <= 0 or self.ignored:
            return 0.0
        refilled = max(0.0, now - self._reported_at) * self._refill
        remaining = self._remaining + refilled - (total - self._total)
        missing = min(amount, self._limit) - min(self._limit, remaining)
        if missing <= 0:
            return 0.0
        return min(until, missing / self._refill + ROUNDING) if self._refill else until


FIRST_COMPLETION = 512
"""Expected tokens of an answer before any was seen, where the request sets no limit."""

STEADY = 50
"""Answers after which the running mean of their length forgets: each then weighs 1/50."""


class TokenPace:
    """Tokens per minute, spread over the minute.

    A leaky bucket spreads the starts, since providers enforce the limit over shorter times too. A
    log of the last minute corrects for estimates: any 60 s contain at most ``tpm`` tokens, or one
    request more where that is larger than the bucket. Answers that are longer than expected may
    exceed it.

    Args:
        tpm: tokens per minute, above 0.
    """

    BURST = 0.02
    """The bucket's share of a minute's tokens: 1.2 s of them. Less would waste tokens when timers
    are late; more would take from the rate, since burst and rate share the minute."""

    def __init__(self, tpm: float) -> None:
        self._limit = self._size = self._rate = 0.0
        self.resize(tpm)
        self._level = self._size
        self._at: float | None = None
        self._log: dict[int, float] = {}  # tokens by second
        self._sum = 0.0

    def resize(self, tpm: float) -> None:
        """Set the limit to ``tpm``."""
        self._limit = tpm
        self._size = tpm * self.BURST
        self._rate = (tpm - self._size) / 60

    def wait(self, now: float, tokens: float) -> float:
        """Return the seconds until a request of ``tokens`` may start; 0 for at once."""
        tokens = min(tokens, self._size)
        missing = tokens - self._filled(now)
        # A wait that ended a rounding error too early would be followed by another, and another.
        wait = missing / self._rate if missing > 1e-6 * self._size else 0.0
        return max(wait, self._window_wait(now, tokens))

    def reserve(self, now: float, tokens: float) -> None:
        """Reserve the tokens of a request that starts now."""
        self._forget(now)
        self._level = self._filled(now) - tokens
        self._at = now
        self._log[int(now)] = self._log.get(int(now), 0.0) + tokens
        self._sum += tokens

    def settle(self, now: float, sent: float, reserved: float, used: float) -> None:
        """Replace the ``reserved`` tokens of the request sent at ``sent`` by those ``used``."""
        self._forget(now)
        self._level = min(self._size, self._filled(now) + reserved - used)
        self._at = now
        if int(sent) in self._log:  # else it is older than a minute
            self._log[int(sent)] += used - reserved
            self._sum += used - reserved

    def _filled(self, now: float) -> float:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        return min(self._size, self._level + passed * self._rate)

    def _forget(self, now: float) -> None:
        while self._log and (oldest := next(iter(self._log))) + 61 <= now:
            self._sum -= self._log.pop(oldest)

    def _window_wait(self, now: float, tokens: float) -> float:
        self._forget(now)
        excess = self._sum + tokens - self._limit
        wait = 0.0
        for second, used in self._log.items():
            if excess <= 1e-6 * self._limit:
                break
            excess -= used
            wait = second + 61 - now
        return wait


class TokenUse(msgspec.Struct, frozen=True):
    """Tokens of requests, as far as they can be foreseen."""

    prompt: int = 0
    answer: int = 0  # expected
    max_answer: int = 0  # what the requests allow, at least ``answer``

    @property
    def total(self) -> int:
        """Prompt and expected answer."""
        return self.prompt + self.answer

    def __add__(self, other: TokenUse) -> TokenUse:
        """Return the sum of both."""
        return TokenUse(
            self.prompt + other.prompt,
            self.answer + other.answer,
            self.max_answer + other.max_answer,
        )


NO_TOKENS = TokenUse()


class RequestReservation(msgspec.Struct, frozen=True):
    """Requests that an account has started, and the tokens reserved for them."""

    requests: int = 0
    tokens: TokenUse = NO_TOKENS


NOTHING = RequestReservation()


class Account:
    """The limits that all endpoints of one account share.

    The tokens of a request are estimated and reserved when it starts, and settled when it ends.
    The estimate for an answer is the running mean of earlier ones.

    A provider may report its limits in its answers (`update_limits`). Requests then start at that
    pace, and only while enough remains.

    Args:
        rpm: requests per minute, None for no ceiling.
        tpm: tokens per minute (prompt and completion), None for no ceiling.
        longest: cap on a wait after a refusal in seconds.
        hosted: whether its provider may report limits.
    """

    def __init__(
        self, rpm: float | None, tpm: float | None, longest: float, *, hosted: bool = False
    ) -> None:
        self._pacer = RequestPacer(rpm, longest)
        self.on_success = self._pacer.on_success
        """Records that a request was answered well: :meth:`RequestPacer.on_success`."""
        self._tpm = tpm
        self._tokens = TokenPace(tpm) if tpm else None
        self._longest = longest
        self._hosted = hosted
        self.counts_tokens = hosted or self._tokens is not None
        """Whether token estimates matter."""
        self._mean = 0.0
        self._answers = 0
        self._started = NOTHING
        self._last = NO_TOKENS  # of the latest request
        self._quotas: dict[str, RateQuota] = {}
        self._reported: dict[str, float] = {}  # limits, by name

    @property
    def last_served(self) -> float:
        """When a request was last answered well; minus infinity if none was."""
        return self._pacer.last_served

    @property
    def rate(self) -> float | None:
        """Requests per second that may start now; None for no limit."""
        return self._pacer.rate

    def estimate(self, prompt: int, max_answer: int | None = None) -> TokenUse:
        """Return the tokens to reserve for a request.

        Args:
            prompt: estimated tokens of its prompt.
            max_answer: its limit on the answer, None for no limit.
        """
        mean = self._mean if self._answers else FIRST_COMPLETION
        answer = round(mean if max_answer is None else min(mean, max_answer))
        return TokenUse(prompt, answer, answer if max_answer is None else max_answer)

    def wait(self, now: float, tokens: int = 0) -> float:
        """Return the seconds until a request of ``tokens`` may start; 0 for at once.

        The provider's quotas assume a request like the latest one.
        """
        wait = self._pacer.wait(now)
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait(now, tokens))
        if self._quotas:
            done, last = self._started, self._last
            for name, quota in self._quotas.items():
                total = _amount(name, done.requests, done.tokens)
                wait = max(wait, quota.wait(now, total, _amount(name, 1, last)))
        return wait

    def pause_remaining(self, now: float) -> float:
        """Return the seconds that the pause after a refusal still lasts."""
        return self._pacer.pause_remaining(now)

    def start(self, now: float, tokens: TokenUse = NO_TOKENS) -> RequestReservation:
        """Reserve ``tokens`` for a request that starts now; return all reservations so far."""
        self._pacer.start(now)
        if self._tokens is not None:
            self._tokens.reserve(now, tokens.total)
        if self._hosted:
            self._last = tokens
            self._started = RequestReservation(
                self._started.requests + 1, self._started.tokens + tokens
            )
        return self._started

    def cancel(self, now: float, sent: float, tokens: TokenUse) -> None:
        """Release what was reserved for a request that started at ``sent`` and was not sent."""
        self._pacer.cancel()
        self._settle(now, sent, tokens.total, 0)

    def update_limits(
        self,
        at: float,
        limits: RateLimits,
        reservation: RequestReservation,
        *,
        accepted: bool = True,
    ) -> str:
        """Update the limits from rate-limit headers.

        Args:
            at: when the headers came.
            limits: what they report.
            reservation: what `start` returned for the request.
            accepted: whether the request was accepted.

        Returns:
            what is new, for people, such as ``allows 600 requests a minute``; else empty.
        """
        allowed, ignored = [], []
        for name in _LIMITS:
            allowance: Allowance | None = getattr(limits, name)
            if allowance is None:
                continue
            quota = self._quotas.get(name)
            if quota is None:
                quota = self._quotas[name] = RateQuota(self._longest)
            started = _amount(name, reservation.requests, reservation.tokens)
            quota.update(at, allowance, started)
            total = _amount(name, self._started.requests, self._started.tokens)
            per_request = name == "requests"
            if accepted and quota.contradicts(allowance, started, total, per_request=per_request):
                ignored.append(
                    f"sends {allowance.header or name}: {allowance.remaining:g} with answers that"
                    " go on; it is disregarded"
                )
            if self._reported.get(name) != allowance.limit:
                self._reported[name] = allowance.limit
                period = allowance.period
                if period == MINUTE:
                    self._set_pace(name, allowance.limit)
                unit = _PERIODS.get(period, "at a time") if period else "at a time"
                allowed.append(f"{allowance.limit:,.0f} {_LIMITS[name]} {unit}")
        news = [f"allows {', '.join(allowed)}"] if allowed else []
        return "; ".join(news + ignored)

    def _set_pace(self, name: str, limit: float) -> None:
        """Start requests at the pace of a limit per minute."""
        if name == "requests":
            self._pacer.set_ceiling(limit)
        elif name == "tokens":
            limit = limit if self._tpm is None else min(limit, self._tpm)
            if self._tokens is None:
                self._tokens, self.counts_tokens = TokenPace(limit), True
            else:
                self._tokens.resize(limit)

    def on_answer(
        self,
        now: float,
        sent: float,
        reserved: int = 0,
        used: int | None = None,
        completion: int | None = None,
    ) -> None:
        """Record the tokens of one answer to a request.

        Args:
            now: when the request ended.
            sent: when it started.
            reserved: tokens that were reserved for the answer and its prompt.
            used: tokens of both, None if the server did not report them.
            completion: tokens of the answer, for later estimates.
        """
        if completion is not None:
            self._answers = min(self._answers + 1, STEADY)
            self._mean += (completion - self._mean) / self._answers
        if used is not None:
            self._settle(now, sent, reserved, used)

    def _settle(self, now: float, sent: float, reserved: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.settle(now, sent, reserved, used)

    def on_other_failure(self) -> None:
        """Record that a request was accepted and failed for another reason than a limit."""
        self._pacer.on_other_failure()

    def on_refusal(
        self, sent: float, now: float, retry_after: float | None, reserved: int = 0
    ) -> float:
        """Record that a rate limit refused a request sent at ``sent``; return the seconds to wait.

        Its reserved tokens are released: providers do not count refused requests.
        """
        self._settle(now, sent, reserved, 0)
        for quota in self._quotas.values():
            quota.on_refusal()
        return self._pacer.on_refusal(sent, now, retry_after)


_LIMITS = {
    "requests": "requests",
    "tokens": "tokens",
    "input": "prompt tokens",
    "output": "answer tokens",
}
_PERIODS = {MINUTE: "a minute", DAY: "a day"}


def _amount(name: str, requests: int, tokens: TokenUse) -> int:
    """Return what the limit ``name`` counts.

    OpenAI counts an answer at its limit, Anthropic as it is generated.
    """
    if name == "requests":
        return requests
    if name == "tokens":
        return tokens.prompt + tokens.max_answer
    return tokens.prompt if name == "input" else tokens.answer
