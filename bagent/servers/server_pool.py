"""Sets of servers that a run calls: one for most jobs, several where stages name their own."""

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
from bagent.backends.registry import check_supported
from bagent.errors import UsageError
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet
from bagent.fleet.hostfile import read_hostfile
from bagent.servers.fleet_factory import EndpointStateFactory
from bagent.servers.host_selection import select_hosts
from bagent.servers.pricing import BudgetGuard
from bagent.servers.resolve import Servers, open_servers
from bagent.servers.startup_probe import ModelCheck, RequestedModel, StartupPatience, find_servers
from bagent.types import FleetStats, Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


@dataclass(frozen=True)
class ServerResolver:
    """Finds the servers of a job and waits until enough of them answer."""

    env: Mapping[str, str]
    patience: StartupPatience
    transport: Transport
    stack: AsyncExitStack
    """Closes what is opened."""
    log_file: Path
    stop_requested: asyncio.Future[Any]
    """Done once the run should stop."""
    note: Callable[[str], None]
    """Shows what is waited for."""
    notice: Callable[[str], None]
    """Takes messages for people."""
    budgets: BudgetGuard

    async def find(
        self, job: Job, *, raw: bool, select: Mapping[str, Json] | None = None
    ) -> ResolvedServers:
        """Return the servers that ``job`` names, once enough of them answer.

        Args:
            raw: whether the prompt is text without a chat template.
            select: which endpoints of the hostfile.

        Raises:
            UsageError: the servers cannot be used as the job says.
            StoppedEarly: too few answer.
        """
        servers = await open_servers(
            job, self.env, self.stack, log_file=self.log_file, notice=self.notice
        )
        if select and job.hostfile is not None:
            names = {host.name for host in select_hosts(read_hostfile(job.hostfile.path), select)}
            endpoints = [endpoint for endpoint in servers.endpoints if endpoint.name in names]
            servers = msgspec.structs.replace(servers, endpoints=endpoints, select=select)
        _check_min_hosts(self.patience.hosts, job, len(servers.endpoints))
        backend = self._backend(job, servers, raw)
        self.stack.push_async_callback(backend.close)
        capabilities = await find_servers(
            backend, servers.endpoints, self.patience, self.stop_requested, self.note
        )
        return ResolvedServers(job, servers, backend, capabilities)

    async def check_models(
        self, resolved: ResolvedServers, models: Sequence[RequestedModel]
    ) -> None:
        """Check that the servers serve the models that the run requests.

        Raises:
            UsageError: no endpoint serves one of them.
            StoppedEarly: no endpoint lists any model in time.
        """
        check = ModelCheck(
            resolved.backend,
            resolved.servers.endpoints,
            resolved.capabilities,
            self.patience.seconds,
            self.stop_requested,
            self.note,
        )
        await check.run(models)

    def _backend(self, job: Job, servers: Servers, raw: bool) -> Backend:
        sampling = job.sampling.request_fields()
        names = sampling.keys() - job.sampling.extra.keys() - {"max_tokens"}
        check_supported(servers.kind, names, raw=raw, batching=job.batching.mode, api=servers.api)
        backend = servers.make_backend(
            self.transport, self.notice, enforce=job.output.enforce, batching=job.batching.mode
        )
        return self.budgets.wrap(backend, job, servers.kind)


def _check_min_hosts(min_hosts: int, job: Job, count: int) -> None:
    """Refuse a ``--min-hosts`` that a hostfile of ``count`` endpoints can never reach."""
    if job.hostfile is not None and min_hosts > count:
        endpoints = "1 endpoint is" if count == 1 else f"{count} endpoints are"
        raise UsageError(
            f"--min-hosts {min_hosts}: {endpoints} in {job.hostfile.path.name}",
            hint=f"--min-hosts {count} waits for all",
        )


@dataclass(frozen=True)
class ResolvedServers:
    """The servers of a job, those that answered with their capabilities by endpoint name."""

    job: Job
    servers: Servers
    backend: Backend
    capabilities: dict[str, Capabilities]


@dataclass(frozen=True)
class ServerPool:
    """Servers with the fleet that calls them."""

    resolved: ResolvedServers
    fleet: Fleet
    state_factory: EndpointStateFactory


class FleetSet:
    """Several fleets that are treated as one."""

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
        """The endpoints of all fleets."""
        return [state for fleet in self._fleets for state in fleet.states]

    def tick(self, remaining: int | None) -> None:
        """Check each fleet for stalled endpoints and late calls; ``remaining`` rows are open."""
        for fleet in self._fleets:
            fleet.tick(remaining if len(self._fleets) == 1 else None)

    def abandon_waiting(self) -> None:
        """Send nothing more."""
        for fleet in self._fleets:
            fleet.abandon_waiting()

    async def drain(self, seconds: float) -> int:
        """Drain all fleets at once; return how many rows were abandoned."""
        return sum(await asyncio.gather(*(fleet.drain(seconds) for fleet in self._fleets)))

    @property
    def open_rows(self) -> int:
        """How many rows wait or are in flight."""
        return sum(fleet.open_rows for fleet in self._fleets)

    def stats(self) -> FleetStats:
        """Return the sums over all fleets."""
        stats = [fleet.stats() for fleet in self._fleets]
        if len(stats) == 1:
            return stats[0]
        sums = {name: sum(getattr(s, name) for s in stats) for name in FleetStats.__struct_fields__}
        throttled_s = min((s.throttled_s for s in stats), default=0.0)
        return FleetStats(**sums | {"throttled_s": throttled_s})
