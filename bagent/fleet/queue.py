"""Calls that hold no slot: ready ones, those that sleep until their next try, those in limbo."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator

import msgspec

from bagent.fleet.call import Call, Delivery
from bagent.fleet.prefix_affinity import PrefixGroup
from bagent.types import Failure

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
        self._kin: dict[PrefixGroup, deque[Call]] = {}
        self._new: dict[PrefixGroup, None] = {}
        self._at: dict[str, dict[PrefixGroup, None]] = {}
        self._listed: dict[
            PrefixGroup, tuple[str, ...]
        ] = {}  # others may have changed its homes since

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

    def _list(self, family: PrefixGroup) -> None:
        homes = self._listed[family] = tuple(family.homes)
        if not homes:
            self._new[family] = None
        for name in homes:
            self._at.setdefault(name, {})[family] = None

    def _unlist(self, family: PrefixGroup) -> None:
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

    def _of(self, family: PrefixGroup, endpoint: str, most: int) -> list[Call]:
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


class ReadyQueue:
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


class UnprobedCall(msgspec.Struct, frozen=True):
    """A call whose request, sent at ``sent``, found no server; ``connected``: the server had taken
    it. What that means for the call is known once a probe is back."""

    call: Call
    failure: Failure
    delivery: Delivery
    sent: float
    connected: bool


class SuspendedCall(msgspec.Struct, frozen=True):
    """A call that ``failure`` ends, unless its server turns out not to work: then it was the
    server's failure. It was sent at ``sent``."""

    call: Call
    failure: Failure
    delivery: Delivery
    sent: float


class CallQueues:
    """The fleet's waiting rooms. Times are on the fleet's monotonic clock.

    ``counted`` are calls of which the tokens are being counted.
    """

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._forget()

    def _forget(self) -> None:
        self._line = ReadyQueue()
        self._urgent = ReadyQueue()
        self._halves: deque[list[Call]] = deque()
        self._halved = 0
        self._pinned: dict[str, ReadyQueue] = {}
        self._pins = 0
        self._last: deque[Call] = deque()
        self._sleeping: list[tuple[float, int, Call]] = []
        self._limbo: dict[str, list[UnprobedCall]] = {}
        self._in_limbo = 0
        self._suspended: dict[str, list[SuspendedCall]] = {}
        self._suspensions = 0
        self.counted: set[Call] = set()

    @property
    def ready(self) -> int:
        """Calls that may be sent now."""
        return self._line.count + self._urgent.count + self._halved + self._pins

    @property
    def asleep(self) -> int:
        """Calls that wait for their next try, for a probe, for the count of their tokens, or for
        the end of all others."""
        waiting = self._in_limbo + self._suspensions + len(self._last) + len(self.counted)
        return len(self._sleeping) + waiting

    @property
    def hurried(self) -> bool:
        """Whether calls are ready that should wait for nobody's company."""
        return bool(self._urgent.count or self._halved)

    def add(self, call: Call, *, urgent: bool) -> None:
        """Take a call that may be sent now; urgent ones go first, pinned ones to their endpoint."""
        if urgent or call.only is not None:
            call.family = None  # it goes where it must, or where there is room first
        if call.only is not None:
            self._pinned.setdefault(call.only, ReadyQueue()).add(call)
            self._pins += 1
        else:
            (self._urgent if urgent else self._line).add(call)

    def add_group(self, group: list[Call]) -> None:
        """Take calls that must travel together: a part of a group that was refused."""
        self._halves.append(group)
        self._halved += len(group)

    def add_last(self, call: Call) -> None:
        """Take a call that should run when no other is left; a pinned one waits for nobody."""
        if call.only is not None:
            self.add(call, urgent=True)
        else:
            self._last.append(call)

    def take(
        self, endpoint: str, size: Size, *, picky: bool, leave: Leave | None = None
    ) -> list[Call]:
        """The next calls that ``endpoint`` should carry in one request; empty if there are none.

        ``picky`` leaves to the others urgent calls that failed at this endpoint last; ``leave``
        says of which others it should leave what they hold the beginning of.
        """
        if self._halves:
            group = self._halves.popleft()
            most = max(1, size(group[0]))
            self._halved -= min(most, len(group))
            if most < len(group):
                self._halves.appendleft(group[most:])
            return group[:most]
        pinned = self._pinned.get(endpoint)
        if pinned is not None and pinned.count:
            found = pinned.take(endpoint, size, picky=False)
            self._pins -= len(found)
            if found:
                return found
        if self._urgent.count:
            found = self._urgent.take(endpoint, size, picky=picky, leave=leave)
            if found:
                return found
        if self._line.count:
            return self._line.take(endpoint, size, picky=False, leave=leave)
        return []

    def is_pinned(self, endpoint: str) -> bool:
        """Whether something waits that only ``endpoint`` may have."""
        pinned = self._pinned.get(endpoint)
        return pinned is not None and pinned.count > 0

    def some(self, count: int) -> list[Call]:
        """The first ready calls, left where they are."""
        return list(itertools.islice(itertools.chain(self._urgent, self._line), count))

    def take_last(self) -> Call | None:
        """A call that was kept for the end."""
        return self._last.popleft() if self._last else None

    def sleep(self, call: Call, due: float) -> None:
        """Take a call that may be sent from ``due`` on."""
        call.ready_at = due
        heapq.heappush(self._sleeping, (due, next(self._serial), call))

    def hold(self, endpoint: str, held: UnprobedCall) -> None:
        """Take a call until a probe of ``endpoint`` is back."""
        self._limbo.setdefault(endpoint, []).append(held)
        self._in_limbo += 1

    def release(self, endpoint: str) -> list[UnprobedCall]:
        """Hand out the calls held for ``endpoint``."""
        held = self._limbo.pop(endpoint, [])
        self._in_limbo -= len(held)
        return held

    def suspend(self, endpoint: str, suspended: SuspendedCall) -> None:
        """Take a call until it is known whether ``endpoint`` works."""
        self._suspended.setdefault(endpoint, []).append(suspended)
        self._suspensions += 1

    def suspended(self, endpoint: str) -> Call | None:
        """Return the first call that waits until it is known whether ``endpoint`` works."""
        waiting = self._suspended.get(endpoint)
        return waiting[0].call if waiting else None

    def resume(self, endpoint: str, sent: float) -> list[SuspendedCall]:
        """Hand out the calls suspended for ``endpoint`` that were sent at ``sent`` or before."""
        waiting = self._suspended.pop(endpoint, [])
        later = [one for one in waiting if one.sent > sent]
        if later:
            self._suspended[endpoint] = later
        self._suspensions -= len(waiting) - len(later)
        return [one for one in waiting if one.sent <= sent]

    def wake(self, now: float) -> None:
        """Make the calls whose time has come ready; they are urgent."""
        while self._sleeping and self._sleeping[0][0] <= now:
            self.add(heapq.heappop(self._sleeping)[2], urgent=True)

    def pinned_where(self, gone: Callable[[str], bool]) -> list[Call]:
        """Hand out the calls pinned to endpoints of which ``gone`` is true."""
        found: list[Call] = []
        for endpoint in [name for name in self._pinned if gone(name)]:
            found += self._pinned.pop(endpoint)
        self._pins -= len(found)
        return found

    def remove(self, gone: Callable[[Call], bool]) -> list[Call]:
        """Hand out the ready calls, but for pinned ones, of which ``gone`` is true."""
        return self._urgent.remove(gone) + self._line.remove(gone)

    @property
    def next_due(self) -> float | None:
        """When the next sleeping call wakes, None if none sleeps."""
        return self._sleeping[0][0] if self._sleeping else None

    def overdue(self, now: float) -> list[Call]:
        """Hand out sleeping and ready calls whose own time limit is over."""

        def is_late(call: Call) -> bool:
            return call.give_up_at is not None and call.give_up_at <= now

        late = [call for _, _, call in self._sleeping if is_late(call)]
        if late:
            self._sleeping = [entry for entry in self._sleeping if not is_late(entry[2])]
            heapq.heapify(self._sleeping)
        for line in (self._urgent, self._line, *self._pinned.values()):
            late += line.remove(is_late)
        self._pins = sum(line.count for line in self._pinned.values())
        for group in self._halves:
            gone = [call for call in group if is_late(call)]
            late += gone
            self._halved -= len(gone)
            group[:] = [call for call in group if not is_late(call)]
        self._halves = deque(group for group in self._halves if group)
        late += [call for call in self._last if is_late(call)]
        for endpoint in list(self._suspended):
            waiting = self._suspended.pop(endpoint)
            late += [one.call for one in waiting if is_late(one.call)]
            if staying := [one for one in waiting if not is_late(one.call)]:
                self._suspended[endpoint] = staying
            self._suspensions -= len(waiting) - len(staying)
        self._last = deque(call for call in self._last if not is_late(call))
        return late

    def clear(self) -> int:
        """Forget all; returns how many calls there were."""
        count = self.ready + self.asleep
        self._forget()
        return count
