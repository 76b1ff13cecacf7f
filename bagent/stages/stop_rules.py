"""Rules that stop a run early: alike failures of all rows, too many failures, no money."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import msgspec

from bagent.backends.request import Request, requested_model
from bagent.observe.formatting import counted
from bagent.types import PASSING_KINDS, Outcome

ALIKE = 50
"""Consecutive rows that must fail with one lasting kind."""

MOST_OPEN = 5
"""Rows sent before those that may still be in flight: refusals come sooner than answers do."""

CHECK_EVERY = 10

JOB_KINDS = frozenset({"rejected", "auth"})
"""Kinds that are the job's fault even where other rows were served; others may be the rows' own."""

EVERYWHERE = ""


class _Streak(msgspec.Struct):
    """Consecutive rows of one endpoint and model that failed alike."""

    kind: str = ""
    numbers: list[int] = []
    served: bool = False


class EarlyFailures:
    """Counts alike failures by endpoint and model, and over all endpoints by model.

    Rows that no server answered, such as bad input, and passing failures are not counted.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[Hashable, tuple[int, str | None]] = {}
        self._streaks: dict[tuple[str, str | None], _Streak] = {}

    def begin(self, row: Hashable, model: str | None) -> None:
        """Note that a row is sent to ``model``."""
        self._open[row] = next(self._numbers), model

    def discard(self, row: Hashable) -> None:
        """Forget a row whose outcome does not count."""
        self._open.pop(row, None)

    def outcome(self, outcome: Outcome, row: Hashable = None) -> str | None:
        """Count the end of a row; return the reason to stop, if there is one."""
        began = self._open.pop(row, None)
        if outcome.endpoint is None or outcome.copied_from is not None:
            return None
        number, model = began or (next(self._numbers), None)
        reason = None
        for endpoint in (EVERYWHERE, outcome.endpoint):
            streak = self._streaks.get((endpoint, model))
            if streak is None:
                streak = self._streaks[endpoint, model] = _Streak()
            if not outcome.failed:
                streak.served = True
                streak.numbers.clear()
            elif reason is None:
                reason = self._count(streak, outcome, number, endpoint)
        return reason

    def _count(self, streak: _Streak, outcome: Outcome, number: int, endpoint: str) -> str | None:
        kind = outcome.error_kind or outcome.status
        if kind in PASSING_KINDS:
            return None
        if kind != streak.kind:
            streak.kind = kind
            streak.numbers.clear()
        if streak.served and kind not in JOB_KINDS:
            return None
        streak.numbers.append(number)
        count = len(streak.numbers)
        if count < ALIKE or (count - ALIKE) % CHECK_EVERY or not self._decided(streak.numbers):
            return None
        subject = endpoint or "servers"
        which = (
            f"the last {count} rows that {subject} answered" if streak.served else f"all {count}"
        )
        which += "" if streak.served else f" rows that {subject} answered so far"
        return f"{which} failed alike ({kind}): {outcome.error}"

    def _decided(self, numbers: list[int]) -> bool:
        """Return whether nearly all rows that were sent before these have ended."""
        limit = sorted(numbers)[ALIKE - 1]
        still_open = (number for number, _ in self._open.values())
        earlier = itertools.takewhile(lambda number: number < limit, still_open)
        return sum(1 for _ in itertools.islice(earlier, MOST_OPEN + 1)) <= MOST_OPEN


class StopReason(msgspec.Struct, frozen=True):
    """Why a run stops, and what to do first."""

    reason: str
    hint: str


class StopRules:
    """Counts outcomes and returns a reason to stop once a limit is passed.

    Args:
        canary: whether to stop when servers refuse row after row with one lasting kind.
        stop_after: failed rows after which to stop; None for never.
    """

    def __init__(self, *, canary: bool, stop_after: int | None) -> None:
        self._early = EarlyFailures() if canary else None
        self._stop_after = stop_after
        self._done = 0
        self._failed = 0

    def begin(self, row: Hashable, request: Request) -> None:
        """Note that a row is sent with its first request."""
        if self._early is not None:
            self._early.begin(row, request.settings.model or requested_model(request))

    def discard(self, row: Hashable) -> None:
        """Forget a row that other rows replace."""
        if self._early is not None:
            self._early.discard(row)

    def ended(self, rows: Iterable[tuple[Hashable, Outcome]]) -> StopReason | None:
        """Count rows that ended together, as those of one list do; return the reason to stop.

        Each outcome comes with the row that was given to :meth:`begin`, or None. Those that did not
        fail count first, so that the failures of the others are not taken for failures of all.
        """
        reason, alike = None, None
        for row, outcome in sorted(rows, key=lambda ended: ended[1].failed):
            self._done += 1
            self._failed += outcome.failed
            reason = reason or self._limit_reached(outcome)
            if self._early is not None:
                streak = self._early.outcome(outcome, row)
                alike = alike or streak
        if reason is not None or alike is None:
            return reason
        ok = counted(self._done - self._failed, "row")
        return StopReason(
            f"{alike}; {ok} ok, {self._failed} not ok in this start",
            "remove the cause, or let the run go on with --no-canary",
        )

    def _limit_reached(self, outcome: Outcome) -> StopReason | None:
        if outcome.error_kind == "budget":
            return StopReason(
                f"the account cannot pay: {outcome.error}", "raise the quota or change the key"
            )
        if self._stop_after is not None and self._failed >= self._stop_after:
            return StopReason(
                f"{counted(self._failed, 'row')} failed (limits.stop_after_failures);"
                f" the last: {outcome.error}",
                "look at the failures, then raise the limit or remove the cause",
            )
        return None
