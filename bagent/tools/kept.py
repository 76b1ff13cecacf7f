"""Answers that are kept for a while."""

from __future__ import annotations

from collections import OrderedDict

MOST = 1024


class Kept:
    """The answers of one tool, each for ``seconds``; the one asked for longest ago goes first.

    Args:
        seconds: how long an answer may be given again.
        most: how many answers there are at most.
    """

    def __init__(self, seconds: float, most: int = MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._answers: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes, now: float) -> str | None:
        """The answer of ``key``, None if there is none or it is too old at ``now`` (seconds)."""
        found = self._answers.get(key)
        if found is None:
            return None
        if now >= found[0]:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return found[1]

    def put(self, key: bytes, text: str, now: float) -> None:
        """Keep an answer that came at ``now``."""
        self._answers[key] = (now + self._seconds, text)
        self._answers.move_to_end(key)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)
