"""Calls all endpoints of a fleet in parallel, each proven by a real request, in bounded time.

Dead and silent endpoints are many in a large fleet, so nobody waits for one alone: what is left
of the time is shared out so that every endpoint is asked, and the end is the end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engines.detect import choose_model, detect_capabilities
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.engines.probe import CompletionProbe, ProbeResult
from bagent.backends.http.client import Transport
from bagent.backends.openai.models import fetch_models
from bagent.types import Failure

State = Literal["ready", "loading", "busy", "silent", "dead", "refuses", "broken", "unasked"]
"""``ready``: a real request was answered. ``loading``: the server is there, its model is not yet.
``busy``: it has no room. ``silent``: it accepts and does not answer in time. ``dead``: no
connection. ``refuses``: key, model or request are not accepted. ``broken``: it answers something
that is no answer. ``unasked``: there was no time, or this machine was out of something."""

STATES: tuple[State, ...] = get_args(State)

_LOADING = re.compile(r"loading|starting|warm(ing)?[ -]?up|not (yet )?ready|initiali[sz]", re.I)


class HealthResult(msgspec.Struct, frozen=True):
    """One endpoint as it was found.

    ``model`` is what it was asked for, ``proof`` the real request that it answered; ``reason``
    says in a line why it is not ready, empty where it is.
    """

    endpoint: Endpoint
    state: State
    reason: str = ""
    model: str | None = None
    known: Capabilities | None = None
    load: EngineLoad | None = None
    proof: ProbeResult | None = None

    @property
    def ready(self) -> bool:
        """Whether it answered a real request."""
        return self.state == "ready"


def state_of(failure: Failure) -> State:
    """The state of an endpoint whose request came to ``failure``."""
    status = failure.status
    if failure.kind == "connect":
        return "dead" if failure.passing else "broken"
    if failure.kind == "timeout":
        return "silent"
    if failure.kind in ("auth", "budget", "rejected", "context_overflow", "refused"):
        return "refuses"
    if failure.kind == "rate_limited":
        return "busy"
    if failure.kind == "overloaded":
        if status is None:
            return "unasked"
        if status == 503 and (not failure.busy or _LOADING.search(failure.message)):
            return "loading"
        return "busy" if failure.busy else "broken"
    return "broken"


def not_ready(
    endpoint: Endpoint, failure: Failure, known: Capabilities | None = None
) -> HealthResult:
    """The endpoint, whose request came to ``failure``."""
    return HealthResult(endpoint, state_of(failure), failure.message, known=known)


class Group(msgspec.Struct, frozen=True):
    """Endpoints that are not ready for one and the same reason; ``first`` stands for them.

    ``key`` is the state and the reason less names and numbers.
    """

    key: tuple[State, str]
    count: int
    first: HealthResult

    def words(self) -> str:
        """``80 dead, such as: cannot connect to node3:8000: Connection refused``."""
        name, reason = self.first.endpoint.name, self.first.reason
        told = reason if name in reason else f"{name}: {reason}"
        return f"{self.count} {self.key[0]}{', such as' if self.count > 1 else ''}: {told}"


def grouped(called: Iterable[HealthResult]) -> list[Group]:
    """The endpoints that are not ready by reason, the largest groups first."""
    groups: dict[tuple[State, str], list[HealthResult]] = {}
    for one in called:
        if not one.ready:
            reason = re.sub(r"[0-9][0-9.]*", "0", one.reason.replace(one.endpoint.name, ""))
            groups.setdefault((one.state, reason), []).append(one)
    found = [Group(key, len(members), members[0]) for key, members in groups.items()]
    return sorted(found, key=lambda group: -group.count)


def counts(called: Sequence[HealthResult | None]) -> str:
    """``12 of 100 ready, 80 dead, 3 loading, 5 no answer yet``."""
    number = dict.fromkeys(STATES, 0)
    for one in called:
        if one is not None:
            number[one.state] += 1
    told = [f"{number['ready']} of {len(called)} ready"]
    told += [f"{number[state]} {state}" for state in STATES[1:] if number[state]]
    waiting = sum(1 for one in called if one is None)
    return ", ".join(told + ([f"{waiting} no answer yet"] if waiting else []))


LEARN_SECONDS = 5.0
"""How long a ready endpoint is asked what else it serves."""

GRACE_SECONDS = 2.0
"""So long those that are just being asked are waited for once enough are ready."""

CANCEL_SECONDS = 1.0
_MARGIN = 0.3
_MOST_AT_ONCE = 30.0
_LEAST = 0.05
_TO_BE_ASKED, _AFTER_ALL_WERE_ASKED = 0.0, 0.001
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 1.0, 5.0, 1.5


class HealthCheckPlan(msgspec.Struct, frozen=True):
    """How a roll call goes.

    Attributes:
        seconds: when it ends at the latest.
        width: endpoints that are asked at once; each may hold two connections.
        model: only endpoints that serve it are ready; None is any.
        wanted: how many ready endpoints are enough.
        again: ask those that are not ready again and again, until ``wanted`` are.
    """

    seconds: float
    width: int
    wanted: int
    model: str | None = None
    again: bool = False


class FleetHealthCheck:
    """One roll call of ``endpoints``; ``called`` is what is known of each so far, in their order.

    ``ready`` counts those that are ready so far.

    Args:
        transport: how they are reached; it stays open.
        prover: sends the real requests.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        plan: HealthCheckPlan,
        transport: Transport,
        prover: CompletionProbe,
    ) -> None:
        self.called: list[HealthResult | None] = [None] * len(endpoints)
        self._endpoints = endpoints
        self._plan = plan
        self._transport = transport
        self._prover = prover
        self._due: asyncio.PriorityQueue[tuple[float, int]] = asyncio.PriorityQueue()
        self._pauses = [_FIRST_PAUSE] * len(endpoints)
        self._unasked = len(endpoints)
        self._asking: set[int] = set()
        self._enough = asyncio.Event()
        self._calm = asyncio.Event()
        self._end = 0.0
        self._to_learn: set[int] = set()
        self.ready = 0

    async def run(self) -> list[HealthResult]:
        """Call all; what is known of each at the end, in their order."""
        self._end = _now() + self._plan.seconds
        for number in range(len(self._endpoints)):
            self._due.put_nowait((_TO_BE_ASKED, number))
        width = min(self._plan.width, len(self._endpoints))
        workers = [asyncio.ensure_future(self._work()) for _ in range(width)]
        try:
            await self._wait(workers)
        finally:
            asking = set(self._asking)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=CANCEL_SECONDS)
        for worker in workers:
            if worker.done() and not worker.cancelled():
                worker.result()  # a fault of our own is not to be passed over
        return [one or self._left_over(n, n in asking) for n, one in enumerate(self.called)]

    async def _wait(self, workers: Sequence[asyncio.Future[None]]) -> None:
        """Until all were asked, or enough are ready, or the time is over."""
        left = self._plan.seconds
        if not self._plan.again:
            await asyncio.wait(workers, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            return
        enough: asyncio.Future[Any] = asyncio.ensure_future(self._enough.wait())
        # The workers go on for ever: one that is done has met a fault of our own.
        await asyncio.wait([enough, *workers], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        enough.cancel()
        while self._enough.is_set() and not self._calm.is_set():
            before, left = (self.ready, len(self._to_learn)), self._end - _now()
            try:
                async with asyncio.timeout(min(GRACE_SECONDS, left)):
                    await self._calm.wait()
            except TimeoutError:
                if (self.ready, len(self._to_learn)) == before or left < GRACE_SECONDS:
                    return

    def _left_over(self, number: int, asked: bool) -> HealthResult:
        endpoint = self._endpoints[number]
        end = "enough others were ready" if self._enough.is_set() else "the time was over"
        if asked:
            return HealthResult(endpoint, "silent", f"no answer from {endpoint.name} before {end}")
        return HealthResult(endpoint, "unasked", f"{end} before it was asked")

    async def _work(self) -> None:
        """Ask one endpoint after the other, the one first whose turn is next."""
        while self._plan.again or not self._due.empty():
            due, number = await self._due.get()
            await asyncio.sleep(max(0.0, due - _now()))
            self._asking.add(number)
            try:
                await (self._learn if number in self._to_learn else self._turn)(number)
            finally:
                self._asking.discard(number)
            if self.ready >= self._plan.wanted:
                self._enough.set()
                if not self._asking and not self._to_learn:
                    self._calm.set()

    async def _turn(self, number: int) -> None:
        self._unasked -= self.called[number] is None
        found = self.called[number] = await self._ask(self._endpoints[number], self._share())
        if found.ready:
            self.ready += 1
            self._to_learn.add(number)
            self._due.put_nowait((_AFTER_ALL_WERE_ASKED, number))
        elif self._plan.again:
            pause = self._pauses[number]
            self._pauses[number] = min(_LONGEST_PAUSE, pause * _GROWTH)
            self._due.put_nowait((_now() + pause, number))

    async def _learn(self, number: int) -> None:
        """Add to a ready endpoint what else it tells, as far as time allows."""
        one = self.called[number]
        left = min(LEARN_SECONDS, self._end - _now() - _MARGIN)
        if one is not None and one.known is not None:
            more = await detect_capabilities(self._transport, one.endpoint, one.known, left)
            known = more.capabilities
            if one.proof is not None and one.proof.cached_tokens:
                known = msgspec.structs.replace(known, cached_tokens=True)
            self.called[number] = msgspec.structs.replace(one, known=known, load=more.load)
        self._to_learn.discard(number)

    def _share(self) -> float:
        """Seconds for one endpoint, so that those that were never asked get as much each."""
        width = self._plan.width
        later = max(0, self._unasked - (width - len(self._asking)))
        rounds = 1 + -(-later // width)
        left = self._end - _now() - _MARGIN
        share = left / rounds
        return min(share, _MOST_AT_ONCE) if self._plan.again else share

    async def _ask(self, endpoint: Endpoint, seconds: float) -> HealthResult:
        end = _now() + seconds
        if seconds < _LEAST:
            return HealthResult(endpoint, "unasked", "the time was over before it was asked")
        known = await fetch_models(self._transport, endpoint, seconds)
        if isinstance(known, Failure):
            return not_ready(endpoint, known)
        refused = self._unfit(endpoint, known)
        if refused is not None:
            return refused
        model = choose_model(known, endpoint, self._plan.model)
        proof = await self._prover.prove(endpoint, model, end - _now())
        if not isinstance(proof, ProbeResult):
            return msgspec.structs.replace(not_ready(endpoint, proof, known), model=model)
        return HealthResult(endpoint, "ready", model=model, known=known, proof=proof)

    def _unfit(self, endpoint: Endpoint, known: Capabilities) -> HealthResult | None:
        """The endpoint that serves no model yet, or not the one that is wanted; else None."""
        if not known.models:
            if known.models_route:
                return HealthResult(endpoint, "loading", f"{endpoint.name} serves no model yet")
            return None
        wanted = self._plan.model or endpoint.tags.get("model")
        if wanted is None or wanted in known.models:
            return None
        served = ", ".join(known.models[:3])
        words = f"{endpoint.name} serves {served}, not {wanted}"
        return HealthResult(endpoint, "refuses", words, known=known)


def _now() -> float:
    """The loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
