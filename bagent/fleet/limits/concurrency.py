"""Limits on requests in flight and on their start rate: pure objects with an injected clock.

The in-flight limit follows TCP congestion control (RFC 5681): slow start, recovery to the level
after the first of several cuts, small steps beyond it, and one cut per episode. The pacer is for
servers that count requests per minute. Their limit cannot be enforced by requests in flight,
since a fast refusal frees its slot at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

OVERLOAD_CUT = 0.5
"""What an overload leaves of the limit, as in TCP."""

RATE_LIMIT_CUT = 0.9
"""What a rate limit leaves. The pacer handles it; this helps where requests in flight count."""

QUEUE_CUT = 0.85
"""What a queue inside an own engine leaves. A queue costs time to first token, but no throughput;
too low a limit costs throughput at once."""

GROWTH = 0.05
"""Share of the limit added after each clean round once slow start is over."""

USED_SHARE = 0.8
"""The limit grows only if this share of it was in use."""

LATEST = 30
"""Latest results that show whether refusals depend on the limit."""

FLOOR = 0.25
"""While a third of the latest requests is accepted, refusals do not cut the limit below this share
of the highest at which one came. Hosted models refuse a share of all requests in busy hours,
whatever one client sends."""

FLOOR_GROWTH = 1.1
"""Each refusal at the floor raises that highest limit by this factor."""

QUIET_POLLS = 5
"""Consecutive polls of an engine without a queue after which rounds add more."""

SLOW_START_POLLS = 2
"""The same in slow start."""

QUIET_GROWTH = 0.25
"""Share of the limit that such rounds add. Too much adds a queue of a quarter, which is no reason
to cut."""


class InFlightLimit:
    """The number of rows that one endpoint may have in flight.

    Own engines never refuse. Their load feedback calls `allow_growth`, `hold` or `cut`.

    Args:
        start: first limit, at least 1.
        ceiling: upper bound.
        growing: if False, `start` is a number that the user set: the limit never exceeds it.
        changes: called with the new value and the reason at each change.

    Attributes:
        value: the limit in rows; read only.
        reason: why the limit last changed.
        held: why it may not grow, None if it may.
    """

    def __init__(
        self,
        start: int,
        ceiling: int,
        *,
        growing: bool = True,
        changes: Callable[[int, str], None] | None = None,
    ) -> None:
        self._limit = float(max(1, min(start, ceiling)))
        self.value = int(self._limit)
        self._ceiling = max(1, ceiling if growing else start)
        self._growing = growing
        self._changes = changes
        self._slow_start = growing
        self._recovery = 0.0  # level up to which it grows fast
        self._clean = True  # no cut in this round
        self._round = 0  # rows answered in it
        self._peak = 0  # most rows in flight in it
        self._cut_at = float("-inf")
        self._latest: deque[bool] = deque(maxlen=LATEST)
        self._highest = 0.0
        self._quiet_polls = 0
        self._busy_polls = 0  # of those, with the limit in use
        self.reason = "start"
        self.held: str | None = None

    def on_success(self, rows: int, in_flight: int) -> None:
        """Record that ``rows`` were answered well while ``in_flight``, these included, were out."""
        self._latest.append(True)
        self._peak = max(self._peak, in_flight)
        self._round += rows
        if self._round < self.value:
            return
        self._clean = True
        used = self._peak >= USED_SHARE * self.value
        if used and self._limit < self._ceiling and self.held is None:
            self._grow()
        self._round = 0
        self._peak = 0

    def on_other_failure(self) -> None:
        """Record that a request was accepted and failed for another reason than a limit."""
        self._latest.append(True)

    def _grow(self) -> None:
        if self._slow_start:
            step, reason = self._limit, "slow start"
        elif self._limit < self._recovery:
            step, reason = min(self._limit, self._recovery - self._limit), "recovery"
        elif self._quiet_polls >= QUIET_POLLS:
            step, reason = max(1.0, self._limit * QUIET_GROWTH), "nothing waits"
        else:
            step, reason = max(1.0, self._limit * GROWTH), "clean round"
        self._set(min(float(self._ceiling), self._limit + step), reason)

    def _set(self, limit: float, reason: str) -> None:
        before = self.value
        self._limit = limit
        self.value = int(limit)
        self._busy_polls = 0
        self.reason = reason
        if self._changes is not None and self.value != before:
            self._changes(self.value, reason)

    def allow_growth(self, in_flight: int = 0, *, reported: bool = True) -> None:
        """Allow growth after a poll of the engine that showed no queue.

        After several such polls with the limit in use it grows without waiting for a clean round,
        which takes minutes where answers are long.

        Args:
            in_flight: rows in flight at this poll.
            reported: False if the engine does not report its queue; growth is then not faster.
        """
        self.held = None
        self._quiet_polls = self._quiet_polls + 1 if reported else 0
        used = reported and in_flight >= USED_SHARE * self._limit
        self._busy_polls = self._busy_polls + 1 if used else 0
        enough = SLOW_START_POLLS if self._slow_start else QUIET_POLLS
        if self._busy_polls >= enough and self._limit < self._ceiling:
            self._grow()

    def hold(self, reason: str) -> None:
        """Stop growth until `allow_growth`; the second time in a row also ends slow start.

        The first may be caused by a burst that was just sent.
        """
        if self.held is not None:
            self._slow_start = False
        self.held = reason
        self._quiet_polls = 0
        self._busy_polls = 0

    def cut(self, now: float, reason: str, *, keep: float = QUEUE_CUT, least: float = 1.0) -> bool:
        """Cut the limit of an engine that has more than it can run, and hold it.

        A limit that the user set stays.

        Args:
            now: refusals of requests sent before it cut no further.
            reason: for people.
            keep: share of the limit that remains.
            least: rows below which it is not cut.

        Returns:
            whether the limit was cut.
        """
        self.hold(reason)
        self._slow_start = False
        limit = max(1.0, least, self._limit * keep)
        if not self._growing or limit >= self._limit:
            return False
        self._cut_at = now
        self._recovery = min(self._recovery, limit)
        self._set(limit, reason)
        return True

    def on_overload(self, sent: float, now: float, reason: str) -> None:
        """Cut the limit after a request sent at ``sent`` was refused by a busy server.

        Refusals of requests that were sent before the last cut have no effect.
        """
        if self._refuse(sent, now, OVERLOAD_CUT, reason):
            self._slow_start = False

    def on_rate_limit(self, sent: float, now: float, reason: str) -> None:
        """Cut the limit a little after a request sent at ``sent`` was refused by a rate limit."""
        self._refuse(sent, now, RATE_LIMIT_CUT, reason)

    def _refuse(self, sent: float, now: float, keep: float, reason: str) -> bool:
        self._latest.append(False)
        if sent <= self._cut_at:
            return False
        floor = self._floor()
        if self._limit <= max(1.0, floor):
            raised = min(self._highest * FLOOR_GROWTH, self._ceiling)
            self._highest = max(self._limit, raised)
            return False
        if self._clean:  # only the first of several cuts shows which level was too high
            self._recovery = max(1.0, self._limit * keep)
            self._clean = False
        self._cut_at = now
        self._round = 0
        self._peak = 0
        self._set(max(1.0, floor, self._limit * keep), reason)
        return True

    def _floor(self) -> float:
        """Return the limit below which refusals do not depend on it; 0 if they may."""
        latest = self._latest
        full = len(latest) == LATEST
        if full and sum(latest) * 3 < LATEST:
            self._highest = self._limit
            return 0.0
        self._highest = max(self._highest, self._limit)
        return FLOOR * self._highest if full else 0.0


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

    def on_success(self, now: float, sent: float) -> None:
        """Record that a request sent at ``sent`` was answered well."""
        self._served.append(now)
        self._latest.append(True)
        if sent > self._paused_at:
            self._strikes = 0
        if self._rate is not None:
            step = min(self._rate, self.SEARCH) if self._searching else self.CREEP
            self._rate = self._capped(self._rate + step)

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
