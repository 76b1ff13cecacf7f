"""How many requests may be in flight, and how fast they may start: pure objects with a clock.

Nothing here knows a network. Times are seconds on any monotonic clock, given with each call.
The in-flight limit follows TCP's shape (RFC 5681): doubling at first and after several cuts in a
row, small steps beyond what the first of them left, one cut per episode. The pace is for servers
that count requests per minute: their limit can not be found by in-flight alone, since a fast
refusal frees its slot at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

CUT = 0.5
"""What an overload leaves of the limit. Half, as in TCP: own engines shed in whole queues."""

TRIM = 0.9
"""What a rate limit leaves: the pace answers it, this helps where the server counts in flight."""

GROWTH = 0.05
"""Share of the limit added after each clean round once slow start is over."""

USED_SHARE = 0.8
"""The limit grows only when this share of it was in use: an idle limit proves nothing."""

LATELY = 30
"""So many of the last answers say whether refusals follow from what is sent."""

FLOOR = 0.25
"""While at least a third of the last requests get through, refusals cut the limit to no less than
this share of the highest at which one came: what a quarter does not mend, in flight did not
cause. Hosted models refuse a share of all requests in busy hours, whatever one client sends."""

DOUBT = 1.1
"""By so much each refusal at that share raises what is taken as the highest: slowly, until two
thirds are refused, the server is shown to take more."""

EASE = 0.85
"""What a queue inside an own engine leaves of the limit. Gentle: a queue costs time to the first
token, no throughput, while too low a limit costs throughput at once."""

QUIET_POLLS = 5
"""After so many looks at an engine in a row at which nothing waited, rounds add more."""

SLOW_START_POLLS = 2
"""In slow start so many suffice, with the limit in use: the engine has taken what it was sent."""

QUIET_GROWTH = 0.25
"""Share of the limit that each round then adds: it finds freed room four times as fast, and
what it adds too much is a queue of a quarter, which need not be cut."""


class InFlightLimit:
    """The number of rows that one endpoint may have in flight.

    Own engines never refuse; whoever watches one (``load_feedback``) tells here at
    each look whether growth is held, the limit is too high (``pressed``), or all is well
    (``eased``).

    Args:
        start: the first limit, at least 1.
        ceiling: never more than this.
        growing: False keeps the limit where it is until an overload cuts it, and lets it grow
            back no further than ``start`` (a number that the user gave).
        changes: called with the new value and the reason at each change of the value.

    Attributes:
        value: the limit now, in rows; read it only.
        reason: why the limit last changed.
        held: why it may not grow now, None if it may.
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
        self._aim = 0.0
        self._clean = True
        self._round = 0
        self._peak = 0
        self._cut_at = float("-inf")
        self._lately: deque[bool] = deque(maxlen=LATELY)
        self._highest = 0.0
        self._quiet = 0
        self._still = 0
        self.reason = "start"
        self.held: str | None = None

    def succeeded(self, rows: int, in_flight: int) -> None:
        """``rows`` came back well while ``in_flight`` rows (they included) were out."""
        self._lately.append(True)
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

    def passed(self) -> None:
        """A request was let in, and came to nothing for another reason."""
        self._lately.append(True)

    def _grow(self) -> None:
        if self._slow_start:
            step, reason = self._limit, "slow start"
        elif self._limit < self._aim:
            step, reason = min(self._limit, self._aim - self._limit), "recovery"
        elif self._quiet >= QUIET_POLLS:
            step, reason = max(1.0, self._limit * QUIET_GROWTH), "nothing waits"
        else:
            step, reason = max(1.0, self._limit * GROWTH), "clean round"
        self._set(min(float(self._ceiling), self._limit + step), reason)

    def _set(self, limit: float, reason: str) -> None:
        before = self.value
        self._limit = limit
        self.value = int(limit)
        self._still = 0
        self.reason = reason
        if self._changes is not None and self.value != before:
            self._changes(self.value, reason)

    def eased(self, in_flight: int = 0, *, told: bool = True) -> None:
        """A look at the engine showed nothing that speaks against growing.

        Where the engine told so itself several times while the limit was in use, it grows without
        waiting for a clean round, which may take minutes where answers are long.

        Args:
            in_flight: rows that were out at this look.
            told: False where nothing was seen that speaks against growing, but the engine does
                not tell what waits in it. That makes no growth faster.
        """
        self.held = None
        self._quiet = self._quiet + 1 if told else 0
        used = told and in_flight >= USED_SHARE * self._limit
        self._still = self._still + 1 if used else 0
        enough = SLOW_START_POLLS if self._slow_start else QUIET_POLLS
        if self._still >= enough and self._limit < self._ceiling:
            self._grow()

    def hold(self, reason: str) -> None:
        """A look at the engine showed that more in flight would bring nothing: no growth until
        :meth:`eased`. The second in a row ends slow start; the first may be a burst just sent."""
        if self.held is not None:
            self._slow_start = False
        self.held = reason
        self._quiet = 0
        self._still = 0

    def pressed(self, now: float, reason: str, *, keep: float = EASE, least: float = 1.0) -> bool:
        """The engine has had more than it can run for some looks: a cut, and no growth.

        A limit that the user gave stays.

        Args:
            now: requests sent before it that are refused later are answered by this cut.
            reason: in words for people.
            keep: the share of the limit that is left.
            least: rows below which this cut does not go; a limit below it stays as it is.

        Returns:
            whether the limit was cut.
        """
        self.hold(reason)
        self._slow_start = False
        limit = max(1.0, least, self._limit * keep)
        if not self._growing or limit >= self._limit:
            return False
        self._cut_at = now
        self._aim = min(self._aim, limit)
        self._set(limit, reason)
        return True

    def overloaded(self, sent: float, now: float, reason: str) -> None:
        """A request sent at ``sent`` was refused as too much; what went out before a cut is
        answered by that cut already."""
        if self._cut(sent, now, CUT, reason):
            self._slow_start = False

    def throttled(self, sent: float, now: float, reason: str) -> None:
        """A request sent at ``sent`` was refused by a rate limit."""
        self._cut(sent, now, TRIM, reason)

    def _cut(self, sent: float, now: float, keep: float, reason: str) -> bool:
        self._lately.append(False)
        if sent <= self._cut_at:
            return False
        floor = self._floor()
        if self._limit <= max(1.0, floor):
            self._highest = max(self._limit, min(self._highest * DOUBT, self._ceiling))
            return False
        if self._clean:  # of several cuts in a row only the first one says what was too much
            self._aim = max(1.0, self._limit * keep)
            self._clean = False
        self._cut_at = now
        self._round = 0
        self._peak = 0
        self._set(max(1.0, floor, self._limit * keep), reason)
        return True

    def _floor(self) -> float:
        """Where cuts end because refusals do not follow from the limit; 0 where they may."""
        lately = self._lately
        known = len(lately) == LATELY
        if known and sum(lately) * 3 < LATELY:
            self._highest = self._limit
            return 0.0
        self._highest = max(self._highest, self._limit)
        return FLOOR * self._highest if known else 0.0


class RequestPacer:
    """The rate at which an account's requests may start: none until a server says one, or 429.

    After a refusal everything pauses, as long as told or else with doubling patience. Then
    requests start a little slower than they were served just before, and the rate creeps up until
    the next refusal. Where nothing was served, the rate is searched from below, doubling at most
    every second. One pause answers all refusals of requests sent before it.

    Args:
        per_minute: a fixed ceiling, requests per minute; None for no ceiling.
        longest: the longest wait, in seconds, even when told to wait longer.
    """

    WINDOWS = (5.0, 60.0)
    """Seconds over which the served rate is measured; the longer one where the first is empty."""
    FIRST_PAUSE = 1.0
    LONGEST_UNTOLD = 30.0
    BACKOFF = 0.7
    CREEP = 0.03
    """Requests per second added for each request served: 3 % in a second, at any rate."""
    SEARCH = 0.7
    """The same while the rate is searched: e to the 0.7 is 2, so it doubles in a second."""
    FIRST_RATE = 1.0
    SLOWEST = 0.02
    RECOVERY = 1.25
    FASTEST = 10_000.0
    """Requests per second beyond which refusals that say nothing of the rate raise it no more."""
    UNLIKELY = 0.9
    """A refusal below this share of the rate that was too much last time, while at least half of
    the last requests are let in, is none of the rate: slowing down further would not help."""
    LATE = 0.05
    """A start that comes late by less than this many seconds, as timers do, slows nothing down."""

    def __init__(self, per_minute: float | None, longest: float) -> None:
        self._given = per_minute / 60 if per_minute else None
        self._ceiling = self._given
        self._rate = self._ceiling
        self._longest = longest
        self._next = float("-inf")
        self._resume = float("-inf")
        self._paused_at = float("-inf")
        self._strikes = 0
        self._searching = False
        self._served: deque[float] = deque(maxlen=2048)
        self._basis = 0.0
        self._lately: deque[bool] = deque(maxlen=LATELY)

    @property
    def rate(self) -> float | None:
        """Requests per second that may start now; None for no limit."""
        return self._rate

    def allow(self, per_minute: float) -> None:
        """The provider told its own ceiling, in requests per minute: begin there, stay below it.

        A lower one that the user gave stays.
        """
        told = per_minute / 60
        ceiling = told if self._given is None else min(told, self._given)
        if self._rate is None or self._rate == self._ceiling:
            self._rate = ceiling
        self._ceiling = ceiling
        self._rate = min(self._rate, ceiling)

    def wait(self, now: float) -> float:
        """Seconds until the next request may start; 0 for at once."""
        return max(0.0, self._resume - now, self._next - now if self._rate else 0.0)

    def paused(self, now: float) -> float:
        """Seconds that the pause after a refusal still lasts, 0 if there is none."""
        return max(0.0, self._resume - now)

    @property
    def last_served(self) -> float:
        """When a request was last answered well; minus infinity if none was."""
        return self._served[-1] if self._served else float("-inf")

    def started(self, now: float) -> None:
        """A request was started."""
        if self._rate:
            gap = 1 / self._rate
            on_time = gap < self.LATE and now - self._next < self.LATE
            self._next = (self._next if on_time else max(now, self._next)) + gap

    def served(self, now: float, sent: float) -> None:
        """A request sent at ``sent`` was answered well."""
        self._served.append(now)
        self._lately.append(True)
        if sent > self._paused_at:
            self._strikes = 0
        if self._rate is not None:
            step = min(self._rate, self.SEARCH) if self._searching else self.CREEP
            self._rate = self._capped(self._rate + step)

    def passed(self) -> None:
        """A request was let in, and came to nothing for another reason."""
        self._lately.append(True)

    def refused(self, sent: float, now: float, told: float | None) -> float:
        """A request sent at ``sent`` was refused; returns the seconds to wait, capped.

        ``told`` is the server's Retry-After in seconds, or None.
        """
        self._lately.append(False)
        noise = self._is_noise()
        if told is not None and not noise:
            pause = min(told, self._longest)
            self._resume = max(self._resume, now + pause)
        if sent <= self._paused_at:
            return self.paused(now)
        if noise:  # whoever was refused waits as long as told; the others gain nothing by it
            self._recover()
            return self.paused(now)
        self._paused_at = now
        if told is None:
            pause = min(self.FIRST_PAUSE * 2**self._strikes, self.LONGEST_UNTOLD, self._longest)
            self._resume = max(self._resume, now + pause)
        self._strikes = min(self._strikes + 1, 10)
        self._slow_down(now)
        return self.paused(now)

    def _is_noise(self) -> bool:
        """Whether a refusal says nothing of the rate."""
        if self._rate is None or self._searching or self._rate > self.UNLIKELY * self._basis:
            return False
        lately = self._lately
        return len(lately) == LATELY and sum(lately) * 2 >= LATELY

    def _recover(self) -> None:
        """Take back what refusals that said nothing of the rate have cost."""
        assert self._rate is not None
        self._rate = self._capped(max(self._rate, min(self._rate * self.RECOVERY, self.FASTEST)))
        self._basis *= 2  # until at least half is refused, the server takes more

    def _slow_down(self, now: float) -> None:
        """Set the rate to a little less than what was served."""
        seen = self._served_rate(now)
        self._searching = seen == 0
        if self._searching:
            rate = self.FIRST_RATE if self._rate is None else self._rate / 2
        else:
            # A rate above twice what was served was not in use, so the refusal says little of it.
            self._basis = max(seen, min(self._rate or seen, 2 * seen))
            rate = self.BACKOFF * self._basis
        self._rate = self._capped(max(self.SLOWEST, rate))

    def _served_rate(self, now: float) -> float:
        for window in self.WINDOWS:
            recent = [at for at in self._served if at > now - window]
            if recent:
                return len(recent) / max(1.0, now - recent[0])
        return 0.0

    def _capped(self, rate: float) -> float:
        return rate if self._ceiling is None else min(rate, self._ceiling)
