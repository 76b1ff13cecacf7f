"""Builder of a run: the servers, models, tools and plans of everything that it requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.answers.schema.schema import OutputSchema
from bagent.job.templates.prompt import Prompt
from bagent.runs.agents_setup import AgentSetup
from bagent.runs.context import STAGE, RunContext
from bagent.runs.plan import endpoint_summary, make_plan, requested_models, resolve_model
from bagent.runs.services import RunPlan, RunServices
from bagent.runs.staged import StagedRun
from bagent.servers.pricing import stage_price
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool, ServerResolver
from bagent.servers.startup_probe import job_models, stage_path
from bagent.stages.loop import section_stage
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


@dataclass(frozen=True)
class RunRequest:
    """What one stage, or one section of a stage, requests; a job without stages has one."""

    stage: str
    """The stage of its rows in the tables."""
    kind: str
    """The kind of its stage."""
    job: Job
    """The job as the stage sees it."""
    prompt: Prompt | None
    schema: OutputSchema | None
    select: Mapping[str, Json] | None = None
    """Which endpoints of the hostfile."""

    @property
    def pool_key(self) -> str:
        """A text that is equal for requests that can share a fleet."""
        job = self.job
        parts = {
            "backend": job.backend,
            "hostfile": job.hostfile,
            "select": dict(self.select or {}),
            "limits": job.limits,
            "batching": job.batching,
            "enforce": job.output.enforce,
            "stream": job.stream,
        }
        return repr(parts)


async def build_run(
    context: RunContext, resolver: ServerResolver, services: RunServices
) -> RunPlan | None:
    """Return the work of a run; None where it was asked to stop meanwhile.

    Raises:
        UsageError: tools cannot be opened, or servers cannot be used as the job says.
        StoppedEarly: too few servers answer.
    """
    requests = run_requests(context)
    agents = AgentSetup(
        services.store,
        resolver.stack,
        context.options.env,
        resolver.stop_requested,
        services.messages.log,
    )
    tools = [None if r.kind == "embed" else await agents.open(r.job) for r in requests]
    resolved = await _find_servers(context, requests, resolver)
    if resolver.stop_requested.done():
        return None
    models = [
        _resolve_model(context, request, servers)
        for request, servers in zip(requests, resolved, strict=True)
    ]
    _record_begin(services, requests, resolved, models)
    pools: dict[int, ServerPool] = {}
    models_by_pool: dict[int, str | None] = {}
    plans = []
    for request, servers, model, executor in zip(requests, resolved, models, tools, strict=True):
        if id(servers) not in pools:
            pools[id(servers)] = services.open_pool(servers)
            models_by_pool[id(servers)] = model
        plan = _make_stage_plan(context, request, servers, model)
        if request.kind != "embed":
            await agents.equip(plan, request.job, servers.servers, executor)
        plans.append((plan, pools[id(servers)]))
    pools_with_models = [(pool, models_by_pool[key]) for key, pool in pools.items()]
    if context.stages:
        run = StagedRun(context, services, plans)
        return RunPlan(run.fleets, pools_with_models, run.run, run.advice, run.codes, run.dropped)
    plan, pool = plans[0]
    if context.job.batching.in_batches:
        from bagent.runs.provider_batches import plan_provider_batches

        return plan_provider_batches(plan, pool, models[0], services)
    runner = services.row_runner(plan, pool)
    return RunPlan(FleetSet([pool.fleet]), pools_with_models, runner.run, runner.stop_reason)


def run_requests(context: RunContext) -> list[RunRequest]:
    """Return what the stages of a job request, in their order; one request without stages."""
    if not context.stages:
        return [RunRequest(STAGE, "map", context.job, context.prompt, context.schema)]
    return [
        RunRequest(
            section_stage(stage.name, request.name) if stage.spec.kind == "loop" else stage.name,
            stage.spec.kind,
            request.job,
            request.prompt,
            request.schema,
            request.part.select,
        )
        for stage in context.stages
        for request in stage.requests
    ]


async def _find_servers(
    context: RunContext, requests: Sequence[RunRequest], resolver: ServerResolver
) -> list[ResolvedServers]:
    """Return the servers of each request; requests that name the same ones share them."""
    by_key: dict[str, ResolvedServers] = {}
    for request in requests:
        prompt, key = request.prompt, request.pool_key
        if key not in by_key:
            raw = prompt is not None and prompt.raw
            by_key[key] = await resolver.find(request.job, raw=raw, select=request.select)
        if context.stages:
            models = job_models(request.job, stage_path(request.kind, prompt))
        else:
            models = requested_models(context, by_key[key].servers.endpoints)
        await resolver.check_models(by_key[key], models)
    return [by_key[request.pool_key] for request in requests]


def _resolve_model(
    context: RunContext, request: RunRequest, servers: ResolvedServers
) -> str | None:
    """Return the model of a request; None where each row names its own."""
    if context.own_bodies and request.job.model == "auto":
        return None
    return resolve_model(request.job, servers.capabilities)


def _record_begin(
    services: RunServices,
    requests: Sequence[RunRequest],
    resolved: Sequence[ResolvedServers],
    models: Sequence[str | None],
) -> None:
    """Write models, endpoints and prices into run.json, before anything is sent."""
    endpoints: dict[str, dict[str, object]] = {}
    for servers in resolved:
        for item in endpoint_summary(servers.servers.endpoints, servers.capabilities):
            endpoints.setdefault(str(item["name"]), item)
    prices = [
        stage_price(request.stage, request.job, servers.servers.kind, model)
        for request, servers, model in zip(requests, resolved, models, strict=True)
    ]
    services.store.begin(
        ", ".join(dict.fromkeys(model for model in models if model is not None)) or None,
        list(endpoints.values()),
        any(servers.servers.simulated for servers in resolved),
        prices,
    )


def _make_stage_plan(
    context: RunContext, request: RunRequest, resolved: ResolvedServers, model: str | None
) -> StagePlan:
    view = dataclasses.replace(
        context, job=request.job, prompt=request.prompt, schema=request.schema
    )
    plan = make_plan(view, resolved.servers, model, resolved.capabilities, name=request.stage)
    if request.kind != "map":
        plan.answers = 1
    return plan
