"""Endpoints that do not answer, answer only badly, or take requests and answer none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.fleet.call import Call, Delivery
from bagent.fleet.endpoint_state import LONGEST_COOL_DOWN, EndpointState
from bagent.fleet.outage import Outage
from bagent.fleet.retry import Blame, blame_of
from bagent.fleet.state import FleetState
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

Judge = Callable[[EndpointState, Call, Failure, Delivery, float], None]

Prove = Callable[[Endpoint], Awaitable[Failure | None]]
"""Asks an endpoint for an answer as small as there is: None where it came."""

Check = Callable[[Endpoint, Request | None], Awaitable[Failure | None]]
"""The same, of the model and at the route of a request, where one is given."""

PROOF_AFTER = 0.25
"""Seconds for which a call that an endpoint failed waits for the good answer to a later one, before
the endpoint is asked for a proof that it works."""

LATELY_SERVED = 30.0
"""An endpoint that passes a proof gets all that it has room for, where it served a call within so
many seconds; else one call tries it."""


class HealthVerdict(Enum):
    """What is known of an endpoint that failed calls: it works for later ones, it works again after
    it had failed several in a row, or it does not work."""

    WELL = "well"
    WELL_AGAIN = "well again"
    SICK = "sick"


class Health:
    """Probes, circuit breakers and outages; ``judge`` decides on calls that may cost a try after
    all, ``resume`` on those that waited for a proof, ``told`` takes what a probed endpoint tells of
    itself, ``prove`` asks a silent one for a real answer.

    Args:
        check: asks an endpoint that failed calls for a proof that it works.
    """

    def __init__(self, core: FleetState, check: Check) -> None:
        self._core = core
        self._check_with = check
        self._outage = Outage(core.config.outage)
        self._told = 0
        self._untold = 0
        self._told_at = core.clock()
        self._watched_at = core.clock()
        self._gate = asyncio.Semaphore(PROBES_AT_ONCE)
        self.judge: Judge = lambda state, call, failure, delivery, sent: None
        self.resume: Callable[[EndpointState, HealthVerdict], None] = lambda state, verdict: None
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
            for one in held:
                if one.connected:
                    self.died_with(one.call, now)
                else:
                    core.sleep(one.call, now)
        else:
            if not state.up and found is not None:  # else it left, and nobody asked it
                self.tell(f"{state.name} answers again")
                core.backend.forget(state.endpoint)
            state.answered(now)
            if isinstance(found, Capabilities):
                self.told(state, found)
            core.sample(state)
            if not state.resting:
                self._outage.over()
            for one in held:
                one.call.avoid = state.name
                self.judge(state, one.call, one.failure, one.delivery, one.sent)
            if state.broke_at > state.last_served:
                state.trial = True  # it may answer probes and break off all else
            core.endpoints.changed(state)
        core.pump()

    def _down(self, state: EndpointState, found: Failure, now: float) -> None:
        core = self._core
        if state.up:
            self.tell(f"{state.name} does not answer: {found.message}")
        wait = state.went_down(now, found)
        core.sample(state, found.message)
        self._look_for_outage(now)
        self._probe_soon(state, wait)

    def _look_for_outage(self, now: float) -> None:
        reason = self._outage.look(self._core.endpoints.states, now)
        if reason is not None:
            self._core.stop(reason)

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

    def suspect(self, state: EndpointState, request: Request | None, *, sick: bool = False) -> None:
        """Ask an endpoint for a proof that it works.

        Args:
            request: one that it failed; it is asked in the same way.
            sick: it failed several in a row; nothing is sent there until the proof is back.

        One that was on trial has failed the call that tried it: where others can take over, its
        circuit is opened for a while before it is asked.
        """
        if state.resting or self._core.closed or state.leaving:
            return
        state.suspect |= sick
        if state.checking:
            return
        fault = None
        if state.trial and self._core.endpoints.others(state):
            fault = Failure("connect", "it fails what it is sent", passing=True)
        state.checking = True
        self._core.spawn(self._check(state, request, fault), self._core.probes)

    def suspect_later(self, state: EndpointState) -> None:
        """Ask an endpoint for a proof, unless what it serves shows meanwhile that it works."""

        def ask() -> None:
            call = self._core.waiting.suspended(state.name)
            if call is not None:
                self.suspect(state, call.request)

        self._core.loop.call_later(PROOF_AFTER, ask)

    def open(self, state: EndpointState, fault: Failure) -> None:
        """Open the circuit of an endpoint whose own words are proof enough."""
        if state.checking or self._core.closed or state.leaving:
            return
        state.checking = True
        self._core.spawn(self._check(state, None, fault), self._core.probes)

    def _open(self, state: EndpointState, fault: Failure) -> float:
        """Send it nothing more; returns the seconds after which it is tried."""
        core = self._core
        first = not state.resting
        pause = state.open_circuit(fault)
        self.resume(state, HealthVerdict.SICK)
        if first:
            self.tell(f"{state.name} serves nothing and gets no more rows: {fault.message}")
        core.sample(state, fault.message)
        self._look_for_outage(core.clock())
        core.pump()
        return pause

    async def _check(
        self, state: EndpointState, request: Request | None, fault: Failure | None
    ) -> None:
        """Ask an endpoint for proofs until it gives one; ``fault`` opens its circuit before."""
        core = self._core
        while True:
            if fault is not None:
                await asyncio.sleep(self._open(state, fault))
            began = core.clock()
            if not state.leaving:
                async with self._gate:
                    fault = await self._check_with(state.endpoint, state.sample or request)
            if state.leaving or core.closed:
                return
            blame = Blame.ROW if fault is None else blame_of(fault)
            full = blame is Blame.BUSY and core.endpoints.others(state)
            works = not full and blame in (Blame.ROW, Blame.BUSY)
            if works or state.works_since > began:
                self._works(state, began)
                return

    def _works(self, state: EndpointState, sent: float) -> None:
        """A proof that was asked for at ``sent`` shows that the endpoint works."""
        core = self._core
        now = core.clock()
        verdict = HealthVerdict.WELL_AGAIN if state.suspect or state.resting else HealthVerdict.WELL
        if state.resting:
            self.tell(f"{state.name} serves again")
        unsure = now - state.last_served > LATELY_SERVED and core.endpoints.others(state)
        state.close_circuit(sent, trial=unsure)
        self._outage.over()
        core.sample(state)
        self.resume(state, verdict)
        self.suspect_later(state)  # for calls that failed since the proof was asked for
        core.endpoints.changed(state)
        core.pump()

    def _end_rest(self, state: EndpointState) -> None:
        state.close_circuit(float("-inf"), trial=True)
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
