"""Builder of a run: the servers, models, tools and plans of everything that it requests.

A job of several stages becomes a pipeline over the plans and servers of their requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.answers.schema.schema import OutputSchema
from bagent.job.templates.prompt import Prompt
from bagent.runs.agents_setup import AgentSetup
from bagent.runs.context import STAGE, RunContext
from bagent.runs.plan import endpoint_summary, make_plan, requested_models, resolve_model
from bagent.runs.resume import reads_all_rows
from bagent.runs.services import RunPlan, RunServices
from bagent.servers.pricing import stage_price
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool, ServerResolver
from bagent.servers.startup_probe import job_models, stage_path
from bagent.stages.base import FailurePolicy, PromptVariables, RowRequester, Stage, StageContext
from bagent.stages.embed import EmbedStage
from bagent.stages.expand import ExpandStage, Items, Recipe, TextSplit
from bagent.stages.feeder import Backpressure, Work
from bagent.stages.loop import BoardWriter, LoopRule, LoopStage, section_stage
from bagent.stages.map import BroadcastStage, MapStage
from bagent.stages.pipeline import Intake, Pipeline
from bagent.stages.prepare import PreparedStage, StageRequest, keeping_keys, table_of
from bagent.stages.reduce import ReduceStage
from bagent.stages.reduction_tree import Reducer, ReduceRule
from bagent.stages.results import StageResults
from bagent.stages.row import INPUT
from bagent.stages.sql import QueryStage
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.store.journal.reader import OutcomeLookup
from bagent.store.totals import Totals
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


class StagedRun:
    """The pipeline of one run, made of plans, row runners and stages.

    Args:
        plans: the plan and the pool of each request, in the order of the stages.
    """

    def __init__(
        self,
        context: RunContext,
        services: RunServices,
        plans: Sequence[tuple[StagePlan, ServerPool]],
    ) -> None:
        self._run_context = context
        self._services = services
        requests = [request for stage in context.stages for request in stage.requests]
        self._plans = {id(request): plan for request, plan in zip(requests, plans, strict=True)}
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._pools = list({id(pool): pool for _, pool in plans}.values())
        self.fleets = FleetSet([pool.fleet for pool in self._pools])
        self._gate = Backpressure()
        store = services.store
        earlier = None
        if store.recorded:
            earlier = OutcomeLookup(store.path, store.done, store.notes.append)
        self._results = StageResults(
            store.journal,
            earlier,
            services.emit,
            all_rows=store.part == "all",
            note=store.note_current,
        )
        self._context = StageContext(self._results, self._stop, services.messages.notify, time.time)
        self._policies: list[FailurePolicy] = []
        self._stages = [self._stage(stage) for stage in context.stages]

    async def run(self, source: AsyncIterable[Work]) -> None:
        """Send all rows through all stages."""
        measured = any(
            stage.spec.kind == "reduce" and INPUT in stage.sources
            for stage in self._run_context.stages
        )
        intake = Intake(source, self._gate, self._expect, measured=measured)
        sources = {stage.name: stage.sources for stage in self._run_context.stages}
        await Pipeline(intake, self._stages, sources).run()
        for pool in self._pools:
            await pool.fleet.wait_idle()
        for stage in self._run_context.stages:
            self._services.messages.notify(f"stage {stage.name}: {self._count_text(stage.name)}")

    def codes(self) -> Counter[int]:
        """Count the rows of the last stage so far by outcome code."""
        return self._results.counts.get(self._run_context.stages[-1].name, Counter())

    def dropped(self) -> dict[str, int]:
        """Count the failed rows that each stage dropped so far."""
        return {policy.name: policy.dropped for policy in self._policies if policy.dropped}

    def _count_text(self, name: str) -> str:
        counts = Totals.of(self._results.counts.get(name, Counter())).by_status
        if not counts:
            return "no rows"
        return ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))

    def _expect(self, more: bool) -> None:
        for pool in self._pools:
            pool.fleet.expect(more)

    def _stop(self, advice: StopReason) -> None:
        if not self.advice.done():
            self.advice.set_result(advice)

    # --- stages -----------------------------------------------------------------------------------

    def _stage(self, stage: PreparedStage) -> Stage:
        spec = stage.spec
        is_vote = spec.kind == "sql" and not self._run_context.job.stages
        policy = FailurePolicy(
            stage.name, spec.on_failure or "include", self._context, sees_dropped=is_vote
        )
        self._policies.append(policy)
        if spec.kind == "expand":
            return ExpandStage(
                policy,
                _recipe(stage),
                self._variables(stage, None),
                self._context,
                later=keeping_keys(stage, self._run_context.stages),
            )
        if spec.kind == "sql":
            tables = [table_of(self._run_context.stages, name) for name in stage.sources]
            return QueryStage(stage.name, spec.query or "", tables, policy, self._context)
        if spec.kind == "loop":
            writers = [
                BoardWriter(
                    request.name, self._requester(stage, request), self._variables(stage, request)
                )
                for request in stage.requests
            ]
            loop_rule = LoopRule(spec.max_rounds, stage.until, spec.parallel)
            return LoopStage(stage.name, writers, loop_rule, policy, self._context, self._gate)
        request = stage.requests[0]
        if spec.kind == "embed":
            return self._embed_stage(stage, request, policy)
        requester = self._requester(stage, request)
        variables = self._variables(stage, request)
        if spec.kind == "reduce":
            rule = ReduceRule(spec.fanin, stage.goal)
            reducer = Reducer(requester, rule, policy, variables, self._context)
            return ReduceStage(requester, reducer, spec.by, len(stage.sources))
        if spec.kind == "broadcast":
            fleet = self._plans[id(request)][1].fleet
            return BroadcastStage(
                requester, policy, variables, lambda: [state.name for state in fleet.states]
            )
        return MapStage(requester, policy, variables)

    def _embed_stage(
        self, stage: PreparedStage, request: StageRequest, policy: FailurePolicy
    ) -> Stage:
        plan, pool = self._plans[id(request)]
        options, limits = self._run_context.options, request.job.limits
        return EmbedStage(
            plan,
            pool.fleet,
            policy,
            self._variables(stage, request),
            self._context,
            self._gate,
            stop_rules=StopRules(canary=options.canary, stop_after=limits.stop_after_failures),
            has_prompt=request.prompt is not None,
        )

    def _variables(self, stage: PreparedStage, request: StageRequest | None) -> PromptVariables:
        fields = None
        if request is not None and request.prompt is not None:
            fields = request.prompt.fields
        if stage.until is not None and fields is not None:
            fields |= stage.until.names
        if stage.items is not None:
            fields = stage.items.names | frozenset(stage.sources)
        elif stage.spec.split is not None:
            fields = frozenset({stage.spec.split.field})
        return PromptVariables(fields, self._results)

    def _requester(self, stage: PreparedStage, request: StageRequest) -> RowRequester:
        plan, pool = self._plans[id(request)]
        separate = stage.spec.kind == "broadcast"
        requester = RowRequester(
            plan,
            self._results,
            self._gate,
            lambda emit, replace: self._services.row_runner(
                plan, pool, emit, is_replaced=replace, job=request.job, separate=separate
            ),
        )
        requester.runner.stop_reason.add_done_callback(
            lambda advice: None if advice.cancelled() else self._stop(advice.result())
        )
        return requester


def _recipe(stage: PreparedStage) -> Recipe:
    if stage.items is not None:
        return Items(stage.items, stage.sources[0])
    assert stage.spec.split is not None
    return TextSplit(stage.spec.split)


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
        services.spending,
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

        return plan_provider_batches(
            plan, pool, models[0], services, reads_all_rows=reads_all_rows(context)
        )
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
