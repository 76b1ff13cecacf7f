"""When a run should stop because going on would burn every row alike: pure counting."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from bagent.backends.request import Request, asked_model
from bagent.stages.early_failures import EarlyFailures
from bagent.types import Outcome


class StopAdvice(msgspec.Struct, frozen=True):
    """Why to stop, for people, and what they should do first."""

    reason: str
    hint: str


class Guards:
    """Watches outcomes; ``outcome`` returns advice once a limit is passed.

    Args:
        canary: whether to stop when servers refuse row after row with the same lasting kind.
        stop_after: stop after so many failed rows; None for never.
    """

    def __init__(self, *, canary: bool, stop_after: int | None) -> None:
        self._early = EarlyFailures() if canary else None
        self._stop_after = stop_after
        self._done = 0
        self._failed = 0

    def begin(self, row: Hashable, request: Request) -> None:
        """Take that a row is sent with its first request."""
        if self._early is not None:
            self._early.begin(row, asked_model(request))

    def outcome(self, outcome: Outcome, row: Hashable = None) -> StopAdvice | None:
        """Count one finished row; ``row`` is what :meth:`begin` was given."""
        self._done += 1
        kind = outcome.error_kind
        if outcome.failed:
            self._failed += 1
        if kind == "budget":
            return StopAdvice(
                f"the account can not pay: {outcome.error}", "raise the quota or change the key"
            )
        if self._stop_after is not None and self._failed >= self._stop_after:
            return StopAdvice(
                f"{self._failed} rows failed (limits.stop_after_failures);"
                f" the last: {outcome.error}",
                "look at the failures, then raise the limit or mend the cause",
            )
        wrong = None if self._early is None else self._early.outcome(outcome, row)
        if wrong is None:
            return None
        counts = f"{self._done - self._failed} rows ok, {self._failed} not ok in this start"
        return StopAdvice(
            f"{wrong}; {counts}", "mend the cause, or let the run go on with --no-canary"
        )
