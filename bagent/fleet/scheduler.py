"""Which ready calls an endpoint should carry in its next request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable

from bagent.fleet.batch_size import (
    Supply,
    by_load,
    group_size,
    linger,
    too_little_room,
    waits_for_more,
)
from bagent.fleet.call import Call
from bagent.fleet.context_length import fits
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.prefix_affinity import BYTES_PER_TOKEN, WARM_TOKENS, warming_saves
from bagent.fleet.queue import MUCH_BUSIER, Leave, Size
from bagent.fleet.state import FleetState

WAIT_SECONDS = 10.0
"""The others wait no longer: 100,000 tokens are read in less."""

COMPANY_SECONDS = 0.02
"""So long the very first call waits to be seen beside others."""

WARMING_SAMPLES = 16
"""So many calls are compared."""


class CacheWarmer:
    """Decides which endpoint is warmed, and ends that."""

    def __init__(self, core: FleetState) -> None:
        self._core = core

    def pays(self, state: EndpointState, call: Call, now: float) -> bool | None:
        """Whether ``call`` should go ahead alone; None: not known before it has some company."""
        core = self._core
        if call.turn > 1 or len(call.request.payload) < WARM_TOKENS * BYTES_PER_TOKEN:
            return False
        counted = core.waiting.counted  # they are ready once an engine has told how long they are
        ready, open_ = core.waiting.ready + len(counted), max(1, core.endpoints.open)
        if (
            core.expecting
            and ready < open_ * min(state.room, WARMING_SAMPLES)
            and now - call.ready_at < COMPANY_SECONDS
        ):
            return None
        company = itertools.chain(core.waiting.some(WARMING_SAMPLES), counted)
        seen = [one.request.payload for one in itertools.islice(company, WARMING_SAMPLES)]
        return warming_saves(seen, min(state.room, -(-ready // open_))) > 0

    def start(self, state: EndpointState, call: Call) -> None:
        """``call`` goes ahead to ``state``."""
        core = self._core
        state.warming = call
        if core.config.group.stream_every:
            call.request.stream = True

        def over() -> None:
            if state.warming is call:
                self.over(state)
                core.pump()

        call.request.began = over
        core.loop.call_later(WAIT_SECONDS, over)

    def over(self, state: EndpointState) -> None:
        """The others may follow."""
        state.warming = None
        self._core.endpoints.changed(state)


__all__ = ["MUCH_BUSIER", "BatchScheduler"]

SAMPLES = 8
"""So many ready calls are shown to a backend that has to find out how an endpoint wants groups."""

LEARN_SECONDS = 1.0
"""The first endpoint that has found that out waits for the others as long again, and no longer than
this."""


COUNT_SECONDS = 0.1
"""How often it is counted what the endpoints that work could take together."""


class BatchScheduler:
    """Forms groups.

    ``linger_due`` is when a group that waits for company should go without; it goes at once when
    ``wanted`` rows are ready, where that is known (else 0), and rows of its ``kind`` can join it.
    ``crowded`` says that the endpoint looked at last should finish more before it takes another
    group.
    """

    def __init__(self, core: FleetState) -> None:
        self._core = core
        self._alone = 0
        self.warmer = CacheWarmer(core)
        self._learners = 0
        self._begin_at: float | None = None
        self._home: EndpointState | None = None
        self._counted_at = float("-inf")
        self._capacity = 0.0
        self.crowded = False
        self.linger_due: float | None = None
        self.wanted = 0
        self.kind: Hashable = None

    def begin(self) -> None:
        """Endpoints are about to be looked at: nothing is known to wait."""
        self.linger_due = None
        self.wanted = 0

    def waits_on(self, call: Call) -> bool:
        """Whether a group waits for company, and would go on doing so if ``call`` joined it."""
        return (
            self.wanted > self._core.waiting.ready
            and call.group_key == self.kind
            and call.only is None
        )

    def next(self, state: EndpointState, now: float) -> tuple[EndpointState, list[Call]]:
        """The calls that ``state`` should carry next, or else another that they are left to; no
        calls if nothing may go there now."""
        group = self._group_for(state, now)
        home, crowded = self._home, self.crowded
        if group or home is None:
            return state, group
        group = self._group_for(home, now)
        if not group:
            self.crowded = crowded
            return state, group
        return home, group

    def _group_for(self, state: EndpointState, now: float) -> list[Call]:
        core = self._core
        self.crowded = False
        self._home = None
        if self._is_too_late(state, now) or self._waits_for_learners(state, now):
            return []
        size = _one if core.config.group.single else self._sizes(state, now)
        if core.lengths:
            size = _of_fitting(size, state)
        ahead: list[Call] = []
        if state.cold and core.config.prefix.warms(own=state.endpoint.own):
            size = self._first(state, size, now, ahead)
        picky = len(core.endpoints.states) > 1
        leave = self._at_home(state, now) if picky else None
        group = core.waiting.take(state.name, size, picky=picky, leave=leave)
        if not group and picky and core.waiting.hurried and not core.endpoints.others(state):
            group = core.waiting.take(state.name, size, picky=False)
        if group and ahead:
            self.warmer.start(state, group[0])
        return group

    def _is_too_late(self, state: EndpointState, now: float) -> bool:
        """Whether what ``state`` took now would end the run later than without it."""
        core = self._core
        left = core.waiting.ready
        if core.expecting:
            if core.left is None:
                return False
            left = max(left, core.left - core.in_flight)
        return (
            core.in_flight > 0
            and core.ending.is_too_slow(state.name, now, left)
            and not core.waiting.is_pinned(state.name)
        )

    def _waits_for_learners(self, state: EndpointState, now: float) -> bool:
        """Whether ``state`` should not begin yet, since others are about to learn what it knows:
        the first alone would take all that is there, and the beginnings that it then holds."""
        due = self._begin_at
        if not state.cold or not self._learners or due is None or now >= due:
            return False
        self.linger_due = due
        return True

    def _first(self, state: EndpointState, size: Size, now: float, ahead: list[Call]) -> Size:
        """The size of the first group for an endpoint with a cold cache: one where a call should
        go ahead, which is then in ``ahead``."""

        def first(call: Call) -> int:
            ahead.clear()
            most = size(call)
            pays = self.warmer.pays(state, call, now) if most > 0 else False
            if pays is None:
                self.linger_due = call.ready_at + COMPANY_SECONDS
                return 0
            if pays:
                ahead.append(call)
            return 1 if pays else most

        return first

    def _at_home(self, state: EndpointState, now: float) -> Leave:
        """Whether something is better left to one of the endpoints that hold its beginning."""
        named, load = self._core.endpoints.named, state.load

        def leave(homes: Iterable[str], busier: float) -> bool:
            for name in homes:
                home = named(name)
                if (
                    home is not None
                    and home.room > 0
                    and home.load <= load + busier
                    and home.account.wait(now, 0) <= 0
                ):
                    self._home = home
                    return True
            return False

        return leave

    def _sizes(self, state: EndpointState, now: float) -> Size:
        core, rule = self._core, self._core.config.group

        def size(call: Call) -> int:
            if call.group_key is None:
                return 1
            most = core.backend.group_limit(state.endpoint, call.request)
            if most is None:
                self._learn(state)
                return 0
            if most == 1:
                self._alone += 1
                if rule.stream_every and self._alone % rule.stream_every == 1:
                    call.request.stream = True
                return 1
            free = min(state.room, core.config.concurrency - core.in_flight)
            limit = self._fair_limit(state, now)
            free = min(free, limit - state.in_flight)
            if free <= 0:
                self.crowded = True
                return 0
            supply = Supply(core.waiting.ready, core.endpoints.open, core.expecting)
            if state.in_flight and too_little_room(rule, most, limit, free, supply):
                self.crowded = True
                return 0
            full = min(most, free, rule.size or by_load(limit))
            if not call.tries and waits_for_more(rule, supply, full, now - call.ready_at):
                self.linger_due = call.ready_at + linger(rule)
                self.wanted, self.kind = full, call.group_key
                return 0
            return group_size(rule, most, limit, free, supply, core.expected)

        return size

    def _fair_limit(self, state: EndpointState, now: float) -> int:
        """Return how many rows ``state`` should have in flight at most: its share of the run's
        concurrency, where that is less than the endpoints could take."""
        core = self._core
        own, most = state.limit.value, core.config.concurrency
        if most >= core.endpoints.limit:
            return own
        if now - self._counted_at > COUNT_SECONDS:
            self._counted_at = now
            usable = [one for one in core.endpoints.states if one.usable or one is state]
            self._capacity = sum(one.limit.value * one.weight for one in usable)
        return min(own, math.ceil(most * own * state.weight / max(self._capacity, 1e-9)))

    def _learn(self, state: EndpointState) -> None:
        """Have the backend find out how an endpoint wants groups; until then it gets nothing."""
        if state.learning:
            return
        state.learning = True
        core = self._core
        began = core.clock()
        self._learners += 1
        samples = [call.request for call in core.waiting.some(SAMPLES)]

        async def learn() -> None:
            try:
                await core.backend.learn(state.endpoint, samples, core.config.timeouts)
            finally:
                state.learning = False
                self._learners -= 1
            if self._begin_at is None:
                now = core.clock()
                self._begin_at = now + min(now - began, LEARN_SECONDS)
            core.endpoints.changed(state)
            core.pump()

        core.spawn(learn(), core.probes)


def _of_fitting(size: Size, state: EndpointState) -> Size:
    """``size``, and 0 for calls that are too long for the endpoint."""
    return lambda call: size(call) if not call.least or fits(state, call.least) else 0


def _one(call: Call) -> int:
    """The size of a group where each row goes alone."""
    return 1
