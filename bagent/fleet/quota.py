"""What is left of a limit that a provider told: a pure object with a clock.

Times are seconds on any monotonic clock. Requests that were started after the one whose answer
told what is left are not in that number yet; they are counted against it here.
"""

from __future__ import annotations

from bagent.backends.rate_headers import DAY, MINUTE, Allowance

LITTLE = 0.001
"""Seconds added to a wait, lest a rounding error make it end too soon."""

CONTRADICTIONS = 4
"""So many good answers one after the other that tell the same small rest show that it is no count:
a count that tells 0 has one such answer, and the next is refused."""

SMALL = 10
"""A rest below this may hold requests back."""

_SURE = 20
"""So many answers that fit a bucket, or do not, outweigh as many others at most."""


class Quota:
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
