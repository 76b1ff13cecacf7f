"""The sets of servers that a run asks: one for most jobs, several where stages name their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities
from bagent.backends.http.client import Transport
from bagent.backends.registry import BackendConfig, check_supported, make_backend
from bagent.errors import UsageError
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet
from bagent.fleet.hostfile import read_hostfile
from bagent.servers.fleet_factory import EndpointStateFactory
from bagent.servers.host_selection import select_hosts
from bagent.servers.pricing import BudgetGuard
from bagent.servers.resolve import Servers, open_servers
from bagent.servers.startup_probe import (
    ModelCheck,
    RequestedModel,
    StartupPatience,
    find_servers,
)
from bagent.types import FleetStats, Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


@dataclass(frozen=True)
class ServerResolver:
    """What finding servers needs of the session.

    ``asked`` is done once somebody asks the run to stop; ``note`` tells who waits, ``notice``
    writes a line for people, ``budgets`` keeps budgets. What is opened stays open until ``stack``
    is closed.
    """

    env: Mapping[str, str]
    patience: StartupPatience
    transport: Transport
    stack: AsyncExitStack
    log_file: Path
    asked: asyncio.Future[Any]
    note: Callable[[str], None]
    notice: Callable[[str], None]
    budgets: BudgetGuard

    async def find(
        self, job: Job, *, raw: bool, select: Mapping[str, Json] | None = None
    ) -> ResolvedServers:
        """The servers that ``job`` names, once enough of them answer.

        Args:
            raw: whether a prompt is text without a chat template.
            select: which endpoints of the hostfile.

        Raises:
            UsageError: the servers cannot be used as the job says.
            StoppedEarly: too few answer.
        """
        servers = await open_servers(
            job, self.env, self.stack, log_file=self.log_file, notice=self.notice
        )
        if select and job.hostfile is not None:
            chosen = {h.name for h in select_hosts(read_hostfile(job.hostfile.path), select)}
            kept = [one for one in servers.endpoints if one.name in chosen]
            servers = msgspec.structs.replace(servers, endpoints=kept, select=select)
        _check_enough(self.patience.hosts, job, len(servers.endpoints))
        backend = self._backend(job, servers, raw)
        self.stack.push_async_callback(backend.close)
        known = await find_servers(
            backend,
            servers.endpoints,
            self.patience,
            self.asked,
            self.note,
        )
        return ResolvedServers(job, servers, backend, known)

    async def check_models(self, found: ResolvedServers, named: Sequence[RequestedModel]) -> None:
        """See whether the servers that were found serve the models that the run names.

        Raises:
            UsageError: no endpoint serves one of them.
            StoppedEarly: no endpoint lists any model in time.
        """
        check = ModelCheck(
            found.backend,
            found.servers.endpoints,
            found.known,
            self.patience.seconds,
            self.asked,
            self.note,
        )
        await check.run(named)

    def _backend(self, job: Job, servers: Servers, raw: bool) -> Backend:
        asked = job.sampling.request_fields()
        names = asked.keys() - job.sampling.extra.keys() - {"max_tokens"}
        check_supported(servers.kind, names, raw=raw, batching=job.batching.mode)
        config = BackendConfig(
            enforce=job.output.enforce,
            batching=job.batching.mode,
            keys=servers.keys,
            bedrock=servers.bedrock,
        )
        found = make_backend(servers.kind, self.transport, config, self.notice)
        return self.budgets.wrap(found, job, servers.kind)


def _check_enough(wanted: int, job: Job, count: int) -> None:
    """Refuse a ``--min-hosts`` that a hostfile of ``count`` endpoints can never reach.

    Raises:
        UsageError: it asks for more.
    """
    if job.hostfile is not None and wanted > count:
        there = "1 endpoint is" if count == 1 else f"{count} endpoints are"
        raise UsageError(
            f"--min-hosts {wanted}: {there} in {job.hostfile.path.name}",
            hint=f"--min-hosts {count} waits for all",
        )


@dataclass(frozen=True)
class ResolvedServers:
    """Servers that were found, and what they tell of themselves."""

    job: Job
    servers: Servers
    backend: Backend
    known: dict[str, Capabilities]


@dataclass(frozen=True)
class ServerPool:
    """Servers at work."""

    resolved: ResolvedServers
    fleet: Fleet
    state_factory: EndpointStateFactory


class FleetSet:
    """The fleets of all sites, for who treats them as one."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets
        self.stopped: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        for fleet in fleets:
            fleet.stopped.add_done_callback(self._stopped)

    def _stopped(self, reason: asyncio.Future[BaseException]) -> None:
        if not self.stopped.done() and not reason.cancelled():
            self.stopped.set_result(reason.result())

    @property
    def states(self) -> list[EndpointState]:
        """The endpoints of all, for displays."""
        return [state for fleet in self._fleets for state in fleet.states]

    def tick(self, left: int | None) -> None:
        """Look for stalled endpoints and late calls in each; ``left`` rows are still to end."""
        for fleet in self._fleets:
            fleet.tick(left if len(self._fleets) == 1 else None)

    def abandon_waiting(self) -> None:
        """Send nothing more in any of them."""
        for fleet in self._fleets:
            fleet.abandon_waiting()

    async def drain(self, seconds: float) -> int:
        """Drain all at once; returns how many rows were given up."""
        return sum(await asyncio.gather(*(fleet.drain(seconds) for fleet in self._fleets)))

    def stats(self) -> FleetStats:
        """All of them, added up."""
        found = [fleet.stats() for fleet in self._fleets]
        if len(found) == 1:
            return found[0]
        return FleetStats(
            in_flight=sum(one.in_flight for one in found),
            limit=sum(one.limit for one in found),
            ready=sum(one.ready for one in found),
            retrying=sum(one.retrying for one in found),
            throttled_s=min((one.throttled_s for one in found), default=0.0),
            endpoints_up=sum(one.endpoints_up for one in found),
            endpoints=sum(one.endpoints for one in found),
            throttle_answers=sum(one.throttle_answers for one in found),
            requests=sum(one.requests for one in found),
        )
