"""Calls that hold no slot: ready, sleeping until a retry, or suspended until a probe or check."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from bagent.fleet.call import Call, SuspendedCall
from bagent.fleet.prefix_affinity import PrefixGroup

SCAN = 16
"""How many calls, or prefix groups, are scanned for one that suits an endpoint."""

BatchSize = Callable[[Call], int]
"""Returns how many calls like this one an endpoint accepts in its next request; 0: none now."""

LeaveTo = Callable[[Iterable[str], float], bool]
"""Returns whether a call should be left to one of the named endpoints, which have its prefix
cached, if their load is higher by no more than the number."""

QueueKey = tuple[int, Hashable, int]
"""What the calls of one queue share: negative turn, group key, required context."""

CONVERSATION_LOAD_MARGIN = 0.5
"""The load margin for the next turn of a conversation."""

PREFIX_LOAD_MARGIN = 0.25
"""The load margin for rows that share a prefix, which is cheaper to compute again."""


class _Queue:
    """Calls that may share a request, in prefix groups.

    An endpoint gets first what it has cached, then what came first and nobody has cached, and at
    last what others have cached but have no room for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.single: deque[Call] = deque()
        self._groups: dict[PrefixGroup, deque[Call]] = {}
        self._uncached: dict[PrefixGroup, None] = {}
        self._by_endpoint: dict[str, dict[PrefixGroup, None]] = {}
        self._indexed: dict[PrefixGroup, tuple[str, ...]] = {}  # ``cached_on`` may have changed

    def add_to_group(self, call: Call, group: PrefixGroup) -> None:
        """Append a call to its prefix group."""
        calls = self._groups.get(group)
        if calls is None:
            calls = self._groups[group] = deque()
            self._index(group)
        calls.append(call)

    def _index(self, group: PrefixGroup) -> None:
        endpoints = self._indexed[group] = tuple(group.cached_on)
        if not endpoints:
            self._uncached[group] = None
        for name in endpoints:
            self._by_endpoint.setdefault(name, {})[group] = None

    def _unindex(self, group: PrefixGroup) -> None:
        self._uncached.pop(group, None)
        for name in self._indexed.pop(group):
            groups = self._by_endpoint[name]
            del groups[group]
            if not groups:
                del self._by_endpoint[name]

    def first(self) -> Call:
        """Return the call that has waited longest, or nearly."""
        if not self._groups:
            return self.single[0]
        grouped = next(iter(self._groups.values()))[0]
        if self.single and self.single[0].ready_at <= grouped.ready_at:
            return self.single[0]
        return grouped

    def take(self, endpoint: str, limit: int, leave_to: LeaveTo | None) -> list[Call]:
        """Remove and return up to ``limit`` calls for one request."""
        calls: list[Call] = []
        while self.count and len(calls) < limit:
            if not self._groups:
                calls.append(self.single.popleft())
                self.count -= 1
                continue
            rule = None if calls else leave_to or _leave_none
            part = self._take_part(endpoint, limit - len(calls), rule)
            if not part:
                break
            calls += part
        return calls

    def _take_part(self, endpoint: str, limit: int, leave_to: LeaveTo | None) -> list[Call]:
        """Take calls of one prefix group, or one without; without ``leave_to`` take nothing that
        others have cached."""
        cached = self._by_endpoint.get(endpoint)
        if cached:
            return self._take_group(next(iter(cached)), endpoint, limit)
        uncached = next(iter(self._uncached), None)
        if self.single:
            single = self.single[0]
            if uncached is None or single.ready_at <= self._groups[uncached][0].ready_at:
                self.count -= 1
                return [self.single.popleft()]
        if uncached is not None:
            return self._take_group(uncached, endpoint, limit)
        if leave_to is None:
            return []
        free = [
            group
            for group in itertools.islice(self._groups, SCAN)
            if not leave_to(group.cached_on, PREFIX_LOAD_MARGIN)
        ]
        if not free:
            return []
        return self._take_group(
            max(free, key=lambda group: len(self._groups[group])), endpoint, limit
        )

    def _take_group(self, group: PrefixGroup, endpoint: str, limit: int) -> list[Call]:
        calls = self._groups[group]
        part = [calls.popleft() for _ in range(min(limit, len(calls)))]
        self.count -= len(part)
        group.add_endpoint(endpoint)
        if not calls:
            self._unindex(group)
            del self._groups[group]
        elif endpoint not in self._indexed[group]:
            self._unindex(group)
            self._index(group)
        return part

    def take_selectively(self, endpoint: str, limit: int, leave_to: LeaveTo | None) -> list[Call]:
        """Take up to ``limit`` calls that have not failed there and are not left to others."""
        calls: list[Call] = []
        while len(calls) < limit and (call := self._select(endpoint, leave_to)) is not None:
            calls.append(call)
        return calls

    def _select(self, endpoint: str, leave_to: LeaveTo | None) -> Call | None:
        queue = self.single
        for index in range(min(SCAN, len(queue))):
            call = queue[index]
            if endpoint in call.avoid:
                continue
            other = call.preferred if call.preferred not in (endpoint, *call.avoid) else None
            if leave_to and other is not None and leave_to((other,), CONVERSATION_LOAD_MARGIN):
                continue
            del queue[index]
            self.count -= 1
            return call
        return None

    def __iter__(self) -> Iterator[Call]:
        return itertools.chain(self.single, *self._groups.values())


class ReadyQueue:
    """Ready calls in order of arrival, in one queue for each :data:`QueueKey`.

    Calls of the latest turn go first: a conversation that is nearly done frees its memory, and its
    prefix is still cached.
    """

    def __init__(self) -> None:
        self.count = 0
        self._queues: dict[QueueKey, _Queue] = {}
        self._order: list[QueueKey] = []

    def add(self, call: Call) -> None:
        """Append a call."""
        self.count += 1
        key = (-call.turn, call.group_key, call.min_context)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue()
            self._order.append(key)
            self._order.sort(key=_turn)
        queue.count += 1
        if call.prefix_group is None:
            queue.single.append(call)
        else:
            queue.add_to_group(call, call.prefix_group)

    def take(
        self, endpoint: str, size: BatchSize, *, selective: bool, leave_to: LeaveTo | None = None
    ) -> list[Call]:
        """Remove and return the next group for ``endpoint``, empty if it gets no call now.

        ``selective`` skips calls that failed there, or that belong to a busier endpoint.
        """
        for index, key in enumerate(self._order):
            queue = self._queues[key]
            limit = size(queue.first())
            if limit <= 0:
                continue
            take = queue.take_selectively if selective else queue.take
            group = take(endpoint, limit, leave_to)
            if not group:
                continue
            self.count -= len(group)
            if not queue.count:
                del self._queues[key], self._order[index]
            elif len(self._order) > 1:
                # Queues of one turn alternate, so that none waits until another is empty.
                self._order.append(self._order.pop(index))
                self._order.sort(key=_turn)
            return group
        return []

    def remove(self, matches: Callable[[Call], bool]) -> list[Call]:
        """Remove and return all calls that match."""
        removed = [call for call in self if matches(call)]
        if removed:
            remaining = [call for call in self if not matches(call)]
            self.count, self._queues, self._order = 0, {}, []
            for call in remaining:
                self.add(call)
        return removed

    def __iter__(self) -> Iterator[Call]:
        return itertools.chain.from_iterable(self._queues.values())


def _turn(key: QueueKey) -> int:
    return key[0]


def _leave_none(endpoints: Iterable[str], margin: float) -> bool:
    return False


class CallQueues:
    """All waiting calls of a fleet; times are on its monotonic clock."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._reset()

    def _reset(self) -> None:
        self._normal = ReadyQueue()
        self._urgent = ReadyQueue()
        self._halves: deque[list[Call]] = deque()
        self._halved = 0
        self._pinned: dict[str, ReadyQueue] = {}
        self._pinned_count = 0
        self._last: deque[Call] = deque()
        self._sleeping: list[tuple[float, int, Call]] = []
        self._awaiting_probe: dict[str, list[SuspendedCall]] = {}
        self._awaiting_check: dict[str, list[SuspendedCall]] = {}
        self.suspended = 0  # calls that await a probe or check
        self.counting: set[Call] = set()  # their tokens are being counted

    @property
    def ready(self) -> int:
        """How many calls may be sent now."""
        return self._normal.count + self._urgent.count + self._halved + self._pinned_count

    @property
    def asleep(self) -> int:
        """How many calls wait for a retry, a probe, a check, a token count, or the run's end."""
        return len(self._sleeping) + self.suspended + len(self._last) + len(self.counting)

    @property
    def has_urgent(self) -> bool:
        """Whether calls are ready that should not wait for others to share their request."""
        return bool(self._urgent.count or self._halved)

    def add(self, call: Call, *, urgent: bool) -> None:
        """Add a ready call; urgent ones go first."""
        if urgent or call.pinned_to is not None:
            call.prefix_group = None  # it does not wait for the endpoint that has it cached
        if call.pinned_to is not None:
            self._pinned.setdefault(call.pinned_to, ReadyQueue()).add(call)
            self._pinned_count += 1
        else:
            (self._urgent if urgent else self._normal).add(call)

    def add_all(self, calls: Sequence[Call], *, urgent: bool) -> None:
        """Add ready calls in order; urgent ones go first."""
        for call in calls:
            if urgent or call.pinned_to is not None:
                self.add(call, urgent=urgent)
            else:
                self._normal.add(call)

    def add_halves(self, group: list[Call]) -> None:
        """Add a refused group as two halves, each of which is sent in one request."""
        middle = len(group) // 2
        self._halves += (group[:middle], group[middle:])
        self._halved += len(group)

    def add_last(self, call: Call) -> None:
        """Add a call that runs after all others, or now if it is pinned."""
        if call.pinned_to is not None:
            self.add(call, urgent=True)
        else:
            self._last.append(call)

    def take(
        self,
        endpoint: str,
        size: BatchSize,
        *,
        selective: bool,
        leave_to: LeaveTo | None = None,
        trial: bool = False,
    ) -> list[Call]:
        """Remove and return the calls for the next request to ``endpoint``; empty if none.

        Args:
            endpoint: the name of the endpoint.
            size: how many calls it accepts.
            selective: skips urgent calls that failed there.
            leave_to: decides what is left to endpoints that have its prefix cached.
            trial: takes a call that is not urgent first: one that failed elsewhere may be at fault
                itself, and shows little about the endpoint.
        """
        if self._halves:
            group = self._halves.popleft()
            limit = max(1, size(group[0]))
            self._halved -= min(limit, len(group))
            if limit < len(group):
                self._halves.appendleft(group[limit:])
            return group[:limit]
        pinned = self._pinned.get(endpoint)
        if pinned is not None and pinned.count:
            calls = pinned.take(endpoint, size, selective=False)
            self._pinned_count -= len(calls)
            if calls:
                return calls
        urgent, normal = (self._urgent, selective), (self._normal, False)
        for queue, skip_failed in (normal, urgent) if trial else (urgent, normal):
            if queue.count:
                calls = queue.take(endpoint, size, selective=skip_failed, leave_to=leave_to)
                if calls:
                    return calls
        return []

    def is_pinned(self, endpoint: str) -> bool:
        """Return whether calls wait that only ``endpoint`` may serve."""
        pinned = self._pinned.get(endpoint)
        return pinned is not None and pinned.count > 0

    def peek(self, count: int) -> list[Call]:
        """Return the first ready calls without removing them."""
        return list(itertools.islice(itertools.chain(self._urgent, self._normal), count))

    @property
    def has_last(self) -> bool:
        """Whether calls wait that run after all others."""
        return bool(self._last)

    def take_last(self) -> Call | None:
        """Remove and return a call that runs after all others."""
        return self._last.popleft() if self._last else None

    def sleep(self, call: Call, due: float) -> None:
        """Add a call that becomes ready at ``due``."""
        call.ready_at = due
        heapq.heappush(self._sleeping, (due, next(self._serial), call))

    def wake(self, now: float) -> None:
        """Move the sleeping calls that are due to the urgent ones."""
        while self._sleeping and self._sleeping[0][0] <= now:
            self.add(heapq.heappop(self._sleeping)[2], urgent=True)

    @property
    def next_due(self) -> float | None:
        """When the next sleeping call wakes, None if none sleeps."""
        return self._sleeping[0][0] if self._sleeping else None

    def suspend(self, endpoint: str, suspended: SuspendedCall) -> None:
        """Suspend a call until a probe, or a success or check, has shown how ``endpoint`` is."""
        waiting = self._awaiting_probe if suspended.until_probe else self._awaiting_check
        waiting.setdefault(endpoint, []).append(suspended)
        self.suspended += 1

    def on_probe(self, endpoint: str) -> list[SuspendedCall]:
        """Remove and return the calls that await a probe of ``endpoint``."""
        calls = self._awaiting_probe.pop(endpoint, [])
        self.suspended -= len(calls)
        return calls

    def awaiting_check(self, endpoint: str) -> Call | None:
        """Return the first call that awaits a check of ``endpoint``."""
        waiting = self._awaiting_check.get(endpoint)
        return waiting[0].call if waiting else None

    def on_check(self, endpoint: str, sent: float) -> list[SuspendedCall]:
        """Remove and return the calls that await a check, sent at ``sent`` or before."""
        return self._split_checks(endpoint, lambda entry: entry.sent <= sent)

    def _split_checks(
        self, endpoint: str, matches: Callable[[SuspendedCall], bool]
    ) -> list[SuspendedCall]:
        waiting = self._awaiting_check.pop(endpoint, [])
        removed = [entry for entry in waiting if matches(entry)]
        if len(removed) < len(waiting):
            self._awaiting_check[endpoint] = [entry for entry in waiting if not matches(entry)]
        self.suspended -= len(removed)
        return removed

    def take_pinned(self, matches: Callable[[str], bool]) -> list[Call]:
        """Remove and return the calls pinned to endpoints that match."""
        calls: list[Call] = []
        for endpoint in [name for name in self._pinned if matches(name)]:
            calls += self._pinned.pop(endpoint)
        self._pinned_count -= len(calls)
        return calls

    def remove(self, matches: Callable[[Call], bool]) -> list[Call]:
        """Remove and return the ready calls that match, except pinned ones."""
        return self._urgent.remove(matches) + self._normal.remove(matches)

    def take_overdue(self, now: float) -> list[Call]:
        """Remove and return the calls whose deadline has passed, except those awaiting a probe."""

        def is_late(call: Call) -> bool:
            return call.deadline is not None and call.deadline <= now

        late = [call for _, _, call in self._sleeping if is_late(call)]
        if late:
            self._sleeping = [entry for entry in self._sleeping if not is_late(entry[2])]
            heapq.heapify(self._sleeping)
        for queue in (self._urgent, self._normal, *self._pinned.values()):
            late += queue.remove(is_late)
        self._pinned_count = sum(queue.count for queue in self._pinned.values())
        for group in self._halves:
            late += [call for call in group if is_late(call)]
            group[:] = [call for call in group if not is_late(call)]
        self._halves = deque(group for group in self._halves if group)
        self._halved = sum(map(len, self._halves))
        late += [call for call in self._last if is_late(call)]
        self._last = deque(call for call in self._last if not is_late(call))
        for endpoint in list(self._awaiting_check):
            entries = self._split_checks(endpoint, lambda entry: is_late(entry.call))
            late += [entry.call for entry in entries]
        return late

    def clear(self) -> None:
        """Drop all calls."""
        self._reset()
