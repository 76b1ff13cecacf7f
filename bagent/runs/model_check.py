"""Whether the models that a run names are served, before anything of its input is sent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.base import Backend
from bagent.backends.embeddings import PATH as EMBEDDINGS
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.proof import Prover
from bagent.backends.request import CallSettings, Request
from bagent.errors import HostfileError, JobError, Position, StoppedEarly, UsageError
from bagent.fleet.blame import Blame, blame_of
from bagent.job.batchfile import lines_of
from bagent.types import Failure

if TYPE_CHECKING:
    from bagent.job.prompt import Prompt
    from bagent.job.spec import Job
    from bagent.runs.prepare import Prepared

SCAN_SECONDS = 1.0
"""How long the lines of a batch file are looked through for the models that they name."""

ASK_AGAIN = 1.0
PROBE_SECONDS = 5.0

Known = dict[str, Capabilities]


class NamedModel(msgspec.Struct, frozen=True):
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
        self._prover = Prover(backend)
        self._endpoints = endpoints
        self._known = known
        self._end = time.monotonic() + seconds
        self._stop = stop
        self._note = note

    async def run(self, named: Iterable[NamedModel]) -> None:
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

    async def _refusal(self, named: NamedModel) -> Failure | None:
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

    def _error(self, named: NamedModel, failure: Failure) -> UsageError:
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


def named_models(prepared: Prepared, endpoints: Sequence[Endpoint]) -> list[NamedModel]:
    """Return the models that a job without stages, its batch file and its hostfile name."""
    job, config = prepared.job, prepared.rows_config
    if not prepared.own_bodies or job.model != "auto":
        named = job_models(job, stage_path("map", prepared.prompt))
    elif config.sample is None and config.where is None and job.input:
        paths = [Path(item.path) for item in job.input.path if not item.is_glob]
        named = batch_models(paths, config.limit)
    else:
        named = []
    return named + hostfile_models(endpoints, job, stage_path("map", prepared.prompt))


def stage_path(kind: str, prompt: Prompt | None) -> str:
    """Return the route that a stage of ``kind`` asks."""
    if kind == "embed":
        return EMBEDDINGS
    return "/completions" if prompt is not None and prompt.raw else "/chat/completions"


def job_models(job: Job, path: str) -> list[NamedModel]:
    """Return the model that a job names, none for ``auto``."""
    if job.model == "auto":
        return []
    return [NamedModel(job.model, path, "the job asks for", job.source.position(("model",)))]


def hostfile_models(endpoints: Sequence[Endpoint], job: Job, path: str) -> list[NamedModel]:
    """Return the models that the lines of a hostfile name, where the job names none."""
    if job.hostfile is None or job.model != "auto":
        return []
    at = Position(job.hostfile.path)
    return [
        NamedModel(one.tags["model"], path, "the hostfile asks for", at, one.name)
        for one in endpoints
        if "model" in one.tags
    ]


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Body
    url: str = ""


_decode = msgspec.json.Decoder(_Line).decode


def batch_models(paths: Sequence[Path], limit: int | None) -> list[NamedModel]:
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
        NamedModel(model, route, _lines(count, files))
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
