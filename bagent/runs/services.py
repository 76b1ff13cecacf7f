"""What a session drives: fleets, what feeds them, and what may end it early."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.fleet.limits.account import Account
from bagent.runs.context import RunOptions
from bagent.runs.plan import is_deduplicated
from bagent.runs.run_store import RunStore
from bagent.runs.shutdown import raise_file_limit
from bagent.servers.fleet_factory import make_fleet
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.feeder import Feeder
from bagent.stages.results import Emit
from bagent.stages.row_runner import Replace, RowRunner
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import Attempt, EndpointSample

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


@dataclass(frozen=True)
class RunPlan:
    """One run's work. ``pools`` are servers with the model asked for there; ``run`` takes all rows
    and returns when each has ended; ``advice`` gets the reason to stop, once there is one;
    ``codes`` counts the rows of the last of several stages by outcome code, ``dropped`` the failed
    rows that each stage left out."""

    fleets: FleetSet
    pools: Sequence[tuple[ServerPool, str | None]]
    run: Callable[[Feeder], Awaitable[None]]
    advice: asyncio.Future[StopReason]
    codes: Callable[[], Counter[int]] = Counter
    dropped: Callable[[], dict[str, int]] = dict


@dataclass(frozen=True)
class RunServices:
    """What a session hands to those who work for it.

    ``on_attempt`` takes requests, ``on_sample`` states of endpoints, ``emit`` outcomes, ``notice``
    lines for people; ``gate`` waits for whoever reads the outcomes. ``accounts`` are shared by all
    pools.
    """

    store: RunStore
    options: RunOptions
    on_attempt: Callable[[Attempt], None]
    on_sample: Callable[[EndpointSample], None]
    emit: Emit
    notice: Callable[[str], None]
    gate: Callable[[], Awaitable[None]]
    accounts: dict[str, Account] = field(default_factory=dict)

    def open_pool(self, found: ResolvedServers) -> ServerPool:
        """Put found servers to work; those that have not answered yet are probed first."""
        fleet, state_factory = make_fleet(
            found.job,
            found.servers,
            found.backend,
            handles=raise_file_limit(found.job.limits.concurrency),
            on_attempt=self.on_attempt,
            on_sample=self.on_sample,
            notice=self.notice,
            accounts=self.accounts,
            result_context=self.store.journal.together,
        )
        fleet.set_capabilities(found.known)
        fleet.probe({one.name for one in found.servers.endpoints if one.name not in found.known})
        return ServerPool(found, fleet, state_factory)

    def row_runner(
        self,
        plan: StagePlan,
        pool: ServerPool,
        emit: Emit | None = None,
        *,
        replace: Replace | None = None,
        job: Job | None = None,
        separate: bool = False,
    ) -> RowRunner:
        """An engine over a pool.

        Args:
            emit: takes its outcomes; with it, it is one of several that share the pool.
            replace: returns whether other rows take the place of an outcome.
            job: the job as its stage sees it.
            separate: equal requests are sent all the same, as to different endpoints.
        """
        job, store = job or pool.resolved.job, self.store
        return RowRunner(
            plan,
            pool.fleet,
            store.journal,
            sharing=RequestDedupe(
                store.journal.read_at,
                None if separate else store.reuse,
                dedupe=not separate and is_deduplicated(job),
            ),
            guards=StopRules(canary=self.options.canary, stop_after=job.limits.stop_after_failures),
            emit=emit or self.emit,
            gate=self.gate,
            replace=replace,
            alone=emit is None,
        )
