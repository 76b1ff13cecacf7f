"""Rules that stop a run early: alike failures of all rows, too many failures, no money."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from bagent.backends.request import requested_model
from bagent.fleet.call import Call
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

OwnedOutcome = tuple[Hashable, Outcome]
"""The owner of a row's call, or None, and the row's outcome."""


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

    def begin(self, calls: Iterable[Call]) -> None:
        """Note that rows are sent with their first calls."""
        for call in calls:
            model = call.request.settings.model or requested_model(call.request)
            self._open[call.owner] = next(self._numbers), model

    def discard(self, row: Hashable) -> None:
        """Forget a row whose outcome does not count."""
        self._open.pop(row, None)

    def served(self, rows: Iterable[OwnedOutcome]) -> None:
        """End the streaks of the endpoints and models that served rows."""
        servers: set[tuple[str, str | None]] = set()
        for row, outcome in rows:
            _, model = self._open.pop(row, (0, None))
            if outcome.endpoint is not None and outcome.copied_from is None:
                servers.add((outcome.endpoint, model))
                servers.add((EVERYWHERE, model))
        for server in servers:
            streak = self._streak(*server)
            streak.served = True
            streak.numbers.clear()

    def failed(self, row: Hashable, outcome: Outcome) -> str | None:
        """Count the failure of a row; return the reason to stop, if there is one."""
        began = self._open.pop(row, None)
        if outcome.endpoint is None or outcome.copied_from is not None:
            return None
        number, model = began or (next(self._numbers), None)
        for endpoint in (EVERYWHERE, outcome.endpoint):
            reason = self._count(self._streak(endpoint, model), outcome, number, endpoint)
            if reason is not None:
                return reason
        return None

    def _streak(self, endpoint: str, model: str | None) -> _Streak:
        streak = self._streaks.get((endpoint, model))
        if streak is None:
            streak = self._streaks[endpoint, model] = _Streak()
        return streak

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

    def begin(self, calls: Iterable[Call]) -> None:
        """Note that rows are sent with their first calls."""
        if self._early is not None:
            self._early.begin(calls)

    def discard(self, row: Hashable) -> None:
        """Forget a row that other rows replace."""
        if self._early is not None:
            self._early.discard(row)

    def ended(self, rows: Sequence[OwnedOutcome]) -> StopReason | None:
        """Count rows that ended together, as those of one list do; return the reason to stop.

        Those that did not fail count first, so that the failures of the others are not taken for
        failures of all.
        """
        served: list[OwnedOutcome] = []
        failed: list[OwnedOutcome] = []
        for entry in rows:
            outcome = entry[1]
            (served if outcome.status == "ok" or outcome.accepted else failed).append(entry)
        self._done += len(rows)
        if self._early is not None:
            self._early.served(served)
        reason, alike = None, None
        for row, outcome in failed:
            self._failed += 1
            reason = reason or self._limit_reached(outcome)
            if self._early is not None:
                streak = self._early.failed(row, outcome)
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
