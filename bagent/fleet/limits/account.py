"""What one account may ask of a provider: requests and tokens per minute, over all endpoints.

Pure objects; times are seconds on any monotonic clock, given with each call.
"""

from __future__ import annotations

import msgspec

from bagent.backends.http.rate_limit_headers import DAY, MINUTE, Allowance, RateLimits
from bagent.fleet.limits.concurrency import RequestPacer

LITTLE = 0.001
"""Seconds added to a wait, lest a rounding error make it end too soon."""

CONTRADICTIONS = 4
"""So many good answers one after the other that tell the same small rest show that it is no count:
a count that tells 0 has one such answer, and the next is refused."""

SMALL = 10
"""A rest below this may hold requests back."""

_SURE = 20
"""So many answers that fit a bucket, or do not, outweigh as many others at most."""


class RateQuota:
    """Keeps what is started within what a provider said is left.

    Amounts are whatever the limit counts: requests or tokens. ``sum`` is always the amount that
    was started since the account began.

    Args:
        longest: seconds for which one answer's words may hold requests back; then one is let
            through to hear more.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._limit = float("inf")
        self._left = float("inf")
        self._mark = float("-inf")
        self._at = 0.0
        self._until = float("-inf")
        self._refill = 0.0
        self._fits = 0
        self._same = 0
        self._same_left = float("inf")
        self._same_sum = float("-inf")
        self.disregarded = False

    def contradicts(self, told: Allowance, mark: float, sum: float, *, whole: bool) -> bool:
        """Take that a good answer told ``told``; returns whether that just became incredible.

        Args:
            mark: the sum when the request of the answer was started.
            sum: what it is now.
            whole: the limit counts requests. Tokens are counted when an answer ends, so there only
                requests count that were started after the same rest had been told.
        """
        if told.left >= min(SMALL, told.limit) or any(map(told.is_bucket, (MINUTE, DAY))):
            self._same = 0
            return False
        if told.left != self._same_left or self._same == 0:
            self._same, self._same_left = 1, told.left
        elif whole or mark > self._same_sum:
            self._same += 1
        else:
            return False
        self._same_sum = sum
        if self._same < CONTRADICTIONS or self.disregarded:
            return False
        self.disregarded = True
        return True

    def refused(self) -> None:
        """Take that a request was refused by a limit: what was told may well be true."""
        self._same = 0

    def told(self, at: float, told: Allowance, mark: float) -> None:
        """An answer told ``told`` at ``at``; ``mark`` was the sum when its request was started.

        What an earlier request's answer tells later is old.
        """
        if mark < self._mark:
            return
        self._limit, self._left, self._mark, self._at = told.limit, told.left, mark, at
        reset = min(MINUTE if told.reset is None else told.reset, self._longest)
        self._until = at + reset + LITTLE
        period = next((one for one in (MINUTE, DAY) if told.is_bucket(one)), None)
        # The end of a window fits a bucket now and then.
        self._fits = max(-_SURE, min(_SURE, self._fits + (1 if period else -1)))
        if self._fits < 0:
            period = None
        self._refill = told.limit / period if period else 0.0
        if period == MINUTE:
            self._until = float("inf")  # how it fills is known beyond the time that was told

    def wait(self, now: float, sum: float, amount: float) -> float:
        """Seconds until ``amount`` more may be started; 0 for at once."""
        until = self._until - now
        if until <= 0 or self.disregarded:
            return 0.0
        left = self._left + max(0.0, now - self._at) * self._refill - (sum - self._mark)
        missing = min(amount, self._limit) - min(self._limit, left)
        if missing <= 0:
            return 0.0
        return min(until, missing / self._refill + LITTLE) if self._refill else until


FIRST_COMPLETION = 512
"""Tokens expected of an answer before any has been seen and where the request sets no limit."""

STEADY = 50
"""Answers after which the running mean of their length forgets: each then weighs 1/50, so the
mean follows the rows within some hundred answers and one long answer moves it little."""


class TokenPace:
    """Tokens per minute, spread over the minute.

    A leaky bucket spreads the starts, since providers enforce a minute's tokens over shorter times
    too. A log of the last minute, second by second, keeps the sum under the ceiling when what was
    reserved turns out to be more or less than what was used: any 60 s hold at most ``tpm`` tokens,
    and one request more where that is larger than the bucket; beyond that only by what answers in
    flight are longer than was expected.

    Args:
        tpm: tokens per minute, above 0.
    """

    BURST = 0.02
    """The bucket's share of a minute's tokens: 1.2 s of them. Less would let late timers waste
    tokens, more would take from the rate, since burst and rate share the minute."""

    def __init__(self, tpm: float) -> None:
        self._most = self._size = self._rate = 0.0
        self.resize(tpm)
        self._level = self._size
        self._at: float | None = None
        self._log: dict[int, float] = {}
        self._sum = 0.0

    def resize(self, tpm: float) -> None:
        """The ceiling is ``tpm`` from now on."""
        self._most = tpm
        self._size = tpm * self.BURST
        self._rate = (tpm - self._size) / 60

    def wait(self, now: float, tokens: float) -> float:
        """Seconds until a request of ``tokens`` may start; 0 for at once."""
        tokens = min(tokens, self._size)
        missing = tokens - self._filled(now)
        # A wait that ends a rounding error early would be asked for again, and again.
        wait = missing / self._rate if missing > 1e-6 * self._size else 0.0
        return max(wait, self._window_wait(now, tokens))

    def take(self, now: float, tokens: float) -> None:
        """A request of ``tokens`` was started."""
        self._forget(now)
        self._level = self._filled(now) - tokens
        self._at = now
        self._log[int(now)] = self._log.get(int(now), 0.0) + tokens
        self._sum += tokens

    def settle(self, now: float, sent: float, reserved: float, used: float) -> None:
        """The request that took ``reserved`` tokens at ``sent`` has used ``used``."""
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
        """Drop the seconds that are wholly more than a minute ago; the log is in their order."""
        while self._log and (oldest := next(iter(self._log))) + 61 <= now:
            self._sum -= self._log.pop(oldest)

    def _window_wait(self, now: float, tokens: float) -> float:
        self._forget(now)
        over = self._sum + tokens - self._most
        wait = 0.0
        for second, spent in self._log.items():
            if over <= 1e-6 * self._most:
                break
            over -= spent
            wait = second + 61 - now
        return wait


class TokenUse(msgspec.Struct, frozen=True):
    """Tokens of requests: of their prompts, and of their answers as far as they can be foreseen.

    ``most`` is what the answers may have by their own limits, at least ``answer``.
    """

    prompt: int = 0
    answer: int = 0
    most: int = 0

    @property
    def total(self) -> int:
        """Prompt and answer together."""
        return self.prompt + self.answer

    def __add__(self, other: TokenUse) -> TokenUse:
        """The tokens of both."""
        return TokenUse(
            self.prompt + other.prompt, self.answer + other.answer, self.most + other.most
        )


NO_TOKENS = TokenUse()


class RequestReservation(msgspec.Struct, frozen=True):
    """What an account had started so far: requests, and tokens as they were reserved for them."""

    requests: int = 0
    tokens: TokenUse = NO_TOKENS


NOTHING = RequestReservation()


class Account:
    """The limits that all endpoints of one account share.

    The tokens of a request are not known when it starts: an estimate is reserved, and the
    difference is settled at its end. What is reserved for an answer is the running mean of the
    answers before it.

    A provider may tell its limits in its answers (:meth:`told`). Requests, and tokens where one
    limit counts those of prompts and answers together, then start at that pace; and nothing is
    started for which too little is left.

    Args:
        rpm: requests per minute, None for no ceiling.
        tpm: tokens per minute (prompt and completion), None for no ceiling.
        longest: the longest wait after a refusal, in seconds, even when told to wait longer.
        hosted: whether its provider may tell limits.
    """

    def __init__(
        self, rpm: float | None, tpm: float | None, longest: float, *, hosted: bool = False
    ) -> None:
        self._pace = RequestPacer(rpm, longest)
        self._tpm = tpm
        self._tokens = TokenPace(tpm) if tpm else None
        self._longest = longest
        self._hosted = hosted
        self._mean = 0.0
        self._answers = 0
        self._started = NOTHING
        self._usual = NO_TOKENS
        self._quotas: dict[str, RateQuota] = {}
        self._said: dict[str, float] = {}

    @property
    def counts_tokens(self) -> bool:
        """Whether estimates of tokens matter: False where no ceiling for tokens can be."""
        return self._tokens is not None or self._hosted

    @property
    def last_served(self) -> float:
        """When a request was last answered well; minus infinity if none was."""
        return self._pace.last_served

    @property
    def rate(self) -> float | None:
        """Requests per second that may start now; None for no limit."""
        return self._pace.rate

    def estimate(self, prompt: int, most: int | None = None) -> TokenUse:
        """The tokens to reserve for a request.

        Args:
            prompt: an estimate of its prompt's tokens.
            most: the tokens that it allows for its answer, None for no limit.
        """
        mean = self._mean if self._answers else FIRST_COMPLETION
        answer = round(mean if most is None else min(mean, most))
        return TokenUse(prompt, answer, answer if most is None else most)

    def wait(self, now: float, tokens: int = 0) -> float:
        """Seconds until a request of ``tokens`` may start; 0 for at once.

        Where a provider told what is left, the request is taken to be like the one before it.
        """
        wait = self._pace.wait(now)
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait(now, tokens))
        if self._quotas:
            done, usual = self._started, self._usual
            for name, quota in self._quotas.items():
                started = _amount(name, done.requests, done.tokens)
                wait = max(wait, quota.wait(now, started, _amount(name, 1, usual)))
        return wait

    def paused(self, now: float) -> float:
        """Seconds that the pause after a refusal still lasts, 0 if there is none."""
        return self._pace.paused(now)

    def started(self, now: float, tokens: TokenUse = NO_TOKENS) -> RequestReservation:
        """A request was started for which ``tokens`` are reserved; returns all so far."""
        self._pace.started(now)
        if self._tokens is not None:
            self._tokens.take(now, tokens.total)
        if self._hosted:
            self._usual = tokens
            self._started = RequestReservation(
                self._started.requests + 1, self._started.tokens + tokens
            )
        return self._started

    def told(
        self, at: float, limits: RateLimits, mark: RequestReservation, *, good: bool = True
    ) -> str:
        """An answer told the provider's limits; returns words for people where they are news, such
        as ``allows 600 requests a minute``.

        Args:
            at: when its headers came.
            limits: what they said.
            mark: what :meth:`started` gave for its request.
            good: whether the request was let in.
        """
        allows, incredible = [], []
        for name in _LIMITS:
            told: Allowance | None = getattr(limits, name)
            if told is None:
                continue
            quota = self._quotas.get(name)
            if quota is None:
                quota = self._quotas[name] = RateQuota(self._longest)
            started = _amount(name, mark.requests, mark.tokens)
            quota.told(at, told, started)
            done = self._started
            now = _amount(name, done.requests, done.tokens)
            if good and quota.contradicts(told, started, now, whole=name == "requests"):
                incredible.append(
                    f"sends {told.header or name}: {told.left:g} with answers that go on;"
                    " it is disregarded"
                )
            if self._said.get(name) != told.limit:
                self._said[name] = told.limit
                period = told.period
                if period == MINUTE:
                    self._follow(name, told.limit)
                word = _PERIODS.get(period, "at a time") if period else "at a time"
                allows.append(f"{told.limit:,.0f} {_LIMITS[name]} {word}")
        words = [f"allows {', '.join(allows)}"] if allows else []
        return "; ".join(words + incredible)

    def _follow(self, name: str, limit: float) -> None:
        """Start at the pace of a limit a minute."""
        if name == "requests":
            self._pace.allow(limit)
        elif name == "tokens":
            most = limit if self._tpm is None else min(limit, self._tpm)
            if self._tokens is None:
                self._tokens = TokenPace(most)
            else:
                self._tokens.resize(most)

    def served(
        self,
        now: float,
        sent: float,
        tokens_reserved: int = 0,
        tokens_used: int | None = None,
        completion: int | None = None,
    ) -> None:
        """A request sent at ``sent`` was answered well.

        Args:
            now: the time of its end.
            sent: the time of its start.
            tokens_reserved: what was given to :meth:`started`.
            tokens_used: prompt and completion as the server counted them, None if it did not.
            completion: the answer's own tokens (of one call), for later estimates.
        """
        self._pace.served(now, sent)
        if completion is not None:
            self._answers = min(self._answers + 1, STEADY)
            self._mean += (completion - self._mean) / self._answers
        self.ended(now, sent, tokens_reserved, tokens_used)

    def ended(
        self, now: float, sent: float, tokens_reserved: int, tokens_used: int | None = None
    ) -> None:
        """A request ended otherwise than by a good answer or a refusal: only its tokens count."""
        if self._tokens is not None and tokens_used is not None:
            self._tokens.settle(now, sent, tokens_reserved, tokens_used)

    def passed(self) -> None:
        """A request was let in, and came to nothing for another reason than a limit."""
        self._pace.passed()

    def refused(
        self, sent: float, now: float, told: float | None, tokens_reserved: int = 0
    ) -> float:
        """A request sent at ``sent`` was refused by a rate limit; returns the seconds to wait.

        What was reserved for it is given back: a provider counts no tokens for what it refused.
        ``told`` is the server's Retry-After in seconds, or None.
        """
        self.ended(now, sent, tokens_reserved, 0)
        for quota in self._quotas.values():
            quota.refused()
        return self._pace.refused(sent, now, told)


_LIMITS = {
    "requests": "requests",
    "tokens": "tokens",
    "input": "prompt tokens",
    "output": "answer tokens",
}
_PERIODS = {MINUTE: "a minute", DAY: "a day"}


def _amount(name: str, requests: int, tokens: TokenUse) -> int:
    """What the limit ``name`` counts of them.

    OpenAI counts an answer at the most that it may have; Anthropic as it comes.
    """
    if name == "requests":
        return requests
    if name == "tokens":
        return tokens.prompt + tokens.most
    return tokens.prompt if name == "input" else tokens.answer
