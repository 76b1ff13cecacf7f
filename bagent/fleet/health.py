"""Health of endpoints: probes, checks, circuit breakers, unresponsive servers and outages.

A probe asks whether a server is reachable. A check sends the smallest possible request, and shows
whether it serves the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.fleet.call import Call, Delivery
from bagent.fleet.endpoint_state import MAX_COOL_DOWN, EndpointState, EndpointStatus
from bagent.fleet.outage import Outage
from bagent.fleet.retry import MAX_DEATHS, Blame, blame_of
from bagent.fleet.state import FleetState
from bagent.types import Failure

UNRESPONSIVE_SECONDS = 60.0
UNRESPONSIVE_FACTOR = 10.0
"""An endpoint is unresponsive after this time without an answer, and this many times the slowest
recent latency, if other endpoints answered later requests."""

WATCH_SECONDS = 1.0
"""How often endpoints are watched for silence."""

MAX_NOTICES = 12
"""Notices about endpoints that are shown in full; further ones are counted."""

NOTICE_SUMMARY_SECONDS = 30.0
"""How often the count is shown."""

MAX_PROBES = 64
"""Probes and checks that run at the same time."""

FIRST_CHECK_PAUSE = 5.0
"""Seconds between checks of an unresponsive endpoint, doubling."""

CHECK_DELAY = 0.25
"""Seconds that a later success has to show that an endpoint works, before a check is sent."""

RECENTLY_SERVED = 30.0
"""An endpoint that served a call within so many seconds is used in full after a passed check; any
other is half open at first."""

Judge = Callable[[EndpointState, Call, Failure, Delivery, float], None]

Check = Callable[[Endpoint, Request | None], Awaitable[Failure | None]]
"""Sends a minimal request like the given one; returns None if it was answered."""

Prove = Callable[[Endpoint], Awaitable[Failure | None]]
"""The same without a request to imitate."""


class CheckResult(Enum):
    """Outcome for the calls that were suspended until an endpoint was checked."""

    WORKS = "works"
    RECOVERED = "recovered"  # it works again after several failures in a row
    BROKEN = "broken"


class Health:
    """Runs probes and checks, and drives the circuit breakers.

    Args:
        core: the fleet.
        check: sends a minimal request.

    Attributes:
        judge: decides on calls whose connection failed although the server is up.
        resume: ends or retries the calls suspended for an endpoint.
        on_capabilities: receives what a probed endpoint reports.
        prove: checks a silent endpoint; None leaves it to the timeouts of its requests.
    """

    def __init__(self, core: FleetState, check: Check) -> None:
        self._core = core
        self._send_check = check
        self._outage = Outage(core.config.outage)
        self._notices = 0
        self._suppressed = 0
        self._noticed_at = core.clock()
        self._watched_at = core.clock()
        self._gate = asyncio.Semaphore(MAX_PROBES)
        self.judge: Judge = lambda state, call, failure, delivery, sent: None
        self.resume: Callable[[EndpointState, CheckResult], None] = lambda state, result: None
        self.on_capabilities: Callable[[EndpointState, Capabilities], None] = lambda state, _: None
        self.prove: Prove | None = None

    # --- probes ---------------------------------------------------------------------------------

    def probe(self, state: EndpointState, *, block: bool = True) -> None:
        """Probe an endpoint; with ``block`` it is sent no calls until the probe is back."""
        self._schedule_probe(state, 0.0)
        state.awaiting_probe |= block

    def _schedule_probe(self, state: EndpointState, delay: float) -> None:
        if state.probe_scheduled or self._core.closed or state.leaving:
            return
        state.probe_scheduled = True
        self._core.spawn(self._probe(state, delay), self._core.probes)

    async def _probe(self, state: EndpointState, delay: float) -> None:
        core = self._core
        if delay:
            await asyncio.sleep(delay)
        began = core.clock()
        result: Capabilities | Failure | None = None
        answered = bool(delay) and state.up  # a request was answered meanwhile
        if not answered and not state.leaving:
            async with self._gate:
                result = await core.backend.probe(state.endpoint, core.config.probe_seconds)
                if state.broke_at > began and isinstance(result, Capabilities):
                    began = core.clock()  # it may have died after it answered
                    result = await core.backend.probe(state.endpoint, core.config.probe_seconds)
        state.probe_scheduled = state.awaiting_probe = False
        if isinstance(result, Failure) and result.status is None and state.last_answer < began:
            self._on_probe_failed(state, result)
        else:
            self._on_probe_answered(state, result)
        core.pump()

    def _on_probe_failed(self, state: EndpointState, failure: Failure) -> None:
        core, now = self._core, self._core.clock()
        suspended = core.waiting.on_probe(state.name)
        self._mark_down(state, failure, now)
        for entry in suspended:
            if entry.connected:
                self.died_with(entry.call, now)
            else:
                core.retry_at(entry.call, now)

    def _on_probe_answered(
        self, state: EndpointState, result: Capabilities | Failure | None
    ) -> None:
        core, now = self._core, self._core.clock()
        suspended = core.waiting.on_probe(state.name)
        if not state.up and result is not None:  # None: it is leaving and was not probed
            self.notify(f"{state.name} answers again")
            core.backend.forget(state.endpoint)
        state.on_answer(now)
        if isinstance(result, Capabilities):
            self.on_capabilities(state, result)
        core.sample(state)
        if not state.circuit_open:
            self._outage.end()
        for entry in suspended:
            entry.call.avoid = state.name
            self.judge(state, entry.call, entry.failure, entry.delivery, entry.sent)
        if state.broke_at > state.last_served:
            state.half_open()  # it may answer probes and break off everything else
        core.endpoints.update(state)

    def _mark_down(self, state: EndpointState, failure: Failure, now: float) -> None:
        if state.up:
            self.notify(f"{state.name} does not answer: {failure.message}")
        cool_down = state.on_down(now, failure)
        self._core.sample(state, failure.message)
        self._check_outage(now)
        self._schedule_probe(state, cool_down)

    def _check_outage(self, now: float) -> None:
        reason = self._outage.check(self._core.endpoints.states, now)
        if reason is not None:
            self._core.stop(reason)

    def died_with(self, call: Call, now: float) -> None:
        """Retry a call whose endpoint died: at once, the second time last, then never."""
        core = self._core
        call.deaths += 1
        if call.deaths < MAX_DEATHS:
            core.retry_at(call, now)
        elif call.deaths == MAX_DEATHS:
            if not core.closed:
                core.waiting.add_last(call)
        else:
            message = f"{call.deaths} endpoints died while they worked on this row"
            core.end(call, Failure("connect", message, passing=True), None)

    # --- checks and circuit breakers ------------------------------------------------------------

    def check(
        self, state: EndpointState, request: Request | None, *, suspect: bool = False
    ) -> None:
        """Check an endpoint with a minimal request.

        An endpoint that failed while half open has its circuit opened first, if others can take
        over.

        Args:
            state: the endpoint.
            request: a request that it failed; the check imitates it.
            suspect: send it no calls until the check has passed.
        """
        if state.circuit_open or self._core.closed or state.leaving:
            return
        half_open = state.circuit is EndpointStatus.HALF_OPEN
        if suspect:
            state.suspect()
        if state.check_running:
            return
        fault = None
        if half_open and self._core.endpoints.has_alternative(state):
            fault = Failure("connect", "it fails what it is sent", passing=True)
        self._start_check(state, request, fault)

    def check_later(self, state: EndpointState) -> None:
        """Check an endpoint soon, unless it serves the suspended calls' successors meanwhile."""

        def start() -> None:
            call = self._core.waiting.awaiting_check(state.name)
            if call is not None:
                self.check(state, call.request)

        self._core.loop.call_later(CHECK_DELAY, start)

    def open_circuit(self, state: EndpointState, fault: Failure) -> None:
        """Open the circuit of an endpoint whose answer leaves no doubt, without a check."""
        if not (state.check_running or self._core.closed or state.leaving):
            self._start_check(state, None, fault)

    def _start_check(
        self, state: EndpointState, request: Request | None, fault: Failure | None
    ) -> None:
        state.check_running = True
        self._core.spawn(self._check(state, request, fault), self._core.probes)

    async def _check(
        self, state: EndpointState, request: Request | None, fault: Failure | None
    ) -> None:
        """Send checks until one passes; a ``fault`` opens the circuit before the first."""
        core = self._core
        while True:
            if fault is not None:
                await asyncio.sleep(self._open(state, fault))
            began = core.clock()
            if not state.leaving:
                async with self._gate:
                    fault = await self._send_check(state.endpoint, state.sample or request)
            if state.leaving or core.closed:
                return
            blame = Blame.ROW if fault is None else blame_of(fault)
            busy = blame is Blame.BUSY and core.endpoints.has_alternative(state)
            works = not busy and blame in (Blame.ROW, Blame.BUSY)
            if works or state.works_since > began:
                self._close(state, began)
                return

    def _open(self, state: EndpointState, fault: Failure) -> float:
        """Open the circuit; return the seconds until the next check."""
        core = self._core
        first = not state.circuit_open
        cool_down = state.open_circuit(fault)
        self.resume(state, CheckResult.BROKEN)
        if first:
            self.notify(f"{state.name} serves nothing and gets no more rows: {fault.message}")
        core.sample(state, fault.message)
        self._check_outage(core.clock())
        core.pump()
        return cool_down

    def _close(self, state: EndpointState, sent: float) -> None:
        """Close the circuit after a check that was sent at ``sent``."""
        core = self._core
        suspect = state.circuit is EndpointStatus.SUSPECT
        result = CheckResult.RECOVERED if suspect or state.circuit_open else CheckResult.WORKS
        if state.circuit_open:
            self.notify(f"{state.name} serves again")
        recently = core.clock() - state.last_served <= RECENTLY_SERVED
        half_open = not recently and core.endpoints.has_alternative(state)
        state.close_circuit(sent, half_open=half_open)
        self._outage.end()
        core.sample(state)
        self.resume(state, result)
        self.check_later(state)  # for calls that failed since the check was sent
        core.endpoints.update(state)
        core.pump()

    # --- unresponsive endpoints -----------------------------------------------------------------

    def tick(self) -> None:
        """Watch for unresponsive endpoints; call it often."""
        core = self._core
        now = core.clock()
        if self._suppressed and now - self._noticed_at > NOTICE_SUMMARY_SECONDS:
            down = len(core.endpoints.states) - core.endpoints.up
            core.notice(f"{self._suppressed} more notices of endpoints; {down} are down now")
            self._suppressed, self._noticed_at = 0, now
        if now - self._watched_at < WATCH_SECONDS or len(core.endpoints.states) < 2:
            return
        self._watched_at = now
        slowest = max(core.latencies, default=0.0)
        patience = max(UNRESPONSIVE_SECONDS, UNRESPONSIVE_FACTOR * slowest)
        for state in list(core.endpoints.states):
            if state.unresponsive:
                if not (state.requests or state.circuit_open or self.prove):
                    # Its requests timed out, and nothing else can show that it works again.
                    state.close_circuit(float("-inf"), half_open=True)
                    core.endpoints.update(state)
                    core.pump()
                continue
            oldest = state.oldest_wait
            if oldest is None or not state.up:
                continue
            since = max(oldest, state.last_answer)
            if now - since > patience and core.last_served > since + slowest:
                self._mark_unresponsive(state, now - since)
            elif self.prove and now - max(since, state.silence_probed_at) > UNRESPONSIVE_SECONDS:
                state.silence_probed_at = now
                core.spawn(self._probe_silent(state), core.probes)

    def _mark_unresponsive(self, state: EndpointState, silent: float) -> None:
        state.unresponsive = True
        self.notify(
            f"{state.name} takes requests but has answered none for {silent:.0f} s;"
            " it gets no more until it answers"
        )
        self._core.sample(state, EndpointStatus.UNRESPONSIVE.value)
        self._core.spawn(self._watch_unresponsive(state), self._core.probes)

    async def _probe_silent(self, state: EndpointState) -> None:
        await self._is_dead(state)

    async def _watch_unresponsive(self, state: EndpointState) -> None:
        """Probe and check an unresponsive endpoint until it answers or is dead.

        One that answers probes but no check hangs: its requests are cancelled, and others take
        them. Without ``prove`` its requests run into their timeouts.
        """
        pause = FIRST_CHECK_PAUSE
        while not await self._is_dead(state) and self.prove is not None and state.unresponsive:
            began = self._core.clock()
            fault = await self.prove(state.endpoint)
            if not state.unresponsive:
                return
            if fault is None or fault.status is not None or state.last_answer >= began:
                self._on_responsive(state)
                return
            for request in list(state.requests):
                if not (request.streaming or request.uncancellable):
                    request.cancel(f"{state.name} hangs: {fault.message}")
            if state.leaving:
                return
            await asyncio.sleep(pause)
            pause = min(MAX_COOL_DOWN, pause * 2)

    def _on_responsive(self, state: EndpointState) -> None:
        """An unresponsive endpoint answered a check: one call may try it."""
        state.on_answer(self._core.clock())
        state.half_open()
        self.notify(f"{state.name} answers again")
        self._core.sample(state, "answers again")
        self._core.endpoints.update(state)
        self._core.pump()

    async def _is_dead(self, state: EndpointState) -> bool:
        """Return whether a silent endpoint answers neither of two probes.

        If so it is marked as down, and others take over its requests.
        """
        core, began = self._core, self._core.clock()
        for last in (False, True):
            result = await core.backend.probe(state.endpoint, core.config.probe_seconds)
            failed = isinstance(result, Failure) and result.status is None
            if not failed or state.last_answer >= began or not state.up or core.closed:
                return False
            if not last:
                await asyncio.sleep(core.config.probe_seconds)
        assert isinstance(result, Failure)
        state.unresponsive = False
        self._mark_down(state, result, core.clock())
        for request in list(state.requests):
            request.cancel(f"{state.name} died: {result.message}")
        return True

    def notify(self, message: str) -> None:
        """Show a notice about an endpoint, or count it if there were many."""
        self._notices += 1
        if self._notices <= MAX_NOTICES:
            self._core.notice(message)
            self._noticed_at = self._core.clock()
        else:
            self._suppressed += 1
