"""Which beginning of a stage's prompts is the same for all rows: what is worth caching.

Providers with explicit prompt caches bill a marked prefix 1.25 times when it is written, 0.1 times
when it is read, and ignore marks on prefixes below a minimum of 1,024 to 4,096 tokens without an
error. Source: Anthropic's and Amazon Bedrock's documentation of prompt caching.
"""

from __future__ import annotations

import msgspec

MIN_CHARS = 3500
"""Shorter prefixes are below the minimum of every model: 1,024 tokens of English text."""

MIN_USER_CHARS = 1000
"""A user prefix gets a mark of its own from so many characters on."""


class Marks(msgspec.Struct, frozen=True):
    """Where marks go: after the system text, and after so many characters of the first user text
    (0 for none)."""

    system: bool = False
    user: int = 0


class SharedPrefix:
    """Compares the prompts of one stage as they go out; the memory is one prompt."""

    def __init__(self) -> None:
        self._system: str | None = None
        self._same_system = True
        self._user: str | None = None
        self._rows = 0

    def look(self, fixed: int, system: str, user: str) -> Marks:
        """The marks for a prompt whose tools have ``fixed`` characters.

        A system text is taken as shared until another one is seen; a beginning of the user text
        once two rows have it.
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
        """The shared beginning up to a place where words end, and less than the whole text."""
        if len(shared) == len(user):
            shared = shared[:-1]
        end = max(shared.rfind("\n"), shared.rfind(" "))
        cut = shared[: end + 1]
        return cut if cut.strip() else ""


def _equal(first: str, second: str) -> int:
    """How many characters both begin with, found by halving: no loop over characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if second.startswith(first[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
