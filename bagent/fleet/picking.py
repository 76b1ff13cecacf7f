"""Which ready calls an endpoint should carry in its next request."""

from __future__ import annotations

from collections.abc import Callable

from bagent.fleet.call import Call
from bagent.fleet.core import Core
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.grouping import (
    Supply,
    by_load,
    group_size,
    linger,
    too_little_room,
    waits_for_more,
)

MUCH_BUSIER = 0.5
"""A conversation goes on where the engine's cache holds what came before, unless the share of its
limit that is in use there is higher by this."""

SAMPLES = 8
"""So many ready calls are shown to a backend that has to find out how an endpoint wants groups."""


class Picker:
    """Forms groups.

    ``linger_due`` is when a group that waits for company should go without. ``crowded`` says that
    the endpoint looked at last should finish more before it takes another group.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._alone = 0
        self.crowded = False
        self.linger_due: float | None = None

    def group_for(self, state: EndpointState, now: float) -> list[Call]:
        """The calls that ``state`` should carry next; empty if nothing may go there now."""
        core = self._core
        self.crowded = False
        size = _one if core.config.group.single else self._sizes(state, now)
        picky = len(core.endpoints.states) > 1
        leave = self._at_home(state, now) if picky and core.waiting.hurried else None
        group = core.waiting.take(state.name, size, picky=picky, leave=leave)
        if not group and picky and core.waiting.hurried and not core.endpoints.others(state):
            group = core.waiting.take(state.name, size, picky=False)
        return group

    def _at_home(self, state: EndpointState, now: float) -> Callable[[Call], bool]:
        """Whether a call is better left to the endpoint that holds its context."""
        named, most = self._core.endpoints.named, state.load + MUCH_BUSIER

        def leave(call: Call) -> bool:
            if call.prefer is None or call.prefer == state.name:
                return False
            home = named(call.prefer)
            return (
                home is not None
                and home.room > 0
                and home.load <= most
                and home.account.wait(now, 0) <= 0
            )

        return leave

    def _sizes(self, state: EndpointState, now: float) -> Callable[[Call], int]:
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
            supply = Supply(core.waiting.ready, core.endpoints.open, core.expecting)
            if state.in_flight and too_little_room(rule, most, state.limit.value, free, supply):
                self.crowded = True
                return 0
            full = min(most, free, rule.size or by_load(state.limit.value))
            if not call.tries and waits_for_more(rule, supply, full, now - call.ready_at):
                self.linger_due = call.ready_at + linger(rule)
                return 0
            return group_size(rule, most, state.limit.value, free, supply, core.expected)

        return size

    def _learn(self, state: EndpointState) -> None:
        """Have the backend find out how an endpoint wants groups; until then it gets nothing."""
        if state.learning:
            return
        state.learning = True
        core = self._core
        samples = [call.request for call in core.waiting.some(SAMPLES)]

        async def learn() -> None:
            try:
                await core.backend.learn(state.endpoint, samples, core.config.timeouts)
            finally:
                state.learning = False
            core.endpoints.changed(state)
            core.pump()

        core.spawn(learn(), core.probes)


def _one(call: Call) -> int:
    """The size of a group where each row goes alone."""
    return 1
