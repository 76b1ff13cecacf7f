"""Endpoints that do not answer, answer only badly, or take requests and answer none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.fleet.call import Call, Delivery
from bagent.fleet.core import Core
from bagent.fleet.endpoint_state import LONGEST_COOL_DOWN, EndpointState
from bagent.fleet.outage import Outage
from bagent.types import Failure

DEADLY = 2
"""A call with which so many endpoints died runs last, alone, once."""

STALL_SECONDS = 60.0
STALL_FACTOR = 10.0
"""An endpoint is stalled when it has answered nothing for so long, and for so many times what the
slowest recent answer took, while others answered what they were sent later."""

WATCH_SECONDS = 1.0
TOLD = 12
"""So many lines about endpoints are written in full; then they are counted."""
TOLD_AGAIN = 30.0

PROBES_AT_ONCE = 64

PROVE_AGAIN = 5.0
"""Seconds until an endpoint that hangs is asked again whether it works, doubling."""

Retry = Callable[[Call, Failure, Delivery | None], None]

Prove = Callable[[Endpoint], Awaitable[Failure | None]]
"""Asks an endpoint for an answer as small as there is: None where it came."""


class Health:
    """Probes, rests and outages; ``retry`` decides on calls that cost a try after all, ``told``
    takes what a probed endpoint tells of itself, ``prove`` asks a silent one for a real answer."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._outage = Outage(core.config.outage)
        self._told = 0
        self._untold = 0
        self._told_at = core.clock()
        self._watched_at = core.clock()
        self._gate = asyncio.Semaphore(PROBES_AT_ONCE)
        self.retry: Retry = lambda call, failure, delivery: None
        self.prove: Prove | None = None
        self.told: Callable[[EndpointState, Capabilities], None] = lambda state, found: None

    # --- endpoints that do not answer ---------------------------------------------------------

    def doubt(self, state: EndpointState, *, stop: bool = True) -> None:
        """A request found no server: a probe decides what that costs it.

        With ``stop`` nothing more is sent until then; without, others were answered meanwhile.
        """
        self._probe_soon(state, 0.0)
        state.doubted |= stop

    def _probe_soon(self, state: EndpointState, delay: float) -> None:
        if state.probing or self._core.closed or state.leaving:
            return
        state.probing = True
        self._core.spawn(self._probe(state, delay), self._core.probes)

    async def _probe(self, state: EndpointState, delay: float) -> None:
        core = self._core
        if delay:
            await asyncio.sleep(delay)
        began, found = core.clock(), None
        if not (delay and state.up) and not state.leaving:
            # Else requests were answered meanwhile.
            async with self._gate:
                found = await core.backend.probe(state.endpoint, core.config.probe_seconds)
                if state.broke_at > began and isinstance(found, Capabilities):
                    began = core.clock()  # it may have died after it answered
                    found = await core.backend.probe(state.endpoint, core.config.probe_seconds)
        state.probing = state.doubted = False
        now = core.clock()
        held = core.waiting.release(state.name)
        if isinstance(found, Failure) and found.status is None and state.last_good < began:
            self._down(state, found, now)
            for call, _, _, connected in held:
                if connected:
                    self.died_with(call, now)
                else:
                    core.sleep(call, now)
        else:
            if not state.up and found is not None:  # else it left, and nobody asked it
                self.tell(f"{state.name} answers again")
                core.backend.forget(state.endpoint)
            state.answered(now)
            self._try_after_break(state)
            if isinstance(found, Capabilities):
                self.told(state, found)
            core.sample(state)
            self._outage.over()
            for call, failure, delivery, _ in held:
                call.avoid = state.name
                self.retry(call, failure, delivery)
            core.endpoints.changed(state)
        core.pump()

    def _try_after_break(self, state: EndpointState) -> None:
        """It may answer probes and break off all else: one call tries it, and where that one broke
        too, after a rest."""
        if state.broke_at <= state.last_served:
            return
        broke_again, state.trial = state.trial, True
        if broke_again and not state.resting and self._core.endpoints.others(state):
            self.rest(state, Failure("connect", "it breaks off what it is sent", passing=True))

    def _down(self, state: EndpointState, found: Failure, now: float) -> None:
        core = self._core
        if state.up:
            self.tell(f"{state.name} does not answer: {found.message}")
        wait = state.went_down(now)
        core.sample(state, found.message)
        reason = self._outage.went_down(core.endpoints.states, now, found)
        if reason is not None:
            core.stop(reason)
        self._probe_soon(state, wait)

    def died_with(self, call: Call, now: float) -> None:
        """An endpoint died while it had the call: that costs no try, unless it happens again."""
        core = self._core
        call.deaths += 1
        if call.deaths < DEADLY:
            core.sleep(call, now)
        elif call.deaths == DEADLY:
            if not core.closed:
                core.waiting.add_last(call)
        else:
            words = f"{call.deaths} endpoints died while they worked on this row"
            core.fail(call, Failure("connect", words, passing=True), None)

    # --- endpoints that answer badly, or not at all -------------------------------------------

    def rest(self, state: EndpointState, failure: Failure) -> None:
        """Send an endpoint nothing for a while, then one call."""
        core = self._core
        seconds = state.rest()
        self.tell(f"{state.name} answers only badly and rests {seconds:.0f} s: {failure.message}")
        core.sample(state, failure.message)
        core.loop.call_later(seconds, self._end_rest, state)

    def _end_rest(self, state: EndpointState) -> None:
        state.try_again()
        self._core.endpoints.changed(state)
        self._core.pump()

    def tick(self) -> None:
        """Look for endpoints that take requests and answer none; call it often."""
        core = self._core
        now = core.clock()
        if self._untold and now - self._told_at > TOLD_AGAIN:
            down = len(core.endpoints.states) - core.endpoints.up
            core.notice(f"{self._untold} more notices of endpoints; {down} are down now")
            self._untold, self._told_at = 0, now
        if now - self._watched_at < WATCH_SECONDS or len(core.endpoints.states) < 2:
            return
        self._watched_at = now
        slowest = max(core.latencies, default=0.0)
        patience = max(STALL_SECONDS, STALL_FACTOR * slowest)
        for state in list(core.endpoints.states):
            oldest = state.waits_since
            if state.stalled and not state.carriers and not state.resting and self.prove is None:
                # All that it had ran out of time while nobody else could be asked.
                self._end_rest(state)
                continue
            if oldest is None or state.stalled or not state.up:
                continue
            since = max(oldest, state.last_good)
            if now - since > patience and core.last_served > since + slowest:
                self._stalled(state, now - since)
            elif self.prove is not None and now - max(since, state.looked_at) > STALL_SECONDS:
                state.looked_at = now
                core.spawn(self._look(state), core.probes)

    def _stalled(self, state: EndpointState, silent: float) -> None:
        """Nothing more goes there until it answers."""
        state.stalled = True
        self.tell(
            f"{state.name} takes requests but has answered none for {silent:.0f} s;"
            " it gets no more until it answers"
        )
        self._core.sample(state, "stalled")
        self._core.spawn(self._look_after(state), self._core.probes)

    async def _look(self, state: EndpointState) -> None:
        """See whether a silent server is dead."""
        await self._is_dead(state)

    async def _look_after(self, state: EndpointState) -> None:
        """A stalled server that does not even answer a probe is dead. One that does, but not a
        request as small as there is, hangs: others take what it has. Without a way to ask it one,
        that is left to its time limits."""
        pause = PROVE_AGAIN
        while not await self._is_dead(state) and self.prove is not None and state.stalled:
            began = self._core.clock()
            fault = await self.prove(state.endpoint)
            if not state.stalled:
                return
            if fault is None or fault.status is not None or state.last_good >= began:
                self._goes_on(state)
                return
            for carrier in list(state.carriers):
                if not (carrier.begun or carrier.stays):
                    carrier.give_up(f"{state.name} hangs: {fault.message}")
            if state.leaving:
                return
            await asyncio.sleep(pause)
            pause = min(LONGEST_COOL_DOWN, pause * 2)

    def _goes_on(self, state: EndpointState) -> None:
        """A stalled server answered what it was asked for a proof: one call may try it."""
        state.answered(self._core.clock())
        state.trial = True
        self.tell(f"{state.name} answers again")
        self._core.sample(state, "answers again")
        self._core.endpoints.changed(state)
        self._core.pump()

    async def _is_dead(self, state: EndpointState) -> bool:
        """Whether a silent server answers no probe, twice: then it is dead, and others take over
        what it has."""
        core, began = self._core, self._core.clock()
        for again in (True, False):
            found = await core.backend.probe(state.endpoint, core.config.probe_seconds)
            dead = isinstance(found, Failure) and found.status is None
            if not dead or state.last_good >= began or not state.up or core.closed:
                return False
            if again:
                await asyncio.sleep(core.config.probe_seconds)
        assert isinstance(found, Failure)
        state.stalled = False
        self._down(state, found, core.clock())
        for carrier in list(state.carriers):
            carrier.give_up(f"{state.name} died: {found.message}")
        return True

    def tell(self, words: str) -> None:
        """Write a line about an endpoint; of thousands only the first and a count."""
        self._told += 1
        if self._told <= TOLD:
            self._core.notice(words)
            self._told_at = self._core.clock()
        else:
            self._untold += 1
