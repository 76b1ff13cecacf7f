"""How many rows the next request should carry: a pure rule.

A list of prompts lifts the load off a server's HTTP front end, but is as slow as its slowest row
and fails as a whole. So groups grow with the load and shrink with the length of answers and
towards the end of a run.
"""

from __future__ import annotations

import msgspec

GROUP_TOKENS = 8192
"""Completion tokens that one group should bring at most: of long answers the slowest decides."""

IN_FLIGHT = 8
"""Groups that an endpoint should have in flight. Two would do to keep it busy, but a group is
prepared row by row and comes back as a whole: on an H200 groups of 64 with a thousand rows in
flight brought a tenth to a fifth more rows a second than groups of 256."""

LEAST = 16
"""Rows of a group where load and room allow: fewer lose what groups are for."""

LINGER = 0.02
"""Seconds for which a group that is not full waits for more rows."""

LONG_LINGER = 0.25
"""The same where the user named the size of groups."""


class BatchSizeRule(msgspec.Struct, frozen=True):
    """``size`` is the user's number, None for automatic; ``single`` sends each row alone.

    Where groups are wanted but an endpoint takes none, one call in ``stream_every`` is streamed
    for its first-token time; 0 streams none.
    """

    size: int | None = None
    single: bool = True
    stream_every: int = 0


class Supply(msgspec.Struct, frozen=True):
    """What is there to be sent: ready rows, endpoints with room, and whether more rows come."""

    ready: int
    endpoints: int
    more: bool


def group_size(
    rule: BatchSizeRule, most: int, limit: int, room: int, supply: Supply, expected: float
) -> int:
    """Rows for the next request to an endpoint, at least 1.

    ``most`` is what its protocol takes, ``limit`` how many rows it may have in flight and ``room``
    how many more now, ``expected`` the completion tokens of a row.
    """
    most = min(most, room)
    if rule.size is not None:
        return max(1, min(rule.size, most))
    fair = by_load(limit)
    by_length = max(1, int(GROUP_TOKENS / max(1.0, expected)))
    share = supply.ready if supply.more else -(-supply.ready // max(1, supply.endpoints))
    return max(1, min(most, fair, by_length, share))


def by_load(limit: int) -> int:
    """Rows of a group at an endpoint that may have ``limit`` rows in flight."""
    return max(1, limit // IN_FLIGHT, min(LEAST, limit // 2))


def too_little_room(rule: BatchSizeRule, most: int, limit: int, room: int, supply: Supply) -> bool:
    """Whether an endpoint at work should rather finish more before it takes the next group.

    Else groups fall to pieces: each small one that comes back makes room for another small one.
    """
    usual = min(most, rule.size or by_load(limit))
    least = usual if rule.size is not None else -(-usual // 2)
    return room < min(least, supply.ready)


def waits_for_more(rule: BatchSizeRule, supply: Supply, full: int, waited: float) -> bool:
    """Whether a group should wait, since ``full`` rows could go, fewer are ready and more come."""
    return supply.more and supply.ready < full and waited < linger(rule)


def linger(rule: BatchSizeRule) -> float:
    """Seconds for which a group waits to be full."""
    return LINGER if rule.size is None else LONG_LINGER
