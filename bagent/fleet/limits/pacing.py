"""The rate at which an account's requests start: a pure object with an injected clock.

It is for servers that count requests per minute. Their limit cannot be enforced by requests in
flight, since a fast refusal frees its slot at once.
"""

from __future__ import annotations

from collections import deque

from bagent.fleet.limits.concurrency import LATEST


class RequestPacer:
    """The rate at which an account's requests start; unlimited until a server limits it.

    After a refusal everything pauses: for Retry-After, or with exponential backoff. Then requests
    start a little slower than they were served before, and the rate creeps up until the next
    refusal. Where nothing was served, the rate starts low and at most doubles each second. One
    pause covers the refusals of all requests that were sent before it.

    Args:
        per_minute: fixed ceiling in requests per minute; None for no ceiling.
        longest: cap on any wait in seconds.
    """

    WINDOWS = (5.0, 60.0)
    """Seconds over which the served rate is measured; the longer one if the first is empty."""
    FIRST_PAUSE = 1.0
    MAX_PAUSE = 30.0
    """Bounds of the backoff where the server sends no Retry-After."""
    BACKOFF = 0.7
    CREEP = 0.03
    """Requests per second added for each one served: 3 % a second at any rate."""
    SEARCH = 0.7
    """The same while the rate is searched: e**0.7 is 2, so it doubles each second."""
    FIRST_RATE = 1.0
    MIN_RATE = 0.02
    RECOVERY = 1.25
    MAX_RATE = 10_000.0
    """Unrelated refusals raise the rate by the factor RECOVERY, up to this."""
    UNRELATED_BELOW = 0.9
    """Refusals below this share of the rate that was too high last time, while half of the latest
    requests is accepted, are unrelated to the rate: slowing down would not help."""
    LATE = 0.05
    """A start that is late by less, as timers are, does not delay the following ones."""

    def __init__(self, per_minute: float | None, longest: float) -> None:
        self._user_ceiling = per_minute / 60 if per_minute else None
        self._ceiling = self._user_ceiling
        self._rate = self._ceiling
        self._longest = longest
        self._next = float("-inf")
        self._resume = float("-inf")
        self._paused_at = float("-inf")
        self._strikes = 0
        self._searching = False
        self._served: deque[float] = deque(maxlen=2048)
        self._basis = 0.0  # the rate that was too high last time
        self._latest: deque[bool] = deque(maxlen=LATEST)

    @property
    def rate(self) -> float | None:
        """Requests per second that may start now; None for no limit."""
        return self._rate

    def set_ceiling(self, per_minute: float) -> None:
        """Set the ceiling that the provider reported, and start there.

        A lower one that the user set stays.
        """
        reported = per_minute / 60
        user = self._user_ceiling
        ceiling = reported if user is None else min(reported, user)
        if self._rate is None or self._rate == self._ceiling:
            self._rate = ceiling
        self._ceiling = ceiling
        self._rate = min(self._rate, ceiling)

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may start; 0 for at once."""
        return max(0.0, self._resume - now, self._next - now if self._rate else 0.0)

    def pause_remaining(self, now: float) -> float:
        """Return the seconds that the pause after a refusal still lasts."""
        return max(0.0, self._resume - now)

    @property
    def last_served(self) -> float:
        """When a request was last answered well; minus infinity if none was."""
        return self._served[-1] if self._served else float("-inf")

    def start(self, now: float) -> None:
        """Record the start of a request."""
        if self._rate:
            gap = 1 / self._rate
            on_time = gap < self.LATE and now - self._next < self.LATE
            self._next = (self._next if on_time else max(now, self._next)) + gap

    def cancel(self) -> None:
        """Undo the start of a request that was not sent."""
        if self._rate:
            self._next -= 1 / self._rate

    def on_success(self, now: float, sent: float) -> None:
        """Record that a request sent at ``sent`` was answered well."""
        self._served.append(now)
        self._latest.append(True)
        if sent > self._paused_at:
            self._strikes = 0
        if self._rate is not None:
            before = self._rate
            step = min(before, self.SEARCH) if self._searching else self.CREEP
            self._rate = self._capped(before + step)
            if self._next > now:  # the rest of the wait goes by the new rate
                self._next = now + (self._next - now) * before / self._rate

    def on_other_failure(self) -> None:
        """Record that a request was accepted and failed for another reason than a limit."""
        self._latest.append(True)

    def on_refusal(self, sent: float, now: float, retry_after: float | None) -> float:
        """Record that a request sent at ``sent`` was refused; return the seconds to wait."""
        self._latest.append(False)
        unrelated = self._is_unrelated()
        if retry_after is not None and not unrelated:
            self._resume = max(self._resume, now + min(retry_after, self._longest))
        if sent <= self._paused_at:
            return self.pause_remaining(now)
        if unrelated:  # only the refused call waits
            self._recover()
            return self.pause_remaining(now)
        self._paused_at = now
        if retry_after is None:
            pause = min(self.FIRST_PAUSE * 2**self._strikes, self.MAX_PAUSE, self._longest)
            self._resume = max(self._resume, now + pause)
        self._strikes = min(self._strikes + 1, 10)
        self._slow_down(now)
        return self.pause_remaining(now)

    def _is_unrelated(self) -> bool:
        """Return whether a refusal does not depend on the rate."""
        too_high = self.UNRELATED_BELOW * self._basis
        if self._rate is None or self._searching or self._rate > too_high:
            return False
        latest = self._latest
        return len(latest) == LATEST and sum(latest) * 2 >= LATEST

    def _recover(self) -> None:
        """Undo a slow-down that unrelated refusals caused."""
        assert self._rate is not None
        self._rate = self._capped(max(self._rate, min(self._rate * self.RECOVERY, self.MAX_RATE)))
        self._basis *= 2  # until at least half is refused, the server accepts more

    def _slow_down(self, now: float) -> None:
        """Set the rate to a little less than what was served."""
        served = self._served_rate(now)
        self._searching = served == 0
        if self._searching:
            rate = self.FIRST_RATE if self._rate is None else self._rate / 2
        else:
            # A rate above twice what was served was not in use: the refusal does not judge it.
            self._basis = max(served, min(self._rate or served, 2 * served))
            rate = self.BACKOFF * self._basis
        self._rate = self._capped(max(self.MIN_RATE, rate))

    def _served_rate(self, now: float) -> float:
        for window in self.WINDOWS:
            recent = [at for at in self._served if at > now - window]
            if recent:
                return len(recent) / max(1.0, now - recent[0])
        return 0.0

    def _capped(self, rate: float) -> float:
        return rate if self._ceiling is None else min(rate, self._ceiling)
