"""When a run should stop because going on would burn every row alike: pure counting."""

from __future__ import annotations

import msgspec

from bagent.types import PASSING_KINDS, Outcome

CANARY = 50
"""So many first rows failing with one lasting kind prove that the job, not the rows, is wrong."""


class StopAdvice(msgspec.Struct, frozen=True):
    """Why to stop, for people, and what they should do first."""

    reason: str
    hint: str


class Guards:
    """Watches outcomes; ``outcome`` returns advice once a limit is passed.

    Args:
        canary: whether to stop when the first 50 finished rows fail with the same lasting kind.
        stop_after: stop after so many failed rows; None for never.
    """

    def __init__(self, *, canary: bool, stop_after: int | None) -> None:
        self._canary = canary
        self._stop_after = stop_after
        self._done = 0
        self._failed = 0
        self._first_kind: str | None = None

    def outcome(self, outcome: Outcome) -> StopAdvice | None:
        """Count one finished row."""
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
        return self._check_canary(outcome)

    def _check_canary(self, outcome: Outcome) -> StopAdvice | None:
        if not self._canary or self._done > CANARY:
            return None
        kind = outcome.error_kind or outcome.status
        if not outcome.failed or kind in PASSING_KINDS:
            self._canary = False
            return None
        if self._first_kind is None:
            self._first_kind = kind
        if kind != self._first_kind:
            self._canary = False
            return None
        if self._done < CANARY:
            return None
        return StopAdvice(
            f"all of the first {CANARY} rows failed alike ({kind}): {outcome.error}",
            "mend the cause, or let the run go on with --no-canary",
        )
