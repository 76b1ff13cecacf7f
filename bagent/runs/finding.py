"""Which servers answer, before the first call."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.errors import StoppedEarly, UsageError
from bagent.types import Failure

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


class Patience(msgspec.Struct, frozen=True):
    """How many endpoints must answer before a run begins, and how many seconds they have.

    ``asked`` says that somebody asked for the wait: then a name may become known meanwhile.
    """

    hosts: int = 1
    seconds: float = FIRST_ANSWER_SECONDS
    asked: bool = False

    def may_get_better(self, failure: Failure) -> bool:
        """Return whether an endpoint that failed so may answer later."""
        return failure.passing and (self.asked or not _UNKNOWN_NAME.search(failure.message))


async def find_servers(
    backend: Backend,
    endpoints: Sequence[Endpoint],
    patience: Patience,
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
        lasting = [one for one in failures if not patience.may_get_better(one)]
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
