"""Waiting calls that nobody may wait for any longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bagent.fleet.call import Call
from bagent.fleet.core import Core
from bagent.fleet.fitting import NOT_TOLD, Fitter
from bagent.fleet.settle import Settler
from bagent.types import Failure

LOOK_SECONDS = 0.25


class Overdue:
    """Ends the waiting calls whose row's time limit is over, and those that nobody can take."""

    def __init__(self, core: Core, settler: Settler, fitter: Fitter) -> None:
        self._core = core
        self._fitter = fitter
        self._settler = settler
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Calls wait that have a time limit."""
        if self._timer is None:
            self._timer = self._core.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        core = self._core
        self._timer = None
        late = core.waiting.overdue(core.clock())
        if late:
            core.spawn(self._fail(late), core.tasks)
        if not core.closed and (core.in_flight or core.waiting.ready or core.waiting.asleep):
            self.watch()
        core.pump()

    async def _fail(self, late: Sequence[Call]) -> None:
        words = "the row's time limit (limits.row) was over before an endpoint could take it"
        for call in late:
            self._core.fail(call, Failure("timeout", words, passing=True), None)

    def retry_pinned(self) -> None:
        """A call that only one endpoint may have, or only long ones, costs a try for each look that
        finds none of them at work, while others are."""
        core = self._core

        def is_down(name: str) -> bool:
            state = core.endpoints.named(name)
            return state is None or state.leaving or not state.up or state.resting

        works = any(state.up and not state.resting for state in core.endpoints.states)
        for call in core.waiting.pinned_where(is_down) if works else ():
            words = f"{call.only} serves nothing, and no other endpoint may have this row"
            self._settler.retry(call, Failure("connect", words, passing=True), None)
        for call in self._fitter.lost():
            length = "" if call.least == NOT_TOLD else f" of {call.least} tokens"
            words = f"no endpoint answers whose context{length} this row needs"
            self._settler.retry(call, Failure("connect", words, passing=True), None)
