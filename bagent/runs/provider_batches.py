"""Runs through a provider's batch API."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backend_kinds import TRAITS, BackendKind
from bagent.batches.builder import BatchBuilder, BatchLimits
from bagent.batches.conversations import BatchRows, ReadRules, RowTools
from bagent.batches.edited import EditedItems
from bagent.batches.files import BatchItem
from bagent.batches.runner import BatchEngine, EngineTools, SubmitterTools
from bagent.batches.scheduler import ProviderBatchScheduler, SendingTimes
from bagent.batches.service import BatchService
from bagent.errors import JobError
from bagent.fleet.fleet import Fleet
from bagent.money.prices import Price, pricer
from bagent.runs.plan import is_deduplicated, tier_fields
from bagent.runs.services import RunPlan, RunServices
from bagent.servers.pricing import job_price
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.stop_rules import StopRules
from bagent.store.journal.edited_rows import UnseenRows
from bagent.text.durations import time_by
from bagent.types import Failure, FleetStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagent.job.spec.job import Job


def plan_provider_batches(
    plan: StagePlan,
    pool: ServerPool,
    model: str | None,
    services: RunServices,
    *,
    reads_all_rows: bool,
) -> RunPlan:
    """Plan a run whose rows go in batches; too few rows for a batch go through the pool's fleet.

    Args:
        reads_all_rows: as :func:`bagent.runs.resume.reads_all_rows` returns it.

    Raises:
        JobError: a budget, and no price of batches is known.
        WriteError: the run directory cannot be written.
    """
    job, store, messages = pool.resolved.job, services.store, services.messages
    price = _price(job, pool.resolved.servers.kind, model)
    plan.price, plan.stream = pricer(price), False
    size, budget = job.batching.size, job.limits.budget_usd
    times = _sending_times(job, services)
    service = make_service(pool.resolved, services)
    scheduler = ProviderBatchScheduler(budget, None if times is None else times.late_at)
    batch_limits = BatchLimits(
        rows=None if size == "auto" else int(size),
        tokens=lambda group: scheduler.quota(group).cap,
        usd=lambda: None if budget is None else max(0.0, budget - builder.spent),
    )
    builder = BatchBuilder(
        store.path, store.part, _prefix(services), plan.name, service, batch_limits
    )
    rows = _make_rows(plan, pool, builder, times, price, services)
    edited = _load(builder, rows, services, find_edited=reads_all_rows)
    engine = BatchEngine(
        service,
        builder,
        rows,
        scheduler,
        EngineTools(
            rules=ReadRules(job.limits.retries, price, store.done.has, edited),
            post=SubmitterTools(_run_in_fleet(pool.fleet), messages.show, messages.notify),
            on_attempts=services.on_attempts,
            gate=services.gate,
            budget=budget,
        ),
    )
    fleets = BatchFleets(pool.fleet, engine)

    async def run(source: object) -> None:
        try:
            await engine.run(source)  # type: ignore[arg-type]
        finally:
            await service.close()

    return RunPlan(fleets, [(pool, model)], run, rows.advice)


def _make_rows(
    plan: StagePlan,
    pool: ServerPool,
    builder: BatchBuilder,
    times: SendingTimes | None,
    price: Price | None,
    services: RunServices,
) -> BatchRows:
    job, kind = pool.resolved.job, pool.resolved.servers.kind
    sharing = _sharing(job, services)
    guards = StopRules(canary=services.options.canary, stop_after=job.limits.stop_after_failures)
    tools = RowTools(
        *(plan, services.store.journal, pool.fleet, sharing, guards, services.emit),
        price=price,
        single_price=job_price(job, kind, plan.settings.model),
        dedupe=is_deduplicated(job),
        tier={} if times is None else tier_fields(job, kind),
        tier_until=0.0 if times is None else times.tier_until,
    )
    return BatchRows(tools, builder)


def _load(
    builder: BatchBuilder, rows: BatchRows, services: RunServices, *, find_edited: bool
) -> EditedItems | None:
    """Load the batches of earlier starts.

    Return what finds edited rows in them; None where ``find_edited`` is off, or there are none.
    """
    stage, store = rows.plan.name, services.store
    units, indexes = array("Q"), array("Q")

    def on_item(label: str | None, number: int, item: BatchItem) -> None:
        rows.remember(label, number, item)
        if find_edited:
            units.append(item.unit(stage))
            indexes.append(item.row.index)

    builder.load(services.messages.notify, on_item, store.done.has)
    if not builder.records or not find_edited:
        return None
    unseen = UnseenRows(units)
    store.watched.append(unseen)
    return EditedItems(stage, unseen, UnseenRows(indexes), store.journal.replaces)


def make_service(resolved: ResolvedServers, services: RunServices) -> BatchService:
    """Return the batch service of the servers."""
    job, servers = resolved.job, resolved.servers
    endpoint, enforce = servers.endpoints[0], job.output.enforce
    protocol = TRAITS[servers.kind].protocol
    if protocol == "bedrock":
        from bagent.batches.bedrock import BedrockBatches, S3Location

        batching = job.batching
        assert servers.bedrock is not None
        location = S3Location(batching.s3_uri or "", batching.role_arn or "")
        return BedrockBatches(
            endpoint, servers.bedrock, location, enforce=enforce, notice=services.messages.notify
        )
    if protocol == "anthropic":
        from bagent.batches.anthropic import AnthropicBatches

        return AnthropicBatches(
            endpoint, servers.keys, enforce=enforce, notice=services.messages.notify
        )
    from bagent.batches.openai import OpenAIBatches

    assert protocol == "openai"
    own = TRAITS[servers.kind].hosted and job.backend is not None and job.backend.base is None
    return OpenAIBatches(
        endpoint,
        servers.keys,
        own=own,
        api=servers.api,
        enforce=enforce,
        notice=services.messages.notify,
    )


def _price(job: Job, kind: BackendKind, model: str | None) -> Price | None:
    """Return the price of a token in a batch; None where the discount is not known.

    Raises:
        JobError: the job has a budget, and no price is known.
    """
    price = job_price(job, kind, model)
    if price is not None:
        price = price.in_batches()
    if price is None and job.limits.budget_usd is not None:
        raise JobError(
            f"limits.budget_usd: no price of batches is known for {model} at this backend",
            hint="write prices: {input: 0.15, output: 0.60, batch: 0.5}",
            at=job.source.position(("limits", "budget_usd")),
        )
    return price


def _sharing(job: Job, services: RunServices) -> RequestDedupe:
    store = services.store
    return RequestDedupe(
        store.journal.read_at, store.recorded_answers, store.reuse, dedupe=is_deduplicated(job)
    )


def _sending_times(job: Job, services: RunServices) -> SendingTimes | None:
    """Return when the run changes how it sends rows; None where it has no time to end by."""
    if job.batching.by is None:
        return None
    start = services.store.info.created_at or time.time()
    times = SendingTimes.of(start, time_by(job.batching.by, start))
    services.messages.notify(times.describe(job.batching.service_tier))
    return times


def _prefix(services: RunServices) -> str:
    """Return the prefix of the names of this run's batches, unique to this run directory."""
    info = services.store.info
    identity = f"{services.store.path.absolute()}\n{info.name}\n{info.created_at!r}"
    return "b" + hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:12]


def _run_in_fleet(
    fleet: Fleet,
) -> Callable[[Coroutine[None, None, str | Failure]], Awaitable[str | Failure]]:
    """Return a function that runs a request as a task of the fleet; draining waits for it."""

    async def run(work: Coroutine[None, None, str | Failure]) -> str | Failure:
        result: asyncio.Future[str | Failure] = asyncio.get_running_loop().create_future()

        async def finish() -> None:
            answer = await work
            if not result.done():
                result.set_result(answer)

        task = fleet.spawn(finish())
        futures: set[asyncio.Future[Any]] = {result, task}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return await result

    return run


class BatchFleets(FleetSet):
    """The fleet of a run through batches; calls at the provider count as in flight."""

    def __init__(self, fleet: Fleet, engine: BatchEngine) -> None:
        super().__init__([fleet])
        self._engine = engine

    def stats(self) -> FleetStats:
        """Return the fleet's numbers with the calls of open batches."""
        submitted, collected = self._engine.out
        stats = super().stats()
        return msgspec.structs.replace(
            stats, in_flight=stats.in_flight + submitted, ready=stats.ready + collected
        )
