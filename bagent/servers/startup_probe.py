"""Which servers answer, before the first call."""

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
from bagent.backends.openai.embeddings import PATH as EMBEDDINGS
from bagent.backends.request import CallSettings, Request
from bagent.errors import HostfileError, JobError, Position, StoppedEarly, UsageError
from bagent.fleet.retry import Blame, blame_of
from bagent.job.batch_file import lines_of
from bagent.types import Failure

if TYPE_CHECKING:
    from bagent.job.spec.job import Job
    from bagent.job.templates.prompt import Prompt

PROBES_AT_ONCE = 128
PROBE_SECONDS = 5.0

FIRST_ANSWER_SECONDS = 10.0
"""How long a run waits for its first endpoint when --wait-hosts does not say."""

GRACE_SECONDS = 0.5
"""Once enough endpoints answer the others have so long; later ones join while rows run."""


_UNKNOWN_NAME = re.compile(
    r"name or service not known|nodename nor servname|no address associated", re.IGNORECASE
)
"""What the resolver says of a name that there is not; a resolver that does not answer says else."""


class StartupPatience(msgspec.Struct, frozen=True):
    """How many endpoints must answer before a run begins, and how many seconds they have.

    ``asked`` says that somebody asked for the wait: then a name may become known meanwhile.
    """

    hosts: int = 1
    seconds: float = FIRST_ANSWER_SECONDS
    asked: bool = False

    def may_recover(self, failure: Failure) -> bool:
        """Return whether an endpoint that failed so may answer later."""
        return failure.passing and (self.asked or not _UNKNOWN_NAME.search(failure.message))


async def find_servers(
    backend: Backend,
    endpoints: Sequence[Endpoint],
    patience: StartupPatience,
    stop: asyncio.Future[Any],
    note: Callable[[str], None],
) -> dict[str, Capabilities]:
    """Probe all endpoints in parallel until enough answer; what those are like, by name.

    Empty where ``stop`` was done first. A run begins on the first that answer: who is not in the
    result may still be loading.

    Raises:
        UsageError: none answers, and no waiting would help: a wrong name, an untrusted certificate.
        StoppedEarly: too few answered in time.
    """
    begun = time.monotonic()
    wanted = min(patience.hosts, len(endpoints))
    known: dict[str, Capabilities] = {}
    while True:
        missing = [endpoint for endpoint in endpoints if endpoint.name not in known]
        failures = await _round(backend, missing, known, wanted, stop)
        if stop.done():
            return {}
        if len(known) >= wanted:
            return known
        waited = time.monotonic() - begun
        lasting = [one for one in failures if not patience.may_recover(one)]
        if not known and len(lasting) == len(failures):
            raise UsageError(lasting[0].message)
        if waited >= patience.seconds:
            answer = "no endpoint answers" if not known else f"{len(known)} of {wanted} answer"
            raise StoppedEarly(
                f"{answer} after {waited:.0f} s: {failures[0].message}",
                hint="start the server, or wait for it with --wait-hosts 10m",
            )
        note(f"waiting for an endpoint: {failures[0].message}")
        await asyncio.wait([stop], timeout=min(1.0, patience.seconds - waited))


async def _round(
    backend: Backend,
    endpoints: Sequence[Endpoint],
    known: dict[str, Capabilities],
    wanted: int,
    stop: asyncio.Future[Any],
) -> list[Failure]:
    """Probe each of ``endpoints`` once, adding to ``known``; ends early with enough of them."""
    gate = asyncio.Semaphore(PROBES_AT_ONCE)
    failures: list[Failure] = []
    enough = asyncio.Event()

    async def probe(endpoint: Endpoint) -> None:
        async with gate:
            result = await backend.probe(endpoint, PROBE_SECONDS)
        if isinstance(result, Capabilities):
            known[endpoint.name] = result
        elif result.status is not None:
            # Somebody is there; what is wrong will be each row's own failure.
            known[endpoint.name] = Capabilities()
        else:
            failures.append(result)
        if len(known) >= wanted:
            enough.set()

    tasks = [asyncio.create_task(probe(endpoint)) for endpoint in endpoints]
    everyone = asyncio.gather(*tasks)
    full = asyncio.create_task(enough.wait())
    waits: set[asyncio.Future[Any]] = {everyone, full, stop}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if full.done() and not everyone.done():
            await asyncio.wait({everyone, stop}, timeout=GRACE_SECONDS)
        if everyone.done():
            await everyone  # a fault of ours must not be lost
    finally:
        full.cancel()
        everyone.cancel()
        await asyncio.gather(everyone, *tasks, full, return_exceptions=True)
    return failures


SCAN_SECONDS = 1.0
"""How long the lines of a batch file are looked through for the models that they name."""

ASK_AGAIN = 1.0

Known = dict[str, Capabilities]


class RequestedModel(msgspec.Struct, frozen=True):
    """A model that a run asks for at a route, and where it is named, for people.

    ``endpoint`` is the only one that is asked for it, where a hostfile says so.
    """

    model: str
    path: str = "/chat/completions"
    where: str = ""
    at: Position | None = None
    endpoint: str | None = None


class ModelCheck:
    """Compares the models that are named with those that endpoints list.

    A model that is not listed may be an alias: it is asked for with one request of one token.

    Args:
        known: what each endpoint tells, by name.
        seconds: how long an endpoint is waited for that lists no model at all yet.
        stop: done once the run should end.
    """

    def __init__(
        self,
        backend: Backend,
        endpoints: Sequence[Endpoint],
        known: Known,
        seconds: float,
        stop: asyncio.Future[Any],
        note: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._prover = CompletionProbe(backend)
        self._endpoints = endpoints
        self._known = known
        self._end = time.monotonic() + seconds
        self._stop = stop
        self._note = note

    async def run(self, named: Iterable[RequestedModel]) -> None:
        """Check each of ``named``.

        Raises:
            UsageError: no endpoint serves one of them.
            StoppedEarly: no endpoint lists any model in time.
        """
        for one in named:
            while not self._stop.done():
                failure = await self._refusal(one)
                if failure is None:
                    break
                if any(self._listed(endpoint) for endpoint in self._endpoints):
                    raise self._error(one, failure)
                await self._wait(failure)

    async def _refusal(self, named: RequestedModel) -> Failure | None:
        """Return why no endpoint serves the model; None where one does, or may."""
        by_list: dict[tuple[str, ...], Endpoint] = {}
        for endpoint in self._endpoints:
            if named.endpoint not in (None, endpoint.name):
                continue
            known = self._known.get(endpoint.name)
            if known is None or not (known.models or known.models_route):
                return None  # it does not tell
            if named.model in known.models:
                return None
            by_list.setdefault(known.models, endpoint)
        settings = CallSettings(model=named.model, sampling={}, extra={})
        request = Request(settings, b"", path=named.path)
        failures = await asyncio.gather(
            *(self._prover.check(endpoint, request) for endpoint in by_list.values())
        )
        refusals = [one for one in failures if one is not None and _refuses(one)]
        return refusals[0] if refusals and len(refusals) == len(failures) else None

    def _listed(self, endpoint: Endpoint) -> tuple[str, ...]:
        known = self._known.get(endpoint.name)
        return known.models if known is not None else ()

    async def _wait(self, failure: Failure) -> None:
        """Wait for an endpoint to list a model, and ask all again what they list."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise StoppedEarly(
                f"no endpoint serves a model yet: {failure.message}",
                hint="start the model, or wait for it with --wait-hosts 10m",
            )
        self._note(f"waiting for a model: {failure.message}")
        await asyncio.wait([self._stop], timeout=min(ASK_AGAIN, left))
        probes = (self._backend.probe(endpoint, PROBE_SECONDS) for endpoint in self._endpoints)
        for endpoint, found in zip(self._endpoints, await asyncio.gather(*probes), strict=True):
            if isinstance(found, Capabilities):
                self._known[endpoint.name] = found

    def _error(self, named: RequestedModel, failure: Failure) -> UsageError:
        listed = [name for one in self._endpoints for name in self._listed(one)]
        who = named.endpoint or (
            self._endpoints[0].name if len(self._endpoints) == 1 else "no endpoint"
        )
        serves = "serves it" if who == "no endpoint" else "does not serve it"
        if failure.kind == "auth":
            words, hint = f"{who} refuses the key", "give a key that it takes"
        else:
            words = f"{named.where} the model {named.model}, and {who} {serves}"
            hint = f"--model {listed[0]} asks for what is served"
        kind = HostfileError if named.endpoint else JobError
        return kind(f"{words}: {failure.message}", hint=hint, at=named.at)


def _refuses(failure: Failure) -> bool:
    """Whether a failure says that the server has no such model, or does not take the key."""
    return not failure.passing and failure.status is not None and blame_of(failure) is Blame.SERVER


def stage_path(kind: str, prompt: Prompt | None) -> str:
    """Return the route that a stage of ``kind`` asks."""
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
        RequestedModel(one.tags["model"], path, "the hostfile asks for", at, one.name)
        for one in endpoints
        if "model" in one.tags
    ]


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Body
    url: str = ""


_decode = msgspec.json.Decoder(_Line).decode


def batch_models(paths: Sequence[Path], limit: int | None) -> list[RequestedModel]:
    """Return the models that the lines of batch files name, the most frequent first.

    Lines that cannot be read are passed over, and so is what is not looked at within a second.
    """
    end = time.monotonic() + SCAN_SECONDS
    counts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        try:
            _count(lines_of(path), counts, limit, end)
        except (OSError, EOFError, ValueError):
            continue
    files = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return [
        RequestedModel(model, route, _lines(count, files))
        for (model, route), count in counts.most_common()
    ]


def _lines(count: int, files: str) -> str:
    if count == 1:
        return f"a line of {files} asks for"
    return f"{count:,} lines of {files} ask for"


def _count(
    lines: Iterable[bytes], counts: Counter[tuple[str, str]], limit: int | None, end: float
) -> None:
    for number, line in enumerate(lines):
        if number == limit or (number % 256 == 0 and time.monotonic() > end):
            return
        try:
            found = _decode(line)
        except msgspec.DecodeError:
            continue
        if found.body.model:
            counts[found.body.model, found.url.removeprefix("/v1")] += 1
