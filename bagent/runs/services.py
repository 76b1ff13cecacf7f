"""What a session runs, and the services that it hands to the parts of a run, messages for people
among them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.agents.plan import SpendingLog, StagePlan
from bagent.errors import BagentError
from bagent.fleet.limits.account import Account
from bagent.observe import Progress, RunLog
from bagent.runs.context import RunOptions
from bagent.runs.plan import is_deduplicated
from bagent.runs.run_store import RunStore
from bagent.runs.shutdown import raise_file_limit
from bagent.servers.fleet_factory import LimitShare, make_fleet
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.feeder import Work
from bagent.stages.results import Emit
from bagent.stages.row_runner import IsReplaced, RowRunner
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import Attempt, EndpointSample

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


class RunMessages:
    """Takes the messages of a run, and masks its secrets in them.

    Args:
        log: ``run.log``.
        progress: the display.
        redact: masks the run's secrets.
    """

    def __init__(self, log: RunLog, progress: Progress, redact: Callable[[str], str]) -> None:
        self._log = log
        self._progress = progress
        self._redact = redact

    def notify(self, text: str) -> None:
        """Show a message, and write it into the log."""
        text = self._redact(text)
        self._log.info(text)
        self._progress.note(text)

    def warn(self, text: str) -> None:
        """Show a warning about the job, the input or an earlier start, and log it."""
        text = self._redact(text)
        self._log.warning(text)
        self._progress.note(text, warning=True)

    def show(self, text: str) -> None:
        """Show the state of the moment, which is not worth a line of the log."""
        self._progress.note(text)

    def log(self, text: str) -> None:
        """Write a detail into the log alone, such as a tool's traceback."""
        self._log.warning(self._redact(text))


@contextmanager
def open_messages(
    run_dir: Path, progress: Progress, redact: Callable[[str], str]
) -> Iterator[RunMessages]:
    """Open ``run.log``; write an error of the block into it, with secrets masked."""
    with closing(RunLog(run_dir / "run.log")) as log:
        try:
            yield RunMessages(log, progress, redact)
        except BagentError as error:
            error.message = redact(error.message)
            log.error(str(error))
            raise


@dataclass(frozen=True)
class RunPlan:
    """The work of one run."""

    fleets: FleetSet
    pools: Sequence[tuple[ServerPool, str | None]]
    """Each set of servers with a model that is requested there."""
    run: Callable[[AsyncIterable[Work]], Awaitable[None]]
    """Takes all rows and returns when each has ended."""
    advice: asyncio.Future[StopReason]
    """Done once there is a reason to stop early."""
    codes: Callable[[], Counter[int]] = Counter
    """Counts the rows of the last of several stages by outcome code."""
    dropped: Callable[[], dict[str, int]] = dict
    """Counts the failed rows that each stage left out."""


@dataclass(frozen=True)
class RunServices:
    """Callbacks and stores that a session shares with all parts of its run."""

    store: RunStore
    options: RunOptions
    on_attempts: Callable[[Sequence[Attempt]], None]
    on_sample: Callable[[EndpointSample], None]
    emit: Emit
    """Takes outcomes."""
    messages: RunMessages
    spending: SpendingLog
    """Counts what conversations cost while they run."""
    gate: Callable[[], Awaitable[None]]
    """Waits for the reader of the outcomes."""
    accounts: dict[str, Account] = field(default_factory=dict)
    """Accounts by name, shared by all pools."""

    def open_pool(self, resolved: ResolvedServers) -> ServerPool:
        """Make the fleet over resolved servers; it probes those that have not answered yet."""
        fleet, state_factory = make_fleet(
            resolved.job,
            resolved.servers,
            resolved.backend,
            handles=raise_file_limit(resolved.job.limits.concurrency),
            on_attempts=self.on_attempts,
            on_sample=self.on_sample,
            notice=self.messages.notify,
            accounts=self.accounts,
            share=LimitShare(self.options.limit_part, self.options.limit_parts),
        )
        names = {endpoint.name for endpoint in resolved.servers.endpoints}
        fleet.set_capabilities(resolved.capabilities)
        fleet.probe(names - resolved.capabilities.keys())
        return ServerPool(resolved, fleet, state_factory)

    def row_runner(
        self,
        plan: StagePlan,
        pool: ServerPool,
        emit: Emit | None = None,
        *,
        is_replaced: IsReplaced | None = None,
        job: Job | None = None,
        separate: bool = False,
    ) -> RowRunner:
        """Make a row runner over a pool.

        Args:
            emit: takes its outcomes; with it, several runners share the pool.
            replace: returns whether other rows take the place of an outcome.
            job: the job as its stage sees it.
            separate: send equal requests separately, as to different endpoints.
        """
        job, store = job or pool.resolved.job, self.store
        return RowRunner(
            plan,
            pool.fleet,
            store.journal,
            dedupe=RequestDedupe(
                store.journal.read_at,
                store.recorded_answers,
                None if separate else store.reuse,
                dedupe=not separate and is_deduplicated(job),
            ),
            stop_rules=StopRules(
                canary=self.options.canary, stop_after=job.limits.stop_after_failures
            ),
            emit=emit or self.emit,
            gate=self.gate,
            alone=emit is None,
            is_replaced=is_replaced,
        )
