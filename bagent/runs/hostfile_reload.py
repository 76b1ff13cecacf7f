"""Reloads of the hostfile while a run or a proxy goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.hostfile import HostChanges, HostEntry, HostfileWatch, read_content
from bagent.observe.formatting import counted
from bagent.servers.host_selection import select_hosts
from bagent.servers.resolve import host_endpoints
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.backend import BackendRef

HOSTFILE_SECONDS = 1.0

MOST_NAMES = 3
"""Endpoints that a message names."""


class EndpointGroup(Protocol):
    """What endpoints join and leave: the fleet of a run or of a proxy."""

    def join(self, states: Sequence[EndpointState]) -> None:
        """Add endpoints."""
        ...

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints."""
        ...


class HostfileFollower:
    """Lets endpoints join and leave as their hostfile changes.

    Args:
        endpoints: those in use since the start; the file may have changed since.
        select: which endpoints of the file may be used; None for all.
    """

    def __init__(
        self,
        path: Path,
        ref: BackendRef | None,
        env: Mapping[str, str],
        notice: Callable[[str], None],
        endpoints: Sequence[Endpoint],
        select: Mapping[str, Json] | None = None,
    ) -> None:
        self._path = path
        self._ref = ref
        self._env = env
        self._notice = notice
        self._select = select
        self._by_url: dict[str, Endpoint] = {}
        hosts = [HostEntry(item.name, item.url, item.tags, 0) for item in endpoints]
        self._watch = HostfileWatch(path, hosts, time.monotonic, notice, self._usable)

    async def follow(
        self, fleet: EndpointGroup, states: Callable[[Sequence[Endpoint]], list[EndpointState]]
    ) -> None:
        """Check the file every second until cancelled; ``states`` makes states of new endpoints."""
        while True:
            await asyncio.sleep(HOSTFILE_SECONDS)
            content = await asyncio.to_thread(read_content, self._path)
            changes = None if content is None else self._watch.on_content(content)
            if changes is not None:
                fleet.leave([host.name for host in (*changes.removed, *changes.changed)])
                joining = (*changes.joined, *changes.changed)
                fleet.join(states([self._by_url[host.url] for host in joining]))
                self._notice(f"{self._path.name} changed: {self._describe(changes)}")

    def _usable(self, hosts: Sequence[HostEntry]) -> list[HostEntry]:
        """Return the selected hosts; raise where one of them lacks its key."""
        selected = select_hosts(hosts, selection=self._select)
        endpoints = host_endpoints(selected, self._path, self._ref, self._env)
        self._by_url = {endpoint.url: endpoint for endpoint in endpoints}
        return selected

    def _describe(self, changes: HostChanges) -> str:
        groups = (
            (changes.joined, "joined"),
            (changes.removed, "removed"),
            (changes.changed, "with other tags"),
        )
        parts = [f"{_names(hosts)} {what}" for hosts, what in groups if hosts]
        return f"{', '.join(parts)}, {counted(len(self._watch.hosts), 'endpoint')} now"


def _names(hosts: Sequence[HostEntry]) -> str:
    """Return the names of a few endpoints, and how many more there are."""
    more = f" and {len(hosts) - MOST_NAMES} more" if len(hosts) > MOST_NAMES else ""
    return ", ".join(host.name for host in hosts[:MOST_NAMES]) + more
