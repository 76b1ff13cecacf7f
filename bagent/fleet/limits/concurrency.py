"""The limit on an endpoint's requests in flight: a pure object with an injected clock.

It follows TCP congestion control (RFC 5681): slow start, recovery to the level after the first of
several cuts, small steps beyond it, and one cut per episode.
"""

from __future__ import annotations

import math
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
        self._most = math.inf  # rows that fit into the engine's KV cache
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
        if used and self.held is None:
            self._grow()
        self._round = 0
        self._peak = 0

    def on_other_failure(self) -> None:
        """Record that a request was accepted and failed for another reason than a limit."""
        self._latest.append(True)

    def _grow(self) -> None:
        ceiling = min(float(self._ceiling), self._most)
        if self._limit >= ceiling:
            return
        if self._slow_start:
            step, reason = self._limit, "slow start"
        elif self._limit < self._recovery:
            step, reason = min(self._limit, self._recovery - self._limit), "recovery"
        elif self._quiet_polls >= QUIET_POLLS:
            step, reason = max(1.0, self._limit * QUIET_GROWTH), "nothing waits"
        else:
            step, reason = max(1.0, self._limit * GROWTH), "clean round"
        self._set(min(ceiling, self._limit + step), reason)

    def _set(self, limit: float, reason: str) -> None:
        before = self.value
        self._limit = limit
        self.value = int(limit)
        self._busy_polls = 0
        self.reason = reason
        if self._changes is not None and self.value != before:
            self._changes(self.value, reason)

    def allow_growth(
        self, in_flight: int = 0, *, reported: bool = True, most: float = math.inf
    ) -> None:
        """Allow growth after a poll of the engine that showed no queue.

        After several such polls with the limit in use it grows without waiting for a clean round,
        which takes minutes where answers are long.

        Args:
            in_flight: rows in flight at this poll.
            reported: False if the engine does not report its queue; growth is then not faster.
            most: rows that fit into the engine's KV cache; it does not grow beyond them.
        """
        self.held = None
        self._most = most
        self._quiet_polls = self._quiet_polls + 1 if reported else 0
        used = reported and in_flight >= USED_SHARE * self._limit
        self._busy_polls = self._busy_polls + 1 if used else 0
        enough = SLOW_START_POLLS if self._slow_start else QUIET_POLLS
        if self._busy_polls >= enough:
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
