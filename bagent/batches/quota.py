"""How much of an account's quota of enqueued tokens a run may use: found out from refusals.

A pure object: it knows no network and no clock. A provider tells the quota only in its refusals,
and other programs of the same account use it too.
"""

from __future__ import annotations

import re

FIRST_WAIT = 60.0
LONGEST_WAIT = 900.0
"""Seconds until a refused batch is tried again although nothing of ours ended meanwhile."""

ALONE = 3
"""So often a batch is refused while nothing else of ours is there before it is halved."""

SHARE = 0.95
"""Of a quota that was told, what our own estimates may use: they are not exact."""

_QUOTA = re.compile(
    r"token_limit_exceeded|enqueued[ _]token|request_limit_exceeded|service\W?quota\W?exceeded"
    r"|too many (active |in.progress )?(batch|job)|(batch|job)\w* (queue )?(limit|quota)"
    r"|quota.{0,60}(batch|job|record)s?\b",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"limit:?\s*([\d,]{3,})\s*(enqueued|tokens)", re.IGNORECASE)


def is_quota(words: str) -> bool:
    """Whether a refusal says that too much is with the provider already: waiting is the cure."""
    return bool(_QUOTA.search(words))


class Quota:
    """The quota of one model, in tokens of prompts.

    ``cap`` is what may be with the provider at once, None where nothing is known of it.
    """

    def __init__(self) -> None:
        self.cap: int | None = None
        self._told = False
        self._out_then = 0
        self._again_at = 0.0
        self._wait = FIRST_WAIT
        self._alone = 0

    def admits(self, tokens: int, out: int, now: float) -> bool:
        """Whether a batch may be sent while ``out`` tokens of ours are with the provider."""
        if self._told and self.cap is not None and out and out + tokens > self.cap:
            return False
        if now >= self._again_at:
            return True
        return out < self._out_then and (self.cap is None or out + tokens <= self.cap)

    def too_large(self, tokens: int) -> bool:
        """Whether a batch of so many tokens can never be taken."""
        return self.cap is not None and tokens > self.cap and (self._told or self._alone >= ALONE)

    def refused(self, words: str, tokens: int, out: int, now: float) -> None:
        """A batch was refused while ``out`` other tokens of ours were with the provider."""
        self._out_then = out
        self._again_at = now + self._wait
        self._wait = min(LONGEST_WAIT, 2 * self._wait)
        told = _LIMIT.search(words)
        if told is not None:
            self._told, self.cap = True, max(1, int(int(told[1].replace(",", "")) * SHARE))
        elif out:
            self.cap = max(self.cap or 0, out)
        else:
            self._alone += 1
            if self._alone >= ALONE:
                self.cap = max(1, tokens // 2)

    def taken(self) -> None:
        """A batch was accepted."""
        self._wait = FIRST_WAIT
        self._again_at = 0.0
        self._alone = 0

    @property
    def again_at(self) -> float:
        """When a refused batch is tried again at the latest."""
        return self._again_at
