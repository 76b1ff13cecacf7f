"""Which calls begin alike, so that one endpoint's prefix cache can serve them: pure objects.

A prompt is looked at in blocks; a block is named by a hash over everything up to its end, as in the
engines' own caches. What all rows share tells nothing about where a row should go, so it is left
out of account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from bagent.backends.request import CallSettings, Request

BYTES_PER_TOKEN = 4
"""Of English text and code, where nobody has counted."""

BLOCK = 256
"""Bytes in one block: some 64 tokens, four blocks of an engine's cache."""

LONGEST = 32_768
"""Bytes of a prompt that are looked at: 8,000 tokens tell two documents apart."""

LEAST = 1024
"""Bytes beyond what all rows share from which calls are kin: less saves too little to care."""

LEAST_SHARE = 1 / 3
"""Of a prompt, less what all share, so much must be alike: else two documents that have a heading
in common would be one."""

WINDOW = 256
"""Rows over which is judged what all share, and whether looking pays."""

WINDOWS = 8
"""So many windows are remembered: rows of one long document may fill one or two alone."""

PAYS = 0.1
"""Share of the prompts' bytes that must be kin's; else the next windows are not looked at."""

REMEMBERED = 1 << 15
"""Blocks remembered, in each of two generations: some 6 MB."""

MOST_HOMES = 4
"""Endpoints named as a family's; the longest known is forgotten first."""

WARM_TOKENS = 1024
"""Shared tokens from which an endpoint may be warmed: hosted caches keep no shorter prefix."""

WARM_SAVES = 8192
"""Prompt tokens that warming must save: as many as an engine prefills in one step."""


class PrefixRule(msgspec.Struct, frozen=True):
    """``auto`` does what pays, ``never`` nothing, ``always`` also what is not known to pay."""

    mode: Literal["auto", "always", "never"] = "auto"

    def warms(self, *, own: bool) -> bool:
        """Whether an endpoint that is cold may be warmed.

        ``own`` engines share at once: on a real vLLM it saved nothing
        (:mod:`bagent.fleet.scheduler` has the numbers).
        """
        return self.mode == "always" or (self.mode == "auto" and not own)


class PrefixGroup:
    """Calls whose prompts begin alike; ``homes`` are the endpoints that have met that beginning."""

    __slots__ = ("homes",)

    def __init__(self) -> None:
        self.homes: dict[str, None] = {}

    def met(self, endpoint: str) -> None:
        """``endpoint`` is sent one of them."""
        if endpoint not in self.homes:
            self.homes[endpoint] = None
            if len(self.homes) > MOST_HOMES:
                del self.homes[next(iter(self.homes))]


class PrefixAffinity:
    """Finds the families of calls, apart for each settings."""

    def __init__(self, rule: PrefixRule) -> None:
        self._rule = rule
        self._by_settings: dict[CallSettings, Prefixes] = {}

    def family_of(self, request: Request) -> PrefixGroup | None:
        """See :meth:`Prefixes.family_of`."""
        found = self._by_settings.get(request.settings)
        if found is None:
            if self._rule.mode == "never":
                return None
            found = Prefixes(always=self._rule.mode == "always")
            self._by_settings[request.settings] = found
        return found.family_of(request.payload)


class Prefixes:
    """Finds the families of calls as they come; one object for calls of the same settings.

    Args:
        always: look even where nothing was found for a while.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._young: dict[int, PrefixGroup] = {}
        self._old: dict[int, PrefixGroup] = {}
        self._start: bytes | None = None
        self._starts: deque[int] = deque(maxlen=WINDOWS)
        self._rows = self._bytes = self._kin = 0
        self._skip = 0

    @property
    def common(self) -> int:
        """Bytes that all of the last rows begin with."""
        now = len(self._start) if self._start is not None else 0
        return min(now, *self._starts) if self._starts else now

    def family_of(self, payload: bytes) -> PrefixGroup | None:
        """The family of a call with this prompt, new if there is none yet; None: not looked at."""
        self._note(payload)
        if self._skip or len(payload) < LEAST + BLOCK:
            return None
        chain = _chain(payload)
        young, old = self._young, self._old
        family, depth = None, len(chain)
        for name in reversed(chain):
            family = young.get(name) or old.get(name)
            if family is not None:
                break
            depth -= 1
        common = self.common
        alike = depth * BLOCK - common
        if family is None or alike < max(LEAST, LEAST_SHARE * (len(payload) - common)):
            family = PrefixGroup()
        else:
            self._kin += alike
        for name in chain[depth:]:
            young[name] = family
        if depth and chain[depth - 1] in old:
            young[chain[depth - 1]] = old[chain[depth - 1]]
        if len(young) > REMEMBERED:
            self._old, self._young = young, {}
        return family

    def _note(self, payload: bytes) -> None:
        start = self._start
        if start is None:
            self._start = payload[:LONGEST]
        elif not payload.startswith(start):
            self._start = start[: common_start(start, payload)]
        self._rows += 1
        self._bytes += min(len(payload), LONGEST)
        if self._rows < WINDOW:
            return
        self._starts.append(len(self._start or b""))
        if self._skip:
            self._skip -= 1
        elif self._kin < PAYS * self._bytes and not self._always:
            self._skip = WINDOWS - 1
            self._young, self._old = {}, {}
        self._start, self._rows, self._bytes, self._kin = None, 0, 0, 0


def _chain(payload: bytes) -> list[int]:
    """One number for each full block of the prompt; it stands for everything up to its end."""
    last = 0
    chain = []
    for end in range(BLOCK, min(len(payload), LONGEST) + 1, BLOCK):
        last = hash((last, payload[end - BLOCK : end]))
        chain.append(last)
    return chain


def common_start(one: bytes, other: bytes) -> int:
    """How many bytes two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def warming_saves(payloads: Sequence[bytes], rows: int) -> int:
    """Prompt tokens that are not computed again if one of the calls goes first; 0: not worth it.

    Args:
        payloads: prompts of some of the calls that are about to go to an endpoint.
        rows: how many are.
    """
    if len(payloads) < 2:
        return 0
    first, least = payloads[0], min(len(one) for one in payloads)
    for other in payloads[1:]:
        least = min(least, common_start(first[:least], other))
    tokens = least // BYTES_PER_TOKEN
    saved = tokens * (rows - 1)
    return saved if tokens >= WARM_TOKENS and saved >= WARM_SAVES else 0
