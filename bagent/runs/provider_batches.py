"""A run through a provider's batches: the one place where they meet the rest of a run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.agents.plan import StagePlan
from bagent.batches.builder import BatchBuilder, BatchLimits
from bagent.batches.conversation_host import BatchRows, RowTools
from bagent.batches.results import ReadRules
from bagent.batches.runner import BatchEngine, EngineTools, SubmitterTools
from bagent.batches.scheduler import ProviderBatchScheduler
from bagent.batches.service import BatchService
from bagent.errors import JobError
from bagent.fleet.fleet import Fleet
from bagent.money.prices import Price, pricer
from bagent.runs.plan import is_deduplicated
from bagent.runs.services import RunPlan, RunServices
from bagent.servers.pricing import job_price
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.stop_rules import StopRules
from bagent.types import Failure, FleetStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagent.job.spec.job import Job


def plan_provider_batches(
    plan: StagePlan,
    pool: ServerPool,
    model: str | None,
    services: RunServices,
    note: Callable[[str], None],
) -> RunPlan:
    """What a session drives where rows go in batches; the pool's fleet asks rows that are too few.

    Raises:
        JobError: a budget, and no price of batches is known.
        WriteError: the run directory cannot be written.
    """
    job, store = pool.resolved.job, services.store
    price = _price(job, pool.resolved.servers.kind, model)
    plan.price, plan.stream = pricer(price), False
    service, desk = (
        make_service(pool.resolved, services),
        ProviderBatchScheduler(job.limits.budget_usd),
    )
    size = job.batching.size
    budget = job.limits.budget_usd
    bounds = BatchLimits(
        rows=None if size == "auto" else int(size),
        tokens=lambda group: desk.quota(group).cap,
        usd=lambda: None if budget is None else max(0.0, budget - spool.spent),
    )
    spool = BatchBuilder(store.path, store.part, _prefix(services), plan.name, service, bounds)
    spool.load(services.notice)
    sharing = RequestDedupe(store.journal.read_at, store.reuse, dedupe=is_deduplicated(job))
    guards = StopRules(canary=services.options.canary, stop_after=job.limits.stop_after_failures)
    tools = RowTools(
        *(plan, store.journal, pool.fleet, sharing, guards, services.emit),
        price=price,
        single_price=job_price(job, pool.resolved.servers.kind, model),
        dedupe=is_deduplicated(job),
    )
    rows = BatchRows(tools, spool)
    engine = BatchEngine(
        service,
        spool,
        rows,
        desk,
        EngineTools(
            rules=ReadRules(job.limits.retries, price, store.done.has),
            post=SubmitterTools(_shelter(pool.fleet), note, services.notice),
            on_attempt=services.on_attempt,
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


def make_service(found: ResolvedServers, services: RunServices) -> BatchService:
    """The batch service of the servers that were found."""
    job, servers = found.job, found.servers
    endpoint, enforce = servers.endpoints[0], job.output.enforce
    if servers.kind == "bedrock":
        from bagent.batches.bedrock import BedrockBatches, S3Location

        batching = job.batching
        assert servers.bedrock is not None
        place = S3Location(batching.s3_uri or "", batching.role_arn or "")
        return BedrockBatches(
            endpoint, servers.bedrock, place, enforce=enforce, notice=services.notice
        )
    if servers.kind == "anthropic":
        from bagent.batches.anthropic import AnthropicBatches

        return AnthropicBatches(endpoint, servers.keys, enforce=enforce, notice=services.notice)
    from bagent.batches.openai import OpenAIBatches

    own = servers.kind == "openai" and job.backend is not None and job.backend.base is None
    return OpenAIBatches(endpoint, servers.keys, own=own, enforce=enforce, notice=services.notice)


def _price(job: Job, kind: str, model: str | None) -> Price | None:
    """The price of a token in a batch; None where a page does not tell by how much it is less.

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


def _prefix(services: RunServices) -> str:
    """Begins the names of this run's batches; a run of the same name made anew has another."""
    info = services.store.info
    made_of = f"{services.store.path.absolute()}\n{info.name}\n{info.created_at!r}"
    return "b" + hashlib.sha256(made_of.encode("utf-8", "replace")).hexdigest()[:12]


def _shelter(
    fleet: Fleet,
) -> Callable[[Coroutine[None, None, str | Failure]], Awaitable[str | Failure]]:
    """Runs a request as a task of the fleet: the end of a run waits for it a little."""

    async def run(work: Coroutine[None, None, str | Failure]) -> str | Failure:
        told: asyncio.Future[str | Failure] = asyncio.get_running_loop().create_future()

        async def go() -> None:
            found = await work
            if not told.done():
                told.set_result(found)

        task = fleet.spawn(go())
        both: set[asyncio.Future[Any]] = {told, task}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return await told

    return run


class BatchFleets(FleetSet):
    """The fleet of a run through batches: in flight is what is with the provider."""

    def __init__(self, fleet: Fleet, engine: BatchEngine) -> None:
        super().__init__([fleet])
        self._engine = engine

    def stats(self) -> FleetStats:
        """As displays show a fleet."""
        out, here = self._engine.out
        found = super().stats()
        return msgspec.structs.replace(
            found, in_flight=found.in_flight + out, ready=found.ready + here
        )
