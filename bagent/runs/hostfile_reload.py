"""What goes on beside a run: looks at the engines' load, and at a hostfile that may change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.metrics import EngineLoad, LoadReader
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet
from bagent.fleet.hostfile import HostChanges, HostEntry, HostfileWatch, read_content
from bagent.fleet.limits.load_feedback import POLL_SECONDS, LoadVerdict, apply_verdict
from bagent.servers.host_selection import select_hosts
from bagent.servers.resolve import host_endpoints
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.backend import BackendRef

LOOKS_PER_SECOND = 100.0
"""Looks at engines, over all of them: a large fleet is looked at less often."""

LOOKS_AT_ONCE = 32

HASTE_SECONDS = 4.0
HASTY_LOOKS = 0.25
HASTY_FLEET = 64
"""At the beginning a fleet of up to so many engines is looked at so often, in seconds: short runs
are over before limits that double every few seconds have grown. Nothing is held or cut that early:
a queue may be the first burst."""
LOOK_SECONDS = 5.0

TOGETHER_SECONDS = 0.25
"""So long at most what engines told waits for what others of the same round tell."""

COUNTED = 256
"""Of so many engines of one's own the cache counters are read before and after a run."""

LAST_SECONDS = 1.0
"""How long the last reading may take."""
HOSTFILE_SECONDS = 1.0


Look = tuple[EndpointState, EngineLoad | None, LoadVerdict]
"""What a look showed of an endpoint, and what that says of its limit."""


async def watch_loads(fleet: Fleet, reader: LoadReader, model: str | None) -> None:
    """Look at each busy engine in turn and let its limit follow; goes on until cancelled.

    ``model`` is the one that is asked for: a server of several tells the load of each.
    """
    gate = asyncio.Semaphore(LOOKS_AT_ONCE)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def look(state: EndpointState) -> Look | None:
        async with gate:
            load = None
            if reader.due(state.endpoint):
                load = await reader.read(state.endpoint, LOOK_SECONDS, model)
        signal = state.feedback
        if signal is None or state.leaving:
            return None
        return state, load, signal.judge(loop.time(), load, state.in_flight, state.largest_batch)

    while True:
        busy = [state for state in fleet.states if state.feedback is not None and state.in_flight]
        hasty = loop.time() - began < HASTE_SECONDS and len(busy) <= HASTY_FLEET
        left = {loop.create_task(look(state)) for state in busy}
        # Engines that begin together grow together: else the first to grow takes what the others
        # hold the beginning of and have no room for yet.
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=TOGETHER_SECONDS)
                _take(fleet, done, loop.time(), hasty=hasty)
        finally:
            for one in left:
                one.cancel()
        pause = HASTY_LOOKS if hasty else POLL_SECONDS
        await asyncio.sleep(max(pause, len(busy) / LOOKS_PER_SECOND))


def _take(
    fleet: Fleet, looks: Iterable[asyncio.Task[Look | None]], now: float, *, hasty: bool
) -> None:
    """Let all limits follow, then tell the fleet."""
    found = [one for look in looks if (one := look.result()) is not None]
    for state, _, verdict in found:
        if not hasty or verdict.action == "grow":
            apply_verdict(state.limit, verdict, now)
    for state, load, verdict in found:
        if load is not None or verdict.action != "grow":
            fleet.on_load_sample(state, load, verdict.reason)
        else:
            fleet.on_limit_change(state)


async def read_counters(fleet: Fleet, reader: LoadReader, model: str | None, reason: str) -> None:
    """Note the counters of the engines that tell any, so that their growth is that of the run."""
    gate = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def read(state: EndpointState) -> None:
        async with gate:
            load = await reader.read(state.endpoint, LOOK_SECONDS, model)
        if load is not None and not state.leaving:
            fleet.on_load_sample(state, load, reason)

    own = [state for state in fleet.states if state.endpoint.own and reader.due(state.endpoint)]
    if len(own) <= COUNTED:
        await asyncio.gather(*(read(state) for state in own))


class EndpointGroup(Protocol):
    """What endpoints join and leave: the fleet of a run, or that of a proxy."""

    def join(self, states: Sequence[EndpointState]) -> None:
        """Take in endpoints."""
        ...

    def leave(self, names: Sequence[str]) -> None:
        """Send nothing more to these endpoints."""
        ...


class HostfileFollower:
    """Lets endpoints join and leave while there is work, as their hostfile changes.

    Args:
        endpoints: those in use, as read at the start; the file may have changed since.
        select: which endpoints of the file may be used; None: all.
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
        self._found: dict[str, Endpoint] = {}
        used = [HostEntry(one.name, one.url, one.tags, 0) for one in endpoints]
        self._watch = HostfileWatch(path, used, time.monotonic, notice, self._usable)

    async def follow(
        self, fleet: EndpointGroup, states: Callable[[Sequence[Endpoint]], list[EndpointState]]
    ) -> None:
        """Look at the file every second until cancelled; ``states`` makes those that join."""
        while True:
            await asyncio.sleep(HOSTFILE_SECONDS)
            content = await asyncio.to_thread(read_content, self._path)
            changes = None if content is None else self._watch.saw(content)
            if changes is not None:
                fleet.leave([host.name for host in (*changes.left, *changes.changed)])
                fresh = (*changes.joined, *changes.changed)
                fleet.join(states([self._found[host.url] for host in fresh]))
                self._notice(f"{self._path.name} changed: {_words(changes)}")

    def _usable(self, hosts: Sequence[HostEntry]) -> list[HostEntry]:
        """Those that are selected; raises where one of them lacks its key."""
        chosen = select_hosts(hosts, selection=self._select)
        found = host_endpoints(chosen, self._path, self._ref, self._env)
        self._found = {endpoint.url: endpoint for endpoint in found}
        return chosen


def _words(changes: HostChanges) -> str:
    told = (
        (changes.joined, "joined"),
        (changes.left, "left"),
        (changes.changed, "changed their tags"),
    )
    return ", ".join(f"{len(hosts)} {what}" for hosts, what in told if hosts)
