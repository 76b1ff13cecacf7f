"""Whether servers refuse row after row alike: then the job or a server is wrong, not the rows."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import msgspec

from bagent.types import PASSING_KINDS, Outcome

ALIKE = 50
"""So many rows in a row that fail with one lasting kind prove it."""

MOST_OPEN = 5
"""Rows sent before those that may still be open: refusals come sooner than answers do, so the rows
that will be answered well have to be waited for."""

CHECK_EVERY = 10

JOB_KINDS = frozenset({"rejected", "auth"})
"""Kinds that speak of the job where others were served well; the rest may be the rows' own."""

EVERYWHERE = ""


class _Streak(msgspec.Struct):
    """Rows of one endpoint and model that failed alike, one after the other."""

    kind: str = ""
    numbers: list[int] = []
    served: bool = False


class EarlyFailures:
    """Counts what servers answered, by endpoint and model, and over all endpoints by model.

    Rows that no server answered, such as bad input, count neither for nor against; failures that
    pass do not either.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[Hashable, tuple[int, str | None]] = {}
        self._streaks: dict[tuple[str, str | None], _Streak] = {}

    def begin(self, row: Hashable, model: str | None) -> None:
        """Take that a row is sent, asking for ``model``."""
        self._open[row] = next(self._numbers), model

    def outcome(self, outcome: Outcome, row: Hashable = None) -> str | None:
        """Count the end of a row; returns what is wrong, None if nothing is."""
        began = self._open.pop(row, None)
        if outcome.endpoint is None or outcome.copied_from is not None:
            return None
        number, model = began or (next(self._numbers), None)
        found = None
        for endpoint in (EVERYWHERE, outcome.endpoint):
            streak = self._streaks.setdefault((endpoint, model), _Streak())
            found = found or self._count(streak, outcome, number, endpoint)
        return found

    def _count(self, streak: _Streak, outcome: Outcome, number: int, endpoint: str) -> str | None:
        kind = outcome.error_kind or outcome.status
        if not outcome.failed:
            streak.served = True
            streak.numbers.clear()
            return None
        if kind in PASSING_KINDS or (streak.served and kind not in JOB_KINDS):
            return None
        if kind != streak.kind:
            streak.kind = kind
            streak.numbers.clear()
        streak.numbers.append(number)
        count = len(streak.numbers)
        if count < ALIKE or (count - ALIKE) % CHECK_EVERY or not self._decided(streak.numbers):
            return None
        who = endpoint or "servers"
        which = f"the last {count} rows that {who} answered" if streak.served else f"all {count}"
        which += "" if streak.served else f" rows that {who} answered so far"
        return f"{which} failed alike ({kind}): {outcome.error}"

    def _decided(self, numbers: list[int]) -> bool:
        """Whether hardly a row is open that was sent before the first of these."""
        limit = sorted(numbers)[ALIKE - 1]
        still_open = (number for number, _ in self._open.values())
        earlier = itertools.takewhile(lambda number: number < limit, still_open)
        return sum(1 for _ in itertools.islice(earlier, MOST_OPEN + 1)) <= MOST_OPEN
