"""Health check of a fleet: a real request to every endpoint, in parallel and in bounded time.

Large fleets have many dead and silent endpoints. So the remaining time is divided, such that every
endpoint is checked before it is over.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.engines.probe import (
    CompletionProbe,
    ProbeResult,
    choose_model,
    detect_capabilities,
)
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.openai.models import fetch_models
from bagent.types import Failure

State = Literal["ready", "loading", "busy", "silent", "dead", "refuses", "broken", "unasked"]
"""``ready``: answered a real request. ``loading``: serves no model yet. ``busy``: has no capacity.
``silent``: does not answer in time. ``dead``: no connection. ``refuses``: rejects the key, model or
request. ``broken``: sends an invalid answer. ``unasked``: there was no time, or this machine lacked
a resource."""

STATES: tuple[State, ...] = get_args(State)

_LOADING = re.compile(r"loading|starting|warm(ing)?[ -]?up|not (yet )?ready|initiali[sz]", re.I)


class HealthResult(msgspec.Struct, frozen=True):
    """The result for one endpoint."""

    endpoint: Endpoint
    state: State
    reason: str = ""  # one line, empty if it is ready
    model: str | None = None  # the model that was requested
    capabilities: Capabilities | None = None
    load: EngineLoad | None = None
    proof: ProbeResult | None = None  # the request that it answered

    @property
    def ready(self) -> bool:
        """Whether it answered a real request."""
        return self.state == "ready"


def state_of(failure: Failure) -> State:
    """Return the state of an endpoint whose request ended with ``failure``."""
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
    endpoint: Endpoint, failure: Failure, capabilities: Capabilities | None = None
) -> HealthResult:
    """Return the result for an endpoint whose request ended with ``failure``."""
    state = state_of(failure)
    return HealthResult(endpoint, state, failure.message, capabilities=capabilities)


class FailureGroup(msgspec.Struct, frozen=True):
    """Endpoints that are not ready for the same reason."""

    key: tuple[State, str]  # state, and reason without names and numbers
    count: int
    first: HealthResult

    def message(self) -> str:
        """Return ``80 dead, such as: cannot connect to node3:8000: Connection refused``."""
        name, reason = self.first.endpoint.name, self.first.reason
        example = reason if name in reason else f"{name}: {reason}"
        return f"{self.count} {self.key[0]}{', such as' if self.count > 1 else ''}: {example}"


def group_failures(results: Iterable[HealthResult]) -> list[FailureGroup]:
    """Group the endpoints that are not ready by reason, the largest groups first."""
    groups: dict[tuple[State, str], list[HealthResult]] = {}
    for result in results:
        if not result.ready:
            reason = result.reason.replace(result.endpoint.name, "")
            reason = re.sub(r"[0-9][0-9.]*", "0", reason)
            groups.setdefault((result.state, reason), []).append(result)
    failures = [FailureGroup(key, len(members), members[0]) for key, members in groups.items()]
    return sorted(failures, key=lambda group: -group.count)


def format_counts(results: Sequence[HealthResult | None]) -> str:
    """Return ``12 of 100 ready, 80 dead, 3 loading, 5 no answer yet``."""
    counts = Counter(result.state for result in results if result is not None)
    parts = [f"{counts['ready']} of {len(results)} ready"]
    parts += [f"{counts[state]} {state}" for state in STATES[1:] if counts[state]]
    waiting = results.count(None)
    return ", ".join(parts + ([f"{waiting} no answer yet"] if waiting else []))


DETECT_SECONDS = 5.0
"""Time to detect the capabilities of a ready endpoint."""

GRACE_SECONDS = 2.0
"""Time for the checks in progress once enough endpoints are ready."""

CANCEL_SECONDS = 1.0
_MARGIN = 0.3
_MAX_CHECK_SECONDS = 30.0
_MIN_CHECK_SECONDS = 0.05
_MIN_RECHECK_SECONDS = 1.0
"""In less time an endpoint is not checked again: its last result says more."""
_CHECK_FIRST, _DETECT_AFTER = 0.0, 0.001
"""Due times: capabilities are detected after all endpoints were checked."""
_FIRST_PAUSE, _MAX_PAUSE, _PAUSE_GROWTH = 1.0, 5.0, 1.5


class HealthCheckPlan(msgspec.Struct, frozen=True):
    """Options of a health check."""

    seconds: float  # time limit
    width: int  # endpoints checked at once; each may hold two connections
    required: int  # how many ready endpoints are enough
    model: str | None = None  # the model that ready endpoints serve; None: any
    repeat: bool = False  # check again until ``required`` endpoints are ready


class FleetHealthCheck:
    """One check of all ``endpoints``.

    Args:
        endpoints: what to check.
        plan: how.
        transport: connects to them; stays open.

    Attributes:
        results: the results so far, in the order of the endpoints.
        ready: how many are ready so far.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        plan: HealthCheckPlan,
        transport: Transport,
    ) -> None:
        self.results: list[HealthResult | None] = [None] * len(endpoints)
        self.ready = 0
        self._endpoints = endpoints
        self._plan = plan
        self._transport = transport
        self._prover = CompletionProbe(OpenAIBackend(transport))
        self._due: asyncio.PriorityQueue[tuple[float, int]] = asyncio.PriorityQueue()
        self._pauses = [_FIRST_PAUSE] * len(endpoints)
        self._unchecked = len(endpoints)
        self._checking: set[int] = set()
        self._to_detect: set[int] = set()
        self._enough = asyncio.Event()
        self._finished = asyncio.Event()  # enough, and no check in progress
        self._end = 0.0

    async def run(self) -> list[HealthResult]:
        """Check all endpoints; return one result for each, in their order."""
        self._end = _now() + self._plan.seconds
        for index in range(len(self._endpoints)):
            self._due.put_nowait((_CHECK_FIRST, index))
        width = min(self._plan.width, len(self._endpoints))
        workers = [asyncio.ensure_future(self._work()) for _ in range(width)]
        try:
            await self._wait(workers)
        finally:
            checking = set(self._checking)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=CANCEL_SECONDS)
        for worker in workers:
            if worker.done() and not worker.cancelled():
                worker.result()  # raises if the check itself has a bug
        return [
            result or self._no_result(index, index in checking)
            for index, result in enumerate(self.results)
        ]

    async def _wait(self, workers: Sequence[asyncio.Future[None]]) -> None:
        """Wait until all were checked, enough are ready, or the time is over."""
        remaining = self._plan.seconds
        if not self._plan.repeat:
            await asyncio.wait(workers, timeout=remaining, return_when=asyncio.FIRST_EXCEPTION)
            return
        enough: asyncio.Future[Any] = asyncio.ensure_future(self._enough.wait())
        # The workers never end: one that is done has raised an exception.
        await asyncio.wait(
            [enough, *workers], timeout=remaining, return_when=asyncio.FIRST_COMPLETED
        )
        enough.cancel()
        while self._enough.is_set() and not self._finished.is_set():
            before, remaining = (self.ready, len(self._to_detect)), self._end - _now()
            try:
                async with asyncio.timeout(min(GRACE_SECONDS, remaining)):
                    await self._finished.wait()
            except TimeoutError:
                stuck = (self.ready, len(self._to_detect)) == before
                if stuck or remaining < GRACE_SECONDS:
                    return

    def _no_result(self, index: int, checking: bool) -> HealthResult:
        endpoint = self._endpoints[index]
        end = "enough others were ready" if self._enough.is_set() else "the time was over"
        if checking:
            return HealthResult(endpoint, "silent", f"no answer from {endpoint.name} before {end}")
        return HealthResult(endpoint, "unasked", f"{end} before it was asked")

    async def _work(self) -> None:
        """Check one endpoint after the other, in the order of their due times."""
        while self._plan.repeat or not self._due.empty():
            due, index = await self._due.get()
            await asyncio.sleep(max(0.0, due - _now()))
            self._checking.add(index)
            try:
                await (self._detect if index in self._to_detect else self._check)(index)
            finally:
                self._checking.discard(index)
            if self.ready >= self._plan.required:
                self._enough.set()
                if not self._checking and not self._to_detect:
                    self._finished.set()

    async def _check(self, index: int) -> None:
        self._unchecked -= self.results[index] is None
        seconds = self._seconds_each()
        if self.results[index] is not None and seconds < _MIN_RECHECK_SECONDS:
            return
        result = self.results[index] = await self._send(self._endpoints[index], seconds)
        if result.ready:
            self.ready += 1
            self._to_detect.add(index)
            self._due.put_nowait((_DETECT_AFTER, index))
        elif self._plan.repeat:
            pause = self._pauses[index]
            self._pauses[index] = min(_MAX_PAUSE, pause * _PAUSE_GROWTH)
            self._due.put_nowait((_now() + pause, index))

    async def _detect(self, index: int) -> None:
        """Add the detected capabilities and load to the result of a ready endpoint."""
        result = self.results[index]
        seconds = min(DETECT_SECONDS, self._end - _now() - _MARGIN)
        if result is not None and result.capabilities is not None:
            detected = await detect_capabilities(
                self._transport, result.endpoint, result.capabilities, seconds
            )
            capabilities = detected.capabilities
            if result.proof is not None and result.proof.cached_tokens:
                capabilities = msgspec.structs.replace(capabilities, cached_tokens=True)
            self.results[index] = msgspec.structs.replace(
                result, capabilities=capabilities, load=detected.load
            )
        self._to_detect.discard(index)

    def _seconds_each(self) -> float:
        """Return the seconds for one endpoint, so that all unchecked ones get as much."""
        width = self._plan.width
        later = max(0, self._unchecked - (width - len(self._checking)))
        rounds = 1 + -(-later // width)
        seconds = (self._end - _now() - _MARGIN) / rounds
        return min(seconds, _MAX_CHECK_SECONDS) if self._plan.repeat else seconds

    async def _send(self, endpoint: Endpoint, seconds: float) -> HealthResult:
        end = _now() + seconds
        if seconds < _MIN_CHECK_SECONDS:
            return HealthResult(endpoint, "unasked", "the time was over before it was asked")
        capabilities = await fetch_models(self._transport, endpoint, seconds)
        if isinstance(capabilities, Failure):
            return not_ready(endpoint, capabilities)
        mismatch = self._model_mismatch(endpoint, capabilities)
        if mismatch is not None:
            return mismatch
        model = choose_model(capabilities, endpoint, self._plan.model)
        proof = await self._prover.prove(endpoint, model, end - _now())
        if not isinstance(proof, ProbeResult):
            failed = not_ready(endpoint, proof, capabilities)
            return msgspec.structs.replace(failed, model=model)
        return HealthResult(endpoint, "ready", model=model, capabilities=capabilities, proof=proof)

    def _model_mismatch(
        self, endpoint: Endpoint, capabilities: Capabilities
    ) -> HealthResult | None:
        """Return the result for an endpoint that serves no model yet, or another; else None."""
        models = capabilities.models
        if not models:
            if capabilities.models_route:
                return HealthResult(endpoint, "loading", f"{endpoint.name} serves no model yet")
            return None
        required = self._plan.model or endpoint.tags.get("model")
        if required is None or required in models:
            return None
        reason = f"{endpoint.name} serves {', '.join(models[:3])}, not {required}"
        return HealthResult(endpoint, "refuses", reason, capabilities=capabilities)


def _now() -> float:
    """Return the loop's time in seconds."""
    return asyncio.get_running_loop().time()
