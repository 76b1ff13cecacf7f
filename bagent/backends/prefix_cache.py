"""Detection of prompt prefixes that all rows of a stage share, for explicit prompt caches.

Providers bill a marked prefix 1.25 times when it is written and 0.1 times when it is read. They
ignore marks on prefixes below a minimum of 1,024 to 4,096 tokens. Source: Anthropic's and Amazon
Bedrock's documentation of prompt caching.
"""

from __future__ import annotations

import msgspec

MIN_CHARS = 3500
"""Shorter prefixes are below every model's minimum: 1,024 tokens of English text."""

MIN_USER_CHARS = 1000
"""Minimal length of a user prefix with a mark of its own."""


class Marks(msgspec.Struct, frozen=True):
    """Positions of cache marks in a prompt."""

    system: bool = False
    """Whether to mark the end of the system text."""
    user: int = 0
    """Characters of the first user text before a mark, 0 for none."""


class SharedPrefix:
    """Compares the prompts of one stage as they are sent; keeps one prompt in memory."""

    def __init__(self) -> None:
        self._system: str | None = None
        self._same_system = True
        self._user: str | None = None
        self._rows = 0

    def look(self, fixed: int, system: str, user: str) -> Marks:
        """Return the marks for a prompt whose tools have ``fixed`` characters.

        A system text counts as shared until another one is seen, the beginning of a user text once
        two rows have it.
        """
        self._same_system &= self._system is None or self._system == system
        self._system = system
        if not self._same_system:
            return Marks()
        if self._user is None:
            self._user = user
        elif not user.startswith(self._user):
            self._user = self._user[: _equal(self._user, user)]
        self._rows += 1
        shared = len(self._cut(self._user, user)) if self._rows > 1 else 0
        length = fixed + len(system)
        reach = length + shared
        return Marks(
            system=length >= MIN_CHARS,
            user=shared if shared >= MIN_USER_CHARS and reach >= MIN_CHARS else 0,
        )

    @staticmethod
    def _cut(shared: str, user: str) -> str:
        """Return the shared beginning up to the end of a word, shorter than the whole text."""
        if len(shared) == len(user):
            shared = shared[:-1]
        end = max(shared.rfind("\n"), shared.rfind(" "))
        cut = shared[: end + 1]
        return cut if cut.strip() else ""


def _equal(first: str, second: str) -> int:
    """Return the length of the common beginning, by bisection."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if second.startswith(first[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
