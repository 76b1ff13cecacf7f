"""Endpoints from joining to leaving: probes, checks, circuit breakers, silence and outages.

A probe asks whether a server is reachable. A check sends the smallest possible request, and shows
whether it serves the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.errors import BagentError, NeedsPerson, StoppedEarly
from bagent.fleet.call import CheckEndpoint, EndpointAction, OpenCircuit, ProbeEndpoint
from bagent.fleet.endpoint_state import MAX_COOL_DOWN, CheckResult, EndpointState
from bagent.fleet.retry import Blame, blame_of
from bagent.fleet.state import FleetReports, FleetState, FleetTasks, OutagePatience
from bagent.types import Failure

UNRESPONSIVE_SECONDS = 60.0
UNRESPONSIVE_FACTOR = 10.0
"""An endpoint is unresponsive after this time without an answer, and this many times the slowest
recent latency, if other endpoints answered later requests."""

WATCH_SECONDS = 1.0
"""How often endpoints are watched for silence."""

MAX_PROBES = 64
"""Probes and checks that run at the same time."""

FIRST_CHECK_PAUSE = 5.0
"""Seconds between checks of an unresponsive endpoint, doubling."""

RECENTLY_SERVED = 30.0
"""An endpoint that served a call within so many seconds is used in full after a passed check; any
other is half open at first."""

Check = Callable[[Endpoint, Request | None], Awaitable[Failure | None]]
"""Sends a minimal request like the given one; returns None if it was answered."""

Prove = Callable[[Endpoint], Awaitable[Failure | None]]
"""The same without a request to imitate."""


class HealthListener(Protocol):
    """Hears what probes and checks of endpoints have shown."""

    def on_probe(
        self, state: EndpointState, capabilities: Capabilities | None, *, answered: bool
    ) -> None:
        """A probe is back; ``capabilities`` are what the endpoint reported, if anything."""
        ...

    def on_check(self, state: EndpointState, result: CheckResult) -> None:
        """A check passed, or failed for good."""
        ...

    def on_change(self) -> None:
        """Endpoints may have more room."""
        ...


class Outage:
    """Measures how long no endpoint has served; times are on the fleet's clock."""

    def __init__(self, patience: OutagePatience) -> None:
        self._patience = patience
        self._since: float | None = None

    def end(self) -> None:
        """Record that an endpoint works."""
        self._since = None

    def check(self, states: Sequence[EndpointState], now: float) -> BagentError | None:
        """Return the reason to stop, once all endpoints have been faulty for too long.

        Call it when an endpoint goes down or its circuit opens.
        """
        states = [state for state in states if not state.leaving]
        faults = [state.fault for state in states if state.fault is not None]
        if not faults or len(faults) < len(states):
            self._since = None
            return None
        if self._since is None:
            self._since = now
        # A request that was sent before may still be answered well.
        last_served = max(state.last_served for state in states)
        seconds = now - max(self._since, last_served)
        if seconds < self._seconds(faults, served=last_served > float("-inf")):
            return None
        return _reason(states, faults, seconds)

    def _seconds(self, faults: Sequence[Failure], *, served: bool) -> float:
        patience = self._patience
        if all(blame_of(fault) is Blame.ACCOUNT for fault in faults):
            return 0.0
        if not any(fault.passing for fault in faults):
            return patience.lasting if served else patience.first_lasting
        answers = all(fault.status is not None and not fault.busy for fault in faults)
        return patience.first if answers and not served else patience.passing


def _reason(
    states: Sequence[EndpointState], faults: Sequence[Failure], seconds: float
) -> BagentError:
    """Return the error to stop with: `StoppedEarly` if waiting may help, else `NeedsPerson`."""
    passing = next((fault for fault in faults if fault.passing), None)
    fault = passing or faults[0]
    single = len(states) == 1
    if fault.kind == "budget":
        return NeedsPerson(
            f"the account's quota or credit is spent: {fault.message}",
            hint="raise the quota or change the key",
        )
    if fault.status is None and fault.kind == "connect" and fault.passing:
        nobody = "the endpoint has not" if single else f"none of {len(states)} endpoints has"
        return StoppedEarly(f"{nobody} answered for {seconds:.0f} s: {fault.message}")
    which = "the endpoint has" if single else f"all {len(states)} endpoints have"
    message = f"{which} served nothing for {seconds:.0f} s: {fault.message}"
    if passing is not None:
        return StoppedEarly(message)
    hints = {
        "auth": "set a key that the server accepts, then give the same command",
        "connect": "check the address and the network, then give the same command",
    }
    other = "serve the model there again, or name another with --model"
    return NeedsPerson(message, hint=hints.get(fault.kind, other))


class Health:
    """Adds and removes endpoints, runs probes and checks, and drives the circuit breakers.

    Args:
        fleet: its endpoints and counters.
        backend: sends probes.
        tasks: run probes and checks.
        reports: shows what happens to endpoints.
        listener: hears about it.
        check: sends a minimal request.
        prove: checks a silent endpoint; None leaves it to the timeouts of its requests.
    """

    def __init__(
        self,
        fleet: FleetState,
        backend: Backend,
        tasks: FleetTasks,
        reports: FleetReports,
        listener: HealthListener,
        check: Check,
        prove: Prove | None = None,
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._tasks = tasks
        self._reports = reports
        self._listener = listener
        self._send_check = check
        self._prove = prove
        self._outage = Outage(fleet.config.outage)
        self._watched_at = fleet.clock()
        self._gate = asyncio.Semaphore(MAX_PROBES)
        self._probing: set[EndpointState] = set()
        self._checking: set[EndpointState] = set()

    def apply(self, action: EndpointAction) -> None:
        """Probe or check an endpoint, or open its circuit."""
        match action:
            case ProbeEndpoint(state, block):
                self.probe(state, block=block)
            case CheckEndpoint(state, request, suspect):
                self.check(state, request, suspect=suspect)
            case OpenCircuit(state, fault):
                self.open_circuit(state, fault)

    # --- endpoints that join and leave ------------------------------------------------------------

    def join(self, states: Sequence[EndpointState]) -> list[EndpointState]:
        """Add endpoints; each gets calls once a probe has reached it.

        One that comes back while it is leaving, perhaps with other tags, takes over the requests
        in flight of its former state. Return the former states, which are removed.
        """
        endpoints = self._fleet.endpoints
        removed = []
        for state in states:
            former = endpoints.get(state.name)
            if former is not None:
                endpoints.remove(former)
                state.take_over(former)
                removed.append(former)
            endpoints.add(state)
            self._reports.sample(state, "joined")
            self.probe(state)
        return removed

    def leave(self, names: Sequence[str]) -> list[EndpointState]:
        """Send nothing more to these endpoints; return those that are removed at once."""
        removed = []
        for name in names:
            state = self._fleet.endpoints.get(name)
            if state is not None and not state.leaving:
                state.leave()
                self._reports.sample(state, "left the hostfile")
                if self.remove_if_done(state):
                    removed.append(state)
        return removed

    def remove_if_done(self, state: EndpointState) -> bool:
        """Remove an endpoint that is leaving and has nothing in flight; return whether it was."""
        done = state.leaving and not state.requests and not self._is_removed(state)
        if done:
            self._fleet.endpoints.remove(state)
        return done

    def _is_removed(self, state: EndpointState) -> bool:
        """Return whether an endpoint was removed, or came back as another state."""
        return self._fleet.endpoints.get(state.name) is not state

    # --- probes ---------------------------------------------------------------------------------

    def probe(self, state: EndpointState, *, block: bool = True) -> None:
        """Probe an endpoint; with ``block`` it is sent no calls until the probe is back."""
        self._schedule_probe(state, 0.0)
        if block:
            state.await_probe()

    def _schedule_probe(self, state: EndpointState, delay: float) -> None:
        if state in self._probing or self._fleet.closed or state.leaving:
            return
        self._probing.add(state)
        self._tasks.spawn_probe(self._probe(state, delay))

    async def _probe(self, state: EndpointState, delay: float) -> None:
        clock, seconds = self._fleet.clock, self._fleet.config.probe_seconds
        if delay:
            await asyncio.sleep(delay)
        began = clock()
        result: Capabilities | Failure | None = None
        answered = bool(delay) and state.up  # a request was answered meanwhile
        if not answered and not state.leaving:
            async with self._gate:
                result = await self._backend.probe(state.endpoint, seconds)
                if state.broke_at > began and isinstance(result, Capabilities):
                    began = clock()  # it may have died after it answered
                    result = await self._backend.probe(state.endpoint, seconds)
        self._probing.discard(state)
        if self._is_removed(state):
            return
        if isinstance(result, Failure) and result.status is None and state.last_answer < began:
            self._mark_down(state, result, clock())
            self._listener.on_probe(state, None, answered=False)
        else:
            self._on_probe_answered(state, result)
        self._listener.on_change()

    def _on_probe_answered(
        self, state: EndpointState, result: Capabilities | Failure | None
    ) -> None:
        if not state.up and result is not None:  # None: it is leaving and was not probed
            self._reports.notify(f"{state.name} answers again")
            self._backend.forget(state.endpoint)
        state.on_answer(self._fleet.clock())
        self._reports.sample(state)
        if not state.circuit_open:
            self._outage.end()
        capabilities = result if isinstance(result, Capabilities) else None
        self._listener.on_probe(state, capabilities, answered=True)
        if state.broke_at > state.last_served:
            state.half_open()  # it may answer probes and break off everything else
        self._fleet.endpoints.update(state)

    def _mark_down(self, state: EndpointState, failure: Failure, now: float) -> None:
        if state.up:
            self._reports.notify(f"{state.name} does not answer: {failure.message}")
        cool_down = state.on_down(now, failure)
        self._reports.sample(state, failure.message)
        self._check_outage(now)
        self._schedule_probe(state, cool_down)

    def _check_outage(self, now: float) -> None:
        reason = self._outage.check(self._fleet.endpoints.states, now)
        if reason is not None:
            self._tasks.stop(reason)

    # --- checks and circuit breakers ------------------------------------------------------------

    def check(
        self, state: EndpointState, request: Request | None, *, suspect: bool = False
    ) -> None:
        """Check an endpoint with a minimal request.

        An endpoint that failed while half open has its circuit opened first, if others can take
        over. Calls that are suspended until a check still wait for it.

        Args:
            state: the endpoint.
            request: a request that it failed; the check imitates it.
            suspect: send it no calls until the check has passed.
        """
        if state.circuit_open or self._fleet.closed or state.leaving:
            return
        half_open = state.is_half_open
        if suspect:
            state.suspect()
        if state in self._checking:
            return
        fault = None
        if half_open and self._fleet.endpoints.has_alternative(state):
            fault = Failure("connect", "it fails what it is sent", passing=True)
        self._start_check(state, request, fault, broken=False)

    def open_circuit(self, state: EndpointState, fault: Failure) -> None:
        """Open the circuit of an endpoint whose answer leaves no doubt, without a check."""
        if not (state in self._checking or self._fleet.closed or state.leaving):
            self._start_check(state, None, fault, broken=True)

    def _start_check(
        self, state: EndpointState, request: Request | None, fault: Failure | None, *, broken: bool
    ) -> None:
        self._checking.add(state)
        self._tasks.spawn_probe(self._check(state, request, fault, broken))

    async def _check(
        self, state: EndpointState, request: Request | None, fault: Failure | None, broken: bool
    ) -> None:
        """Send checks until one passes.

        A ``fault`` opens the circuit before the first. With ``broken`` the endpoint is sure to be
        at fault, so calls that are suspended until a check no longer wait for it.
        """
        fleet = self._fleet
        while True:
            if fault is not None:
                await asyncio.sleep(self._open(state, fault, broken=broken))
            began = fleet.clock()
            if not state.leaving:
                async with self._gate:
                    fault = await self._send_check(state.endpoint, state.sample or request)
            if state.leaving or fleet.closed:
                return
            blame = Blame.ROW if fault is None else blame_of(fault)
            busy = blame is Blame.BUSY and fleet.endpoints.has_alternative(state)
            works = not busy and blame in (Blame.ROW, Blame.BUSY)
            if works or state.works_since > began:
                self._close(state, began)
                return
            state.give_back_attempts()
            broken = True

    def _open(self, state: EndpointState, fault: Failure, *, broken: bool) -> float:
        """Open the circuit; return the seconds until the next check."""
        first = not state.circuit_open
        cool_down = state.open_circuit(fault)
        if broken:
            self._listener.on_check(state, CheckResult.BROKEN)
        if first:
            message = f"{state.name} serves nothing and gets no more rows: {fault.message}"
            self._reports.notify(message)
        self._reports.sample(state, fault.message)
        self._check_outage(self._fleet.clock())
        self._listener.on_change()
        return cool_down

    def _close(self, state: EndpointState, sent: float) -> None:
        """Close the circuit after a check that was sent at ``sent``."""
        fleet = self._fleet
        suspect = state.is_suspect or state.circuit_open
        if state.circuit_open:
            self._reports.notify(f"{state.name} serves again")
        recently = fleet.clock() - state.last_served <= RECENTLY_SERVED
        half_open = not recently and fleet.endpoints.has_alternative(state)
        state.close_circuit(sent, half_open=half_open)
        self._checking.discard(state)
        if state.context is None and state.endpoint.own:
            self.probe(state)  # it may tell now what it refused to tell before
        self._outage.end()
        self._reports.sample(state)
        self._listener.on_check(state, CheckResult.RECOVERED if suspect else CheckResult.WORKS)
        fleet.endpoints.update(state)
        self._listener.on_change()

    # --- unresponsive endpoints -----------------------------------------------------------------

    def tick(self) -> None:
        """Watch for unresponsive endpoints; call it often."""
        fleet = self._fleet
        now = fleet.clock()
        self._reports.summarize(len(fleet.endpoints.states) - fleet.endpoints.up)
        if now - self._watched_at < WATCH_SECONDS or len(fleet.endpoints.states) < 2:
            return
        self._watched_at = now
        slowest = max(fleet.latencies, default=0.0)
        patience = max(UNRESPONSIVE_SECONDS, UNRESPONSIVE_FACTOR * slowest)
        for state in list(fleet.endpoints.states):
            if state.unresponsive:
                if not (state.requests or state.circuit_open or self._prove):
                    # Its requests timed out, and nothing else can show that it works again.
                    state.close_circuit(float("-inf"), half_open=True)
                    fleet.endpoints.update(state)
                    self._checking.discard(state)
                    self._listener.on_change()
                continue
            oldest = state.oldest_wait
            if oldest is None or not state.up:
                continue
            since = max(oldest, state.last_answer)
            if now - since > patience and fleet.last_served > since + slowest:
                self._mark_unresponsive(state, now - since)
            elif self._prove and now - max(since, state.silence_probed_at) > UNRESPONSIVE_SECONDS:
                state.silence_probed_at = now
                self._tasks.spawn_probe(self._probe_silent(state))

    def _mark_unresponsive(self, state: EndpointState, silent: float) -> None:
        state.on_silence()
        self._reports.notify(
            f"{state.name} takes requests but has answered none for {silent:.0f} s;"
            " it gets no more until it answers"
        )
        self._reports.sample(state, "unresponsive")
        self._tasks.spawn_probe(self._watch_unresponsive(state))

    async def _probe_silent(self, state: EndpointState) -> None:
        await self._is_dead(state)

    async def _watch_unresponsive(self, state: EndpointState) -> None:
        """Probe and check an unresponsive endpoint until it answers or is dead.

        One that answers probes but no check hangs: its requests are cancelled, and others take
        them. Without ``prove`` its requests run into their timeouts.
        """
        pause = FIRST_CHECK_PAUSE
        while not await self._is_dead(state) and self._prove is not None and state.unresponsive:
            began = self._fleet.clock()
            fault = await self._prove(state.endpoint)
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
        state.on_answer(self._fleet.clock())
        state.half_open()
        self._reports.notify(f"{state.name} answers again")
        self._reports.sample(state, "answers again")
        self._fleet.endpoints.update(state)
        self._listener.on_change()

    async def _is_dead(self, state: EndpointState) -> bool:
        """Return whether a silent endpoint answers neither of two probes.

        If so it is marked as down, and others take over its requests.
        """
        fleet, began = self._fleet, self._fleet.clock()
        seconds = fleet.config.probe_seconds
        for last in (False, True):
            result = await self._backend.probe(state.endpoint, seconds)
            failed = isinstance(result, Failure) and result.status is None
            gone = not state.up or fleet.closed or self._is_removed(state)
            if not failed or state.last_answer >= began or gone:
                return False
            if not last:
                await asyncio.sleep(seconds)
        assert isinstance(result, Failure)
        state.end_silence()
        self._mark_down(state, result, fleet.clock())
        for request in list(state.requests):
            request.cancel(f"{state.name} died: {result.message}")
        return True
