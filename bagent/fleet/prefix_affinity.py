"""Grouping of prompts by common prefix, so that one endpoint's prefix cache can serve them.

A prompt is split into blocks, each named by a hash of everything up to its end, as in the engines'
own caches. What all rows share does not help to route them, and is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from bagent.backends.request import CallSettings, Request

BYTES_PER_TOKEN = 4
"""Of English text and code."""

BLOCK = 256
"""Bytes of a block: about 64 tokens, or four blocks of an engine's cache."""

MAX_BYTES = 32_768
"""Bytes of a prompt that are hashed: 8,000 tokens distinguish two documents."""

MIN_SHARED = 1024
MIN_SHARE = 1 / 3
"""Prompts are grouped if they share this many bytes and this share of the prompt, besides what all
rows share. Otherwise two documents with a common heading would be one."""

WINDOW = 256
"""Rows over which the common prefix, and the benefit of grouping, are measured."""

WINDOWS = 8
"""Windows over which the common prefix is taken: rows of one long document may fill one or two."""

MIN_BENEFIT = 0.1
"""Share of the bytes that must be shared within groups; else the next windows are skipped."""

MAX_BLOCKS = 1 << 15
"""Blocks remembered in each of two generations: about 6 MB."""

MAX_ENDPOINTS = 4
"""Endpoints remembered for a group; the oldest is forgotten first."""

WARM_TOKENS = 1024
"""Shared tokens from which a cache is warmed: hosted caches hold no shorter prefix."""

WARM_SAVES = 8192
"""Prompt tokens that warming must save: as many as an engine prefills in one step."""


class PrefixRule(msgspec.Struct, frozen=True):
    """``auto`` does what pays, ``never`` nothing, ``always`` also what is not known to pay."""

    mode: Literal["auto", "always", "never"] = "auto"

    def warms(self, *, own: bool) -> bool:
        """Return whether a cold endpoint may be warmed.

        Own engines share prefixes between running requests; on vLLM warming saved nothing.
        """
        return self.mode == "always" or (self.mode == "auto" and not own)


class PrefixGroup:
    """Calls with a common prefix, and the endpoints that have it cached."""

    __slots__ = ("cached_on",)

    def __init__(self) -> None:
        self.cached_on: dict[str, None] = {}

    def add_endpoint(self, endpoint: str) -> None:
        """Record that ``endpoint`` gets one of the calls."""
        if endpoint not in self.cached_on:
            self.cached_on[endpoint] = None
            if len(self.cached_on) > MAX_ENDPOINTS:
                del self.cached_on[next(iter(self.cached_on))]


class PrefixAffinity:
    """Assigns calls to prefix groups, separately for each settings."""

    def __init__(self, rule: PrefixRule) -> None:
        self._rule = rule
        self._by_settings: dict[CallSettings, PrefixIndex] = {}

    def group_of(self, request: Request) -> PrefixGroup | None:
        """Return the group of a request, None if prefixes are not looked at."""
        index = self._by_settings.get(request.settings)
        if index is None:
            if self._rule.mode == "never":
                return None
            index = PrefixIndex(always=self._rule.mode == "always")
            self._by_settings[request.settings] = index
        return index.group_of(request.payload)


class PrefixIndex:
    """Prefix groups of the prompts of one settings.

    Args:
        always: do not skip windows where grouping brought nothing.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._young: dict[int, PrefixGroup] = {}
        self._old: dict[int, PrefixGroup] = {}
        self._start: bytes | None = None  # common prefix of this window
        self._starts: deque[int] = deque(maxlen=WINDOWS)
        self._rows = self._bytes = self._shared = 0
        self._skip = 0

    @property
    def common(self) -> int:
        """Bytes that all of the last rows begin with."""
        length = len(self._start) if self._start is not None else 0
        return min(length, *self._starts) if self._starts else length

    def group_of(self, payload: bytes) -> PrefixGroup | None:
        """Return the group of a prompt, a new one if needed; None if it is not looked at."""
        self._measure(payload)
        if self._skip or len(payload) < MIN_SHARED + BLOCK:
            return None
        chain = _chain(payload)
        young, old = self._young, self._old
        group, depth = None, len(chain)
        for name in reversed(chain):
            group = young.get(name) or old.get(name)
            if group is not None:
                break
            depth -= 1
        common = self.common
        shared = depth * BLOCK - common
        if group is None or shared < max(MIN_SHARED, MIN_SHARE * (len(payload) - common)):
            group = PrefixGroup()
        else:
            self._shared += shared
        for name in chain[depth:]:
            young[name] = group
        if depth and chain[depth - 1] in old:
            young[chain[depth - 1]] = old[chain[depth - 1]]
        if len(young) > MAX_BLOCKS:
            self._old, self._young = young, {}
        return group

    def _measure(self, payload: bytes) -> None:
        start = self._start
        if start is None:
            self._start = payload[:MAX_BYTES]
        elif not payload.startswith(start):
            self._start = start[: common_prefix(start, payload)]
        self._rows += 1
        self._bytes += min(len(payload), MAX_BYTES)
        if self._rows < WINDOW:
            return
        self._starts.append(len(self._start or b""))
        if self._skip:
            self._skip -= 1
        elif self._shared < MIN_BENEFIT * self._bytes and not self._always:
            self._skip = WINDOWS - 1
            self._young, self._old = {}, {}
        self._start, self._rows, self._bytes, self._shared = None, 0, 0, 0


def _chain(payload: bytes) -> list[int]:
    """Return a hash for each full block of the prompt, of everything up to its end."""
    last = 0
    chain = []
    for end in range(BLOCK, min(len(payload), MAX_BYTES) + 1, BLOCK):
        last = hash((last, payload[end - BLOCK : end]))
        chain.append(last)
    return chain


def common_prefix(first: bytes, second: bytes) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def warming_saves(payloads: Sequence[bytes], rows: int) -> int:
    """Return the prompt tokens saved if one call goes ahead; 0 if it is not worth it.

    Args:
        payloads: prompts of some of the calls that an endpoint is about to get.
        rows: how many calls it gets.
    """
    if len(payloads) < 2:
        return 0
    first, common = payloads[0], min(len(payload) for payload in payloads)
    for other in payloads[1:]:
        common = min(common, common_prefix(first[:common], other))
    tokens = common // BYTES_PER_TOKEN
    saved = tokens * (rows - 1)
    return saved if tokens >= WARM_TOKENS and saved >= WARM_SAVES else 0
