"""Ready calls in order of arrival, and which of them an endpoint should carry next."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from bagent.fleet.call import Call
from bagent.fleet.prefixes import Family

LOOKED_AT = 16
"""So many calls are looked at for one that may go where it did not fail last, and so many families
for one that may leave its home."""

Size = Callable[[Call], int]
"""How many calls like this one the endpoint in question may take in one request; 0 for none now."""

Leave = Callable[[Iterable[str], float], bool]
"""Whether what one of these endpoints holds the beginning of should be left to it, if the share of
its limit that is in use is higher there by no more than the number."""

Place = tuple[int, Hashable, int]
"""The queue of a call: by its turn, by what may share a request, by the context that it needs."""

MUCH_BUSIER = 0.5
"""That number for a conversation that goes on."""

BUSIER = 0.25
"""The same for rows that only begin like others: a prefix is computed again more cheaply than all
of a conversation."""


class _Queue:
    """Calls that may share a request; kin stand together.

    An endpoint takes first what begins as it has met before, then what came first and nobody has
    met, at last what others hold but cannot take now.
    """

    def __init__(self) -> None:
        self.count = 0
        self._single: deque[Call] = deque()
        self._kin: dict[Family, deque[Call]] = {}
        self._new: dict[Family, None] = {}
        self._at: dict[str, dict[Family, None]] = {}
        self._listed: dict[Family, tuple[str, ...]] = {}  # others may have changed its homes since

    def add(self, call: Call) -> None:
        self.count += 1
        family = call.family
        if family is None:
            self._single.append(call)
            return
        calls = self._kin.get(family)
        if calls is None:
            calls = self._kin[family] = deque()
            self._list(family)
        calls.append(call)

    def _list(self, family: Family) -> None:
        homes = self._listed[family] = tuple(family.homes)
        if not homes:
            self._new[family] = None
        for name in homes:
            self._at.setdefault(name, {})[family] = None

    def _unlist(self, family: Family) -> None:
        self._new.pop(family, None)
        for name in self._listed.pop(family):
            there = self._at[name]
            del there[family]
            if not there:
                del self._at[name]

    def first(self) -> Call:
        """The one that has waited longest, or nearly."""
        if not self._kin:
            return self._single[0]
        kin = next(iter(self._kin.values()))[0]
        if self._single and self._single[0].ready_at <= kin.ready_at:
            return self._single[0]
        return kin

    def take(self, endpoint: str, most: int, leave: Leave | None) -> list[Call]:
        """Up to ``most`` calls for one request."""
        group: list[Call] = []
        while self.count and len(group) < most:
            if not self._kin:
                group.append(self._single.popleft())
                self.count -= 1
                continue
            part = self._part(endpoint, most - len(group), None if group else leave or _never)
            if not part:
                break
            group += part
        return group

    def _part(self, endpoint: str, most: int, leave: Leave | None) -> list[Call]:
        """Calls of one family, or without; ``leave`` None: nothing of what others hold."""
        own = self._at.get(endpoint)
        if own:
            return self._of(next(iter(own)), endpoint, most)
        new = next(iter(self._new), None)
        if self._single:
            single = self._single[0]
            if new is None or single.ready_at <= self._kin[new][0].ready_at:
                self.count -= 1
                return [self._single.popleft()]
        if new is not None:
            return self._of(new, endpoint, most)
        if leave is None:
            return []
        free = [
            family
            for family in itertools.islice(self._kin, LOOKED_AT)
            if not leave(family.homes, BUSIER)
        ]
        if not free:
            return []
        return self._of(max(free, key=lambda one: len(self._kin[one])), endpoint, most)

    def _of(self, family: Family, endpoint: str, most: int) -> list[Call]:
        calls = self._kin[family]
        part = [calls.popleft() for _ in range(min(most, len(calls)))]
        self.count -= len(part)
        family.met(endpoint)
        if not calls:
            self._unlist(family)
            del self._kin[family]
        elif endpoint not in self._listed[family]:
            self._unlist(family)
            self._list(family)
        return part

    def picked(self, endpoint: str, most: int, leave: Leave | None) -> list[Call]:
        """Up to ``most`` that did not fail there last, and need not be left to another."""
        group: list[Call] = []
        while len(group) < most and (call := self._pick(endpoint, leave)) is not None:
            group.append(call)
        return group

    def _pick(self, endpoint: str, leave: Leave | None) -> Call | None:
        queue = self._single
        for place in range(min(LOOKED_AT, len(queue))):
            call = queue[place]
            if call.avoid == endpoint:
                continue
            home = call.prefer
            if leave is None or home is None or home == endpoint or not leave((home,), MUCH_BUSIER):
                del queue[place]
                self.count -= 1
                return call
        return None

    def __iter__(self) -> Iterator[Call]:
        return itertools.chain(self._single, *self._kin.values())


class Line:
    """Ready calls in order of arrival, parted by what may share a request.

    The calls of the furthest turn go first: a conversation that is nearly over frees its memory,
    and its prefix is still in the engine's cache.
    """

    def __init__(self) -> None:
        self.count = 0
        self._queues: dict[Place, _Queue] = {}
        self._order: list[Place] = []

    def add(self, call: Call) -> None:
        """Take a call behind the others of its kind."""
        self.count += 1
        place = (-call.turn, call.group_key, call.least)
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue()
            self._order.append(place)
            self._order.sort(key=_turn)
        queue.add(call)

    def take(
        self, endpoint: str, size: Size, *, picky: bool, leave: Leave | None = None
    ) -> list[Call]:
        """The next group for ``endpoint``; empty where no call may go there now.

        ``picky`` passes over calls that failed there last, or that ``leave`` leaves to the endpoint
        they came from; without it, ``leave`` is asked of families alone.
        """
        for number, place in enumerate(self._order):
            queue = self._queues[place]
            most = size(queue.first())
            if most <= 0:
                continue
            group = (queue.picked if picky else queue.take)(endpoint, most, leave)
            if not group:
                continue
            self.count -= len(group)
            if not queue.count:
                del self._queues[place], self._order[number]
            elif len(self._order) > 1:
                # Requests that differ in kind take turns, so that none waits for another's end.
                self._order.append(self._order.pop(number))
                self._order.sort(key=_turn)
            return group
        return []

    def remove(self, gone: Callable[[Call], bool]) -> list[Call]:
        """Take out all calls of which ``gone`` is true."""
        found = [call for call in self if gone(call)]
        if found:
            left = [call for call in self if not gone(call)]
            self.count, self._queues, self._order = 0, {}, []
            for call in left:
                self.add(call)
        return found

    def __iter__(self) -> Iterator[Call]:
        return itertools.chain.from_iterable(self._queues.values())


def _turn(place: Place) -> int:
    return place[0]


def _never(homes: Iterable[str], busier: float) -> bool:
    return False
