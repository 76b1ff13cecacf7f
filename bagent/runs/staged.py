"""Jobs of several stages: from their definition to a pipeline over their servers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.runs.agents_setup import AgentSetup
from bagent.runs.context import RunContext
from bagent.runs.plan import endpoint_summary, make_plan, resolve_model
from bagent.runs.services import RunPlan, RunServices
from bagent.servers.pricing import stage_price
from bagent.servers.server_pool import FleetSet, ResolvedServers, ServerPool, ServerResolver
from bagent.servers.startup_probe import job_models, stage_path
from bagent.stages.base import FailurePolicy, PromptVariables, RowRequester, Stage, StageContext
from bagent.stages.embed import EmbedStage
from bagent.stages.expand import ExpandStage, Items, Recipe, TextSplit
from bagent.stages.feeder import Backpressure, Feeder
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


async def plan_stages(
    prepared: RunContext, resolver: ServerResolver, services: RunServices
) -> RunPlan | None:
    """Find the servers of all stages; return None where the run was asked to stop meanwhile.

    Raises:
        UsageError: servers cannot be used as the job says.
        StoppedEarly: too few answer.
    """
    servers = await _StageServers.find(prepared, resolver)
    if resolver.stop_requested.done():
        return None
    models = servers.models(prepared.stages)
    summary: dict[str, dict[str, object]] = {}
    for resolved in servers.resolved.values():
        for item in endpoint_summary(resolved.servers.endpoints, resolved.capabilities):
            summary.setdefault(str(item["name"]), item)
    names = ", ".join(dict.fromkeys(models.values())) or None
    simulated = any(resolved.servers.simulated for resolved in servers.resolved.values())
    prices = [
        stage_price(
            _result_stage(stage, request),
            request.job,
            servers.of(request).servers.kind,
            models[id(request)],
        )
        for stage in prepared.stages
        for request in stage.requests
    ]
    services.store.begin(names, list(summary.values()), simulated, prices)
    plans = await _plans(prepared, resolver, services, servers, models)
    work = _StagedRun(prepared, services, servers, models, plans)
    return RunPlan(work.fleets, work.pools, work.run, work.advice, work.codes, work.dropped)


def _result_stage(stage: PreparedStage, request: StageRequest) -> str:
    """Return the stage name of the request's rows in the tables."""
    if stage.spec.kind == "loop":
        return section_stage(stage.name, request.name)
    return stage.name


class _StageServers:
    """The servers of all stages; stages that name the same ones share them."""

    def __init__(self) -> None:
        self.resolved: dict[str, ResolvedServers] = {}
        self.key_of: dict[int, str] = {}

    @classmethod
    async def find(cls, prepared: RunContext, resolver: ServerResolver) -> _StageServers:
        servers = cls()
        for stage in prepared.stages:
            for request in stage.requests:
                key = pool_key(request.job, request.part.select)
                servers.key_of[id(request)] = key
                if key not in servers.resolved:
                    raw = request.prompt is not None and request.prompt.raw
                    servers.resolved[key] = await resolver.find(
                        request.job, raw=raw, select=request.part.select
                    )
                path = stage_path(stage.spec.kind, request.prompt)
                await resolver.check_models(servers.resolved[key], job_models(request.job, path))
        return servers

    def of(self, request: StageRequest) -> ResolvedServers:
        return self.resolved[self.key_of[id(request)]]

    def models(self, stages: tuple[PreparedStage, ...]) -> dict[int, str]:
        """Return the model of each request by the request's id()."""
        return {
            id(request): resolve_model(request.job, self.of(request).capabilities)
            for stage in stages
            for request in stage.requests
        }


def pool_key(job: Job, select: Mapping[str, Json] | None) -> str:
    """Return a text that is equal for stages that can share a fleet."""
    parts = {
        "backend": job.backend,
        "hostfile": job.hostfile,
        "select": dict(select or {}),
        "limits": job.limits,
        "batching": job.batching,
        "enforce": job.output.enforce,
        "stream": job.stream,
    }
    return repr(parts)


async def _plans(
    prepared: RunContext,
    resolver: ServerResolver,
    services: RunServices,
    servers: _StageServers,
    models: dict[int, str],
) -> dict[int, StagePlan]:
    """Return the plan of each request by the request's id(), with its tools opened."""
    agents = AgentSetup(
        services.store, resolver.stack, prepared.options.env, resolver.stop_requested
    )
    plans: dict[int, StagePlan] = {}
    for stage in prepared.stages:
        kind = stage.spec.kind
        for request in stage.requests:
            resolved, job = servers.of(request), request.job
            view = dataclasses.replace(
                prepared, job=job, prompt=request.prompt, schema=request.schema
            )
            plan = make_plan(
                view,
                resolved.servers,
                models[id(request)],
                resolved.capabilities,
                name=_result_stage(stage, request),
            )
            if kind != "map":
                plan.answers = 1
            if kind != "embed":
                await agents.equip(plan, job, resolved.servers, await agents.open(job))
            plans[id(request)] = plan
    return plans


class _StagedRun:
    """The pipeline of one run, made of plans, row runners and stages."""

    def __init__(
        self,
        prepared: RunContext,
        services: RunServices,
        servers: _StageServers,
        models: dict[int, str],
        plans: dict[int, StagePlan],
    ) -> None:
        self._prepared = prepared
        self._services = services
        self._servers = servers
        self._models = models
        self._plans = plans
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._pools: dict[str, ServerPool] = {
            key: services.open_pool(resolved) for key, resolved in servers.resolved.items()
        }
        self.fleets = FleetSet([pool.fleet for pool in self._pools.values()])
        self._gate = Backpressure()
        store = services.store
        earlier = None
        if store.recorded:
            earlier = OutcomeLookup(store.path, store.done, store.notes.append)
        self._results = StageResults(
            store.journal, earlier, services.emit, all_rows=store.part == "all"
        )
        self._context = StageContext(self._results, self._stop, services.notice, time.time)
        self._policies: list[FailurePolicy] = []
        self._stages = [self._stage(stage) for stage in prepared.stages]

    @property
    def pools(self) -> list[tuple[ServerPool, str | None]]:
        """Each set of servers with a model that is requested there."""
        models: dict[str, str | None] = {}
        for stage in self._prepared.stages:
            for request in stage.requests:
                models.setdefault(self._servers.key_of[id(request)], self._models[id(request)])
        return [(self._pools[key], model) for key, model in models.items()]

    async def run(self, feeder: Feeder) -> None:
        """Send all rows through all stages."""
        measured = any(
            stage.spec.kind == "reduce" and INPUT in stage.sources
            for stage in self._prepared.stages
        )
        intake = Intake(feeder, self._gate, self._expect, measured=measured)
        sources = {stage.name: stage.sources for stage in self._prepared.stages}
        await Pipeline(intake, self._stages, sources).run()
        for pool in self._pools.values():
            await pool.fleet.wait_idle()
        for stage in self._prepared.stages:
            self._services.notice(f"stage {stage.name}: {self._count_text(stage.name)}")

    def codes(self) -> Counter[int]:
        """Count the rows of the last stage so far by outcome code."""
        return self._results.counts.get(self._prepared.stages[-1].name, Counter())

    def dropped(self) -> dict[str, int]:
        """Count the failed rows that each stage dropped so far."""
        return {policy.name: policy.dropped for policy in self._policies if policy.dropped}

    def _count_text(self, name: str) -> str:
        counts = Totals.of(self._results.counts.get(name, Counter())).by_status
        if not counts:
            return "no rows"
        return ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))

    def _expect(self, more: bool) -> None:
        for pool in self._pools.values():
            pool.fleet.expect(more)

    def _stop(self, advice: StopReason) -> None:
        if not self.advice.done():
            self.advice.set_result(advice)

    # --- stages -----------------------------------------------------------------------------------

    def _stage(self, stage: PreparedStage) -> Stage:
        spec = stage.spec
        is_vote = spec.kind == "sql" and not self._prepared.job.stages
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
                later=keeping_keys(stage, self._prepared.stages),
            )
        if spec.kind == "sql":
            tables = [table_of(self._prepared.stages, name) for name in stage.sources]
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
            fleet = self._pools[self._servers.key_of[id(request)]].fleet
            return BroadcastStage(
                requester, policy, variables, lambda: [state.name for state in fleet.states]
            )
        return MapStage(requester, policy, variables)

    def _embed_stage(
        self, stage: PreparedStage, request: StageRequest, policy: FailurePolicy
    ) -> Stage:
        pool = self._pools[self._servers.key_of[id(request)]]
        options, limits = self._prepared.options, request.job.limits
        return EmbedStage(
            self._plans[id(request)],
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
        pool = self._pools[self._servers.key_of[id(request)]]
        plan = self._plans[id(request)]
        separate = stage.spec.kind == "broadcast"
        requester = RowRequester(
            plan,
            self._results,
            self._gate,
            lambda emit, replace: self._services.row_runner(
                plan, pool, emit, replace=replace, job=request.job, separate=separate
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
