"""Which rows a reduction puts together: pure, and the same whatever ended first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bagent.stages.items import Item

LEAST_ROOM = 64
"""Tokens that the answers of a group may have at least, however long the prompt around them."""


class GroupRule(msgspec.Struct, frozen=True):
    """How large a group may be.

    ``fanin`` is how many answers, None for no limit. ``room`` is how many tokens they may have
    together, None where the context is not known; two of them always fit, since each is cut to
    half of it.
    """

    fanin: int | None
    room: int | None

    @property
    def longest(self) -> int | None:
        """How many tokens of one answer are shown at most."""
        return None if self.room is None else max(LEAST_ROOM, self.room) // 2


class Former:
    """Forms groups of rows that come in order.

    Args:
        emit: gets each group once no further row belongs to it.
    """

    def __init__(self, rule: GroupRule, emit: Callable[[list[Item]], None]) -> None:
        self._rule = rule
        self._emit = emit
        self._tokens = 0
        self.group: list[Item] = []

    def add(self, item: Item) -> None:
        """Take the next row."""
        rule = self._rule
        tokens = item.tokens if rule.longest is None else min(item.tokens, rule.longest)
        if (
            rule.room is not None
            and len(self.group) > 1
            and self._tokens + tokens > max(LEAST_ROOM, rule.room)
        ):
            self._full()
        self.group.append(item)
        self._tokens += tokens
        if rule.fanin is not None and len(self.group) >= rule.fanin:
            self._full()

    def _full(self) -> None:
        group, self.group, self._tokens = self.group, [], 0
        self._emit(group)

    def take(self) -> list[Item]:
        """The rows of the last, unfinished group."""
        group, self.group, self._tokens = self.group, [], 0
        return group


def halves(group: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """A group that turned out too long, in two; the first half is not the smaller one."""
    middle = (len(group) + 1) // 2
    return list(group[:middle]), list(group[middle:])
