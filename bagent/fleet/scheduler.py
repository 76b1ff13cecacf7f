"""Batch scheduling: which ready calls an endpoint gets in its next request."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from bagent.backends.base import Backend
from bagent.fleet.batch_size import (
    Supply,
    batch_size,
    linger,
    size_by_load,
    too_little_room,
    waits_for_more,
)
from bagent.fleet.call import Call
from bagent.fleet.context_length import fits
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.prefix_affinity import BYTES_PER_TOKEN, WARM_TOKENS, warming_saves
from bagent.fleet.queue import BatchSize, LeaveTo
from bagent.fleet.state import FleetState, FleetTasks

WARMING_SECONDS = 10.0
"""Longest time for which the other calls wait: 100,000 tokens are prefilled in less."""

COMPARE_SECONDS = 0.02
"""For so long the first call waits for others to be compared with."""

WARMING_SAMPLES = 16
"""How many calls are compared for a common prefix."""

BATCHING_SAMPLES = 8
"""How many calls a backend gets to detect how an endpoint accepts batches."""

MAX_DETECTION_WAIT = 1.0
"""The first endpoint that has detected that waits at most so long for the others."""

CAPACITY_SECONDS = 0.1
"""How often the capacity of the usable endpoints is summed up."""


FAR_FROM_END = 8
"""With more than so many times the rows that all endpoints may have in flight, the end is far: then
each takes what it can."""


class Lingering(msgspec.Struct, frozen=True):
    """An incomplete batch that waits for more calls."""

    due: float
    """When it is sent anyway."""
    full_size: int = 0
    """Calls that complete it; 0 if unknown."""
    group_key: Hashable = None
    """What these calls share."""

    def lacks_more_than(self, call: Call, ready: int) -> bool:
        """Return whether it is still incomplete with ``call``, one of so many ready ones."""
        return (
            self.full_size > ready and call.group_key == self.group_key and call.pinned_to is None
        )


class Batch(msgspec.Struct):
    """The calls of an endpoint's next request, or why it gets none now."""

    state: EndpointState
    calls: Sequence[Call] = ()
    warms: bool = False
    """It goes ahead alone, to fill the endpoint's prefix cache."""
    single: bool = False
    """The endpoint accepts no batches of such calls."""
    crowded: bool = False
    """The endpoint should finish more before its next batch."""
    lingering: Lingering | None = None
    cached_at: EndpointState | None = None
    """Another endpoint, to which a call is left that has its prefix cached."""
    undetected: tuple[EndpointState, ...] = ()
    """Endpoints of which the backend must first detect how they accept batches."""
    too_costly: bool = False
    """The budget allows none of the calls now."""


class CacheWarmer:
    """Sends one call ahead to an endpoint whose prefix cache is cold."""

    def __init__(
        self, fleet: FleetState, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._loop = loop
        self._on_change = on_change

    def pays(self, state: EndpointState, call: Call, now: float) -> bool | None:
        """Return whether ``call`` should go ahead alone; None: decide when more are ready."""
        fleet = self._fleet
        if call.turn > 1 or len(call.request.payload) < WARM_TOKENS * BYTES_PER_TOKEN:
            return False
        counting = fleet.waiting.counting  # ready once an engine has counted their tokens
        ready = fleet.waiting.ready + len(counting)
        available = max(1, fleet.endpoints.available)
        if (
            fleet.expecting
            and ready < available * min(state.room, WARMING_SAMPLES)
            and now - call.ready_at < COMPARE_SECONDS
        ):
            return None
        calls = itertools.chain(fleet.waiting.peek(WARMING_SAMPLES), counting)
        payloads = [call.request.payload for call in itertools.islice(calls, WARMING_SAMPLES)]
        return warming_saves(payloads, min(state.room, -(-ready // available))) > 0

    def start(self, state: EndpointState, call: Call) -> None:
        """Make the other calls wait until ``call`` has its first token."""
        state.warming = call
        if self._fleet.config.group.stream_every:
            call.request.stream = True

        def end() -> None:
            if state.warming is call:
                self.end(state)
                self._on_change()

        call.request.began = end
        self._loop.call_later(WARMING_SECONDS, end)

    def end(self, state: EndpointState) -> None:
        """Let the other calls follow."""
        state.warming = None
        self._fleet.endpoints.update(state)


class BatchScheduler:
    """Forms the batches of requests.

    Args:
        fleet: its endpoints and calls.
        backend: says how many calls may share a request.
        tasks: run the detection of that.
        on_change: called when endpoints may have more room.
    """

    def __init__(
        self,
        fleet: FleetState,
        backend: Backend,
        tasks: FleetTasks,
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._tasks = tasks
        self._on_change = on_change
        self.warmer = CacheWarmer(fleet, tasks.loop, on_change)
        self._singles = 0
        self._detecting = 0
        self._start_at: float | None = None
        self._capacity_at = float("-inf")
        self._capacity = 0.0

    def next(self, state: EndpointState, now: float) -> Batch:
        """Take the next batch for ``state``, or for another endpoint that has it cached."""
        batch = self._batch_for(state, now)
        if not batch.calls and batch.cached_at is not None:
            other = self._batch_for(batch.cached_at, now)
            if other.calls:
                batch = other
            else:
                batch.lingering = other.lingering or batch.lingering
                batch.undetected += other.undetected
        if batch.calls and self._fleet.config.budget is not None:
            self._cut_to_budget(batch)
        return batch

    def affordable(self, calls: Sequence[Call]) -> int:
        """Return how many of the calls the budget allows now; if none, report when it may."""
        budget = self._fleet.config.budget
        if budget is None:
            return len(calls)
        return budget.affordable([call.request for call in calls], self._on_budget_freed)

    def _cut_to_budget(self, batch: Batch) -> None:
        count = self.affordable(batch.calls)
        for call in batch.calls[count:]:
            self._fleet.waiting.add(call, urgent=True)
        batch.calls = batch.calls[:count]
        if not count:
            batch.warms, batch.too_costly = False, True

    def _on_budget_freed(self) -> None:
        self._tasks.loop.call_soon(self._on_change)

    def begin(self, batch: Batch) -> None:
        """Begin what a batch requires besides its request."""
        rule = self._fleet.config.group
        for state in batch.undetected:
            self._detect_batching(state)
        if batch.warms:
            self.warmer.start(batch.state, batch.calls[0])
        elif batch.single and batch.calls:
            self._singles += 1
            if rule.stream_every and self._singles % rule.stream_every == 1:
                batch.calls[0].request.stream = True

    def _batch_for(self, state: EndpointState, now: float) -> Batch:
        fleet, batch = self._fleet, Batch(state)
        several = len(fleet.endpoints.states) > 1
        most = self._rows_before_end(state, now) if several else math.inf
        if most < 1:
            return batch
        if self._detecting and self._waits_for_detection(state, now):
            batch.lingering = Lingering(self._start_at or now)
            return batch
        size = _single if fleet.config.group.single else self._size_rule(batch, now)
        if most is not math.inf and most < state.room:
            size = _at_most(size, int(most))
        if fleet.contexts:
            size = _fitting(size, state)
        if state.cold and fleet.config.prefix.warms(own=state.endpoint.own):
            size = self._warming_size(batch, size, now)
        leave_to = self._leave_rule(batch, now) if several else None
        take = fleet.waiting.take
        trial = state.is_half_open
        batch.calls = take(state.name, size, selective=several, leave_to=leave_to, trial=trial)
        if several and not batch.calls and fleet.waiting.has_urgent:
            size = self._without_better(state, size, now)
            batch.calls = take(state.name, size, selective=False)
        batch.warms = batch.warms and bool(batch.calls)
        return batch

    def _without_better(self, state: EndpointState, size: BatchSize, now: float) -> BatchSize:
        """Return ``size``, but 0 for calls that should go to another endpoint soon.

        That is one that has not failed them, or any if ``state`` has failed them last.
        """
        states = self._fleet.endpoints.states

        def without_better(call: Call) -> int:
            last = call.avoid[-1:] == (state.name,)
            better = any(
                other is not state
                and other.has_room_soon(now)
                and fits(other, call.min_context)
                and (last or other.name not in call.avoid)
                for other in states
            )
            return 0 if better else size(call)

        return without_better

    def _rows_before_end(self, state: EndpointState, now: float) -> float:
        """Return how many rows ``state`` can take now without delaying the end of the run."""
        fleet = self._fleet
        ready = fleet.waiting.ready
        if fleet.expecting:
            if fleet.remaining is None:
                return math.inf
            ready = max(ready, fleet.remaining - fleet.in_flight)
        if not fleet.in_flight or fleet.waiting.is_pinned(state.name):
            return math.inf
        if fleet.tail.is_too_slow(state.name, now, ready):
            return 0
        remaining = ready + fleet.in_flight
        if remaining > FAR_FROM_END * fleet.endpoints.limit:
            return math.inf
        if state.cold:
            fleet.tail.forget(state.name)
        in_use = (other for other in fleet.endpoints.states if other.usable)
        return fleet.tail.most_rows(state, now, in_use, remaining) - state.in_flight

    def _waits_for_detection(self, state: EndpointState, now: float) -> bool:
        """Return whether others are about to be ready too.

        The first endpoint alone would take all calls, and the prefixes it then has cached.
        """
        due = self._start_at
        return state.cold and due is not None and now < due

    def _warming_size(self, batch: Batch, size: BatchSize, now: float) -> BatchSize:
        """Return the size rule for an endpoint with a cold cache: 1 where a call goes ahead."""

        def first(call: Call) -> int:
            limit = size(call)
            pays = self.warmer.pays(batch.state, call, now) if limit > 0 else False
            batch.warms = pays is True
            if pays is None:
                batch.lingering = Lingering(call.ready_at + COMPARE_SECONDS)
                return 0
            return 1 if pays else limit

        return first

    def _leave_rule(self, batch: Batch, now: float) -> LeaveTo:
        """Return the rule that leaves calls to an endpoint that has their prefix cached."""
        get, load = self._fleet.endpoints.get, batch.state.load

        def leave_to(names: Iterable[str], margin: float) -> bool:
            for name in names:
                other = get(name)
                if (
                    other is not None
                    and other.room > 0
                    and other.load <= load + margin
                    and other.account.wait(now, 0) <= 0
                ):
                    batch.cached_at = other
                    return True
            return False

        return leave_to

    def _size_rule(self, batch: Batch, now: float) -> BatchSize:
        fleet, rule, state = self._fleet, self._fleet.config.group, batch.state

        def size(call: Call) -> int:
            if call.group_key is None:
                return 1
            max_size = self._backend.group_limit(state.endpoint, call.request)
            batch.single = max_size == 1
            if max_size is None:
                batch.undetected = (state,)
                return 0
            if max_size == 1:
                return 1
            limit = self._fair_limit(state, now)
            room = min(
                state.room, fleet.config.concurrency - fleet.in_flight, limit - state.in_flight
            )
            if room <= 0:
                batch.crowded = True
                return 0
            supply = Supply(fleet.waiting.ready, fleet.endpoints.available, fleet.expecting)
            if state.in_flight and too_little_room(rule, max_size, limit, room, supply):
                batch.crowded = True
                return 0
            full = min(max_size, room, rule.size or size_by_load(limit))
            if not call.attempts and waits_for_more(rule, supply, full, now - call.ready_at):
                due = call.ready_at + linger(rule)
                batch.lingering = Lingering(due, full, call.group_key)
                return 0
            return batch_size(rule, max_size, limit, room, supply, fleet.expected)

        return size

    def _fair_limit(self, state: EndpointState, now: float) -> int:
        """Return the limit of ``state``, or its share of the run's concurrency if that is less."""
        fleet = self._fleet
        limit, concurrency = state.limit.value, fleet.config.concurrency
        if concurrency >= fleet.endpoints.limit:
            return limit
        if now - self._capacity_at > CAPACITY_SECONDS:
            self._capacity_at = now
            usable = [other for other in fleet.endpoints.states if other.usable or other is state]
            self._capacity = sum(other.limit.value * other.weight for other in usable)
        share = concurrency * limit * state.weight / max(self._capacity, 1e-9)
        return min(limit, math.ceil(share))

    def _detect_batching(self, state: EndpointState) -> None:
        """Have the backend detect how an endpoint accepts batches; it gets no calls meanwhile."""
        if state.detecting_batching:
            return
        state.detecting_batching = True
        fleet = self._fleet
        began = fleet.clock()
        self._detecting += 1
        samples = [call.request for call in fleet.waiting.peek(BATCHING_SAMPLES)]

        async def detect() -> None:
            try:
                await self._backend.learn(state.endpoint, samples, fleet.config.timeouts)
            finally:
                state.detecting_batching = False
                self._detecting -= 1
            if self._start_at is None:
                now = fleet.clock()
                self._start_at = now + min(now - began, MAX_DETECTION_WAIT)
            fleet.endpoints.update(state)
            self._on_change()

        self._tasks.spawn_probe(detect())


def _at_most(size: BatchSize, rows: int) -> BatchSize:
    """Return ``size``, but at most ``rows``."""
    return lambda call: min(rows, size(call))


def _fitting(size: BatchSize, state: EndpointState) -> BatchSize:
    """Return ``size``, but 0 for calls that are too long for the endpoint."""
    return lambda call: size(call) if not call.min_context or fits(state, call.min_context) else 0


def _single(call: Call) -> int:
    """Return the batch size where each row goes alone."""
    return 1
