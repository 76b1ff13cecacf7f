"""Checks before the first call: which servers answer, and whether they serve the job's models."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engines.probe import CompletionProbe
from bagent.backends.request import EMBEDDINGS, CallSettings, Request
from bagent.errors import HostfileError, InputError, JobError, Position, StoppedEarly, UsageError
from bagent.fleet.retry import Blame, blame_of
from bagent.job.load import batch_lines
from bagent.types import Failure

if TYPE_CHECKING:
    from bagent.job.spec.job import Job
    from bagent.job.templates.prompt import Prompt

PROBES_AT_ONCE = 128
PROBE_SECONDS = 5.0

FIRST_ANSWER_SECONDS = 10.0
"""How long a run waits for its first endpoint without ``--wait-hosts``."""

GRACE_SECONDS = 0.5
"""How much longer the others may take once enough endpoints answer; the rest join later."""

MODEL_POLL_SECONDS = 1.0
"""Between two looks at the model lists of endpoints that serve no model yet."""

SCAN_SECONDS = 1.0
"""Longest time to look through a batch file for the models that its lines name."""

_UNKNOWN_NAME = re.compile(
    r"name or service not known|nodename nor servname|no address associated", re.IGNORECASE
)
"""The resolver's message for a name that does not exist, unlike that of a silent resolver."""


class StartupPatience(msgspec.Struct, frozen=True):
    """How long a run waits for its servers before it begins."""

    hosts: int = 1
    """How many endpoints must answer."""
    seconds: float = FIRST_ANSWER_SECONDS
    explicit: bool = False
    """The user asked for the wait, so an unknown name may become known meanwhile."""

    def may_recover(self, failure: Failure) -> bool:
        """Return whether an endpoint with this failure may answer later."""
        return failure.passing and (self.explicit or not _UNKNOWN_NAME.search(failure.message))


async def find_servers(
    backend: Backend,
    endpoints: Sequence[Endpoint],
    patience: StartupPatience,
    stop: asyncio.Future[Any],
    note: Callable[[str], None],
) -> dict[str, Capabilities]:
    """Probe all endpoints in parallel until enough answer; return their capabilities by name.

    The result is empty where ``stop`` was done first. Endpoints that are not in it may still be
    loading.

    Raises:
        UsageError: none answers, and waiting would not help: a wrong name, an untrusted
            certificate.
        StoppedEarly: too few answered in time.
    """
    start = time.monotonic()
    required = min(patience.hosts, len(endpoints))
    capabilities: dict[str, Capabilities] = {}
    while True:
        silent = [endpoint for endpoint in endpoints if endpoint.name not in capabilities]
        failures = await _probe_round(backend, silent, capabilities, required, stop)
        if stop.done():
            return {}
        if len(capabilities) >= required:
            return capabilities
        waited = time.monotonic() - start
        if not capabilities and not any(map(patience.may_recover, failures)):
            none = f"0 of {len(endpoints)} endpoints answer: " if len(endpoints) > 1 else ""
            raise UsageError(f"{none}{failures[0].message}")
        if waited >= patience.seconds:
            answer = "no endpoint answers"
            if len(endpoints) > 1:
                answer = f"{len(capabilities)} of {len(endpoints)} endpoints answer"
            raise StoppedEarly(
                f"{answer} after {waited:.0f} s: {failures[0].message}",
                hint="start the server, or wait for it with --wait-hosts 10m",
            )
        note(f"waiting for an endpoint: {failures[0].message}")
        await asyncio.wait([stop], timeout=min(1.0, patience.seconds - waited))


async def _probe_round(
    backend: Backend,
    endpoints: Sequence[Endpoint],
    capabilities: dict[str, Capabilities],
    required: int,
    stop: asyncio.Future[Any],
) -> list[Failure]:
    """Probe each endpoint once, adding to ``capabilities``; end early once enough answered."""
    gate = asyncio.Semaphore(PROBES_AT_ONCE)
    failures: list[Failure] = []
    enough = asyncio.Event()

    async def probe(endpoint: Endpoint) -> None:
        async with gate:
            result = await backend.probe(endpoint, PROBE_SECONDS)
        if isinstance(result, Capabilities):
            capabilities[endpoint.name] = result
        elif result.status is not None:
            # A server answered; what is wrong becomes each row's own failure.
            capabilities[endpoint.name] = Capabilities()
        else:
            failures.append(result)
        if len(capabilities) >= required:
            enough.set()

    tasks = [asyncio.create_task(probe(endpoint)) for endpoint in endpoints]
    all_probes = asyncio.gather(*tasks)
    enough_answered = asyncio.create_task(enough.wait())
    events: set[asyncio.Future[Any]] = {all_probes, enough_answered, stop}
    try:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if enough_answered.done() and not all_probes.done():
            await asyncio.wait({all_probes, stop}, timeout=GRACE_SECONDS)
        if all_probes.done():
            await all_probes  # raises what a probe raised
    finally:
        enough_answered.cancel()
        all_probes.cancel()
        await asyncio.gather(all_probes, *tasks, enough_answered, return_exceptions=True)
    return failures


class RequestedModel(msgspec.Struct, frozen=True):
    """A model that a run requests at a route."""

    model: str
    path: str = "/chat/completions"
    where: str = ""
    """What names the model, as the beginning of a message."""
    at: Position | None = None
    endpoint: str | None = None
    """The only endpoint that is asked for the model, where a hostfile says so."""


class ModelCheck:
    """Compares the requested models with those that endpoints list.

    A model that is not listed may be an alias: one request of one token shows it.

    Args:
        capabilities: those of each endpoint, by name.
        seconds: how long to wait for an endpoint that lists no model at all yet.
        stop: done once the run should end.
    """

    def __init__(
        self,
        backend: Backend,
        endpoints: Sequence[Endpoint],
        capabilities: dict[str, Capabilities],
        seconds: float,
        stop: asyncio.Future[Any],
        note: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._completion_probe = CompletionProbe(backend)
        self._endpoints = endpoints
        self._capabilities = capabilities
        self._end = time.monotonic() + seconds
        self._stop = stop
        self._note = note

    async def run(self, models: Iterable[RequestedModel]) -> None:
        """Check each of ``models``.

        Raises:
            UsageError: no endpoint serves one of them.
            StoppedEarly: no endpoint lists any model in time.
        """
        for model in models:
            while not self._stop.done():
                failure = await self._refusal(model)
                if failure is None:
                    break
                if self._listed():
                    raise self._error(model, failure)
                await self._wait(failure)

    async def _refusal(self, requested: RequestedModel) -> Failure | None:
        """Return why no endpoint serves the model; None where one does, or may."""
        by_list: dict[tuple[str, ...], Endpoint] = {}
        for endpoint in self._endpoints:
            if requested.endpoint not in (None, endpoint.name):
                continue
            capabilities = self._capabilities.get(endpoint.name)
            if capabilities is None or not (capabilities.models or capabilities.models_route):
                return None  # it does not list its models
            if requested.model in capabilities.models:
                return None
            by_list.setdefault(capabilities.models, endpoint)
        settings = CallSettings(model=requested.model, sampling={}, extra={})
        request = Request(settings, b"", path=requested.path)
        failures = await asyncio.gather(
            *(self._completion_probe.check(endpoint, request) for endpoint in by_list.values())
        )
        refusals = [failure for failure in failures if failure is not None and _refuses(failure)]
        return refusals[0] if refusals and len(refusals) == len(failures) else None

    def _listed(self) -> list[str]:
        """Return the models that the endpoints list."""
        capabilities = (self._capabilities.get(endpoint.name) for endpoint in self._endpoints)
        return [model for item in capabilities if item is not None for model in item.models]

    async def _wait(self, failure: Failure) -> None:
        """Wait for an endpoint to list a model, then read all lists again."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise StoppedEarly(
                f"no endpoint serves a model yet: {failure.message}",
                hint="start the model, or wait for it with --wait-hosts 10m",
            )
        self._note(f"waiting for a model: {failure.message}")
        await asyncio.wait([self._stop], timeout=min(MODEL_POLL_SECONDS, remaining))
        probes = (self._backend.probe(endpoint, PROBE_SECONDS) for endpoint in self._endpoints)
        for endpoint, result in zip(self._endpoints, await asyncio.gather(*probes), strict=True):
            if isinstance(result, Capabilities):
                self._capabilities[endpoint.name] = result

    def _error(self, requested: RequestedModel, failure: Failure) -> UsageError:
        name = requested.endpoint
        if name is None and len(self._endpoints) == 1:
            name = self._endpoints[0].name
        if failure.kind == "auth":
            message = f"{name or 'no endpoint'} refuses the key"
            hint = "give a key that it takes"
        else:
            serves = f"{name} does not serve it" if name else "no endpoint serves it"
            message = f"{requested.where} the model {requested.model}, and {serves}"
            hint = f"--model {self._listed()[0]} asks for what is served"
        error_class = HostfileError if requested.endpoint else JobError
        return error_class(f"{message}: {failure.message}", hint=hint, at=requested.at)


def _refuses(failure: Failure) -> bool:
    """Return whether a server said that it has no such model, or that the key is wrong."""
    return not failure.passing and failure.status is not None and blame_of(failure) is Blame.SERVER


def stage_path(kind: str, prompt: Prompt | None) -> str:
    """Return the route of the requests of a stage of ``kind``."""
    if kind == "embed":
        return EMBEDDINGS
    return "/completions" if prompt is not None and prompt.raw else "/chat/completions"


def job_models(job: Job, path: str) -> list[RequestedModel]:
    """Return the model that a job names, none for ``auto``."""
    if job.model == "auto":
        return []
    return [RequestedModel(job.model, path, "the job asks for", job.source.position(("model",)))]


def hostfile_models(endpoints: Sequence[Endpoint], job: Job, path: str) -> list[RequestedModel]:
    """Return the models that the lines of a hostfile name, where the job names none."""
    if job.hostfile is None or job.model != "auto":
        return []
    at = Position(job.hostfile.path)
    return [
        RequestedModel(endpoint.tags["model"], path, "the hostfile asks for", at, endpoint.name)
        for endpoint in endpoints
        if "model" in endpoint.tags
    ]


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Body
    url: str = ""


_decode = msgspec.json.Decoder(_Line).decode


def batch_models(paths: Sequence[Path], limit: int | None) -> list[RequestedModel]:
    """Return the models that the lines of batch files name, the most frequent first.

    Skips lines that cannot be read, and what is not reached within a second.
    """
    end = time.monotonic() + SCAN_SECONDS
    counts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        try:
            _count_models(batch_lines(path), counts, limit, end)
        except InputError:
            continue
    files = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return [
        RequestedModel(
            model,
            route,
            f"a line of {files} asks for" if count == 1 else f"{count:,} lines of {files} ask for",
        )
        for (model, route), count in counts.most_common()
    ]


def _count_models(
    lines: Iterable[bytes], counts: Counter[tuple[str, str]], limit: int | None, end: float
) -> None:
    for number, text in enumerate(lines):
        if number == limit or (number % 256 == 0 and time.monotonic() > end):
            return
        try:
            line = _decode(text)
        except msgspec.DecodeError:
            continue
        if line.body.model:
            counts[line.body.model, line.url.removeprefix("/v1")] += 1
