"""A job of several stages, from its definition to a pipeline over its servers."""

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
    """Find the servers of all stages; None: the run was asked to stop meanwhile.

    Raises:
        UsageError: servers cannot be used as the job says.
        StoppedEarly: too few answer.
    """
    pools = await _StageServers.find(prepared, resolver)
    if resolver.asked.done():
        return None
    models = pools.models(prepared.stages)
    summary: dict[str, dict[str, object]] = {}
    for found in pools.found.values():
        for one in endpoint_summary(found.servers.endpoints, found.known):
            summary.setdefault(str(one["name"]), one)
    named = dict.fromkeys(models.values())
    together = ", ".join(map(str, named)) if named else None
    simulated = any(found.servers.simulated for found in pools.found.values())
    prices = [
        stage_price(
            _name(stage, asking), asking.job, pools.of(asking).servers.kind, models[id(asking)]
        )
        for stage in prepared.stages
        for asking in stage.asking
    ]
    services.store.begin(together, list(summary.values()), simulated, prices)
    plans = await _plans(prepared, resolver, services, pools, models)
    work = _Work(prepared, services, pools, models, plans)
    return RunPlan(work.fleets, work.watched, work.run, work.advice, work.codes, work.dropped)


def _name(stage: PreparedStage, asking: StageRequest) -> str:
    """What the rows of this asking are called in the tables."""
    if stage.spec.kind == "loop":
        return section_stage(stage.name, asking.name)
    return stage.name


class _StageServers:
    """The servers of all stages; stages that name the same ones share them."""

    def __init__(self) -> None:
        self.found: dict[str, ResolvedServers] = {}
        self.key_of: dict[int, str] = {}

    @classmethod
    async def find(cls, prepared: RunContext, resolver: ServerResolver) -> _StageServers:
        pools = cls()
        for stage in prepared.stages:
            for asking in stage.asking:
                key = pool_key(asking.job, asking.part.select)
                pools.key_of[id(asking)] = key
                if key not in pools.found:
                    raw = asking.prompt is not None and asking.prompt.raw
                    select = asking.part.select
                    pools.found[key] = await resolver.find(asking.job, raw=raw, select=select)
                path = stage_path(stage.spec.kind, asking.prompt)
                await resolver.check_models(pools.found[key], job_models(asking.job, path))
        return pools

    def of(self, asking: StageRequest) -> ResolvedServers:
        return self.found[self.key_of[id(asking)]]

    def models(self, stages: tuple[PreparedStage, ...]) -> dict[int, str]:
        """The model of each asking."""
        return {
            id(asking): resolve_model(asking.job, self.of(asking).known)
            for stage in stages
            for asking in stage.asking
        }


def pool_key(job: Job, select: Mapping[str, Json] | None) -> str:
    """A text that is the same for stages that can share their servers' fleet."""
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
    pools: _StageServers,
    models: dict[int, str],
) -> dict[int, StagePlan]:
    """What each asking asks, with its tools opened."""
    agents = AgentSetup(services.store, resolver.stack, prepared.options.env, resolver.asked)
    plans: dict[int, StagePlan] = {}
    for stage in prepared.stages:
        kind = stage.spec.kind
        for asking in stage.asking:
            found, job = pools.of(asking), asking.job
            name = _name(stage, asking)
            view = dataclasses.replace(
                prepared, job=job, prompt=asking.prompt, schema=asking.schema
            )
            plan = make_plan(view, found.servers, models[id(asking)], found.known, name=name)
            if kind != "map":
                plan.answers = 1
            if kind != "embed":
                tools = await agents.open(job)
                await agents.equip(plan, job, found.servers, tools)
            plans[id(asking)] = plan
    return plans


class _Work:
    """The pipeline of one run; made of plans, engines and stages."""

    def __init__(
        self,
        prepared: RunContext,
        services: RunServices,
        pools: _StageServers,
        models: dict[int, str],
        plans: dict[int, StagePlan],
    ) -> None:
        self._prepared = prepared
        self._services = services
        self._sites = pools
        self._models = models
        self._plans = plans
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._pools: dict[str, ServerPool] = {
            key: services.open_pool(found) for key, found in pools.found.items()
        }
        self.fleets = FleetSet([pool.fleet for pool in self._pools.values()])
        self._gate = Backpressure()
        store = services.store
        earlier = None
        if store.recorded:
            earlier = OutcomeLookup(store.path, store.done, store.notes.append)
        self._records = StageResults(
            store.journal, earlier, services.emit, whole=store.part == "all"
        )
        self._world = StageContext(self._records, self._stop, services.notice, time.time)
        self._entrances: list[FailurePolicy] = []
        self._stages = [self._stage(stage) for stage in prepared.stages]

    @property
    def watched(self) -> list[tuple[ServerPool, str | None]]:
        """Each pool with a model that is asked for there."""
        found: dict[str, str | None] = {}
        for stage in self._prepared.stages:
            for asking in stage.asking:
                found.setdefault(self._sites.key_of[id(asking)], self._models[id(asking)])
        return [(self._pools[key], model) for key, model in found.items()]

    async def run(self, feeder: Feeder) -> None:
        """All rows through all stages."""
        intake = Intake(
            feeder,
            self._gate,
            self._expect,
            measured=any(_measures(s) for s in self._prepared.stages),
        )
        sources = {stage.name: stage.sources for stage in self._prepared.stages}
        await Pipeline(intake, self._stages, sources).run()
        for pool in self._pools.values():
            await pool.fleet.wait_idle()
        for stage in self._prepared.stages:
            self._services.notice(f"stage {stage.name}: {self._counted(stage.name)}")

    def codes(self) -> Counter[int]:
        """Count the rows of the last stage so far by outcome code."""
        return self._records.counts.get(self._prepared.stages[-1].name, Counter())

    def dropped(self) -> dict[str, int]:
        """Count the failed rows that each stage dropped so far."""
        return {one.name: one.dropped for one in self._entrances if one.dropped}

    def _counted(self, name: str) -> str:
        counts = Totals.of(self._records.counts.get(name, Counter())).by_status
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
        vote = spec.kind == "sql" and not self._prepared.job.stages
        entrance = FailurePolicy(
            stage.name, spec.on_failure or "include", self._world, sees_dropped=vote
        )
        self._entrances.append(entrance)
        if spec.kind == "expand":
            return ExpandStage(
                entrance,
                _recipe(stage),
                self._names(stage, None),
                self._world,
                later=keeping_keys(stage, self._prepared.stages),
            )
        if spec.kind == "sql":
            tables = [table_of(self._prepared.stages, name) for name in stage.sources]
            return QueryStage(stage.name, spec.query or "", tables, entrance, self._world)
        if spec.kind == "loop":
            writers = [
                BoardWriter(asking.name, self._asker(stage, asking), self._names(stage, asking))
                for asking in stage.asking
            ]
            rule = LoopRule(spec.max_rounds, stage.until, spec.parallel)
            return LoopStage(stage.name, writers, rule, entrance, self._world, self._gate)
        asking = stage.asking[0]
        if spec.kind == "embed":
            return self._embedding(stage, asking, entrance)
        asker, names = self._asker(stage, asking), self._names(stage, asking)
        if spec.kind == "reduce":
            reducing = ReduceRule(spec.fanin, stage.goal)
            reducer = Reducer(asker, reducing, entrance, names, self._world)
            return ReduceStage(asker, reducer, spec.by, len(stage.sources))
        if spec.kind == "broadcast":
            fleet = self._pools[self._sites.key_of[id(asking)]].fleet
            return BroadcastStage(
                asker, entrance, names, lambda: [state.name for state in fleet.states]
            )
        return MapStage(asker, entrance, names)

    def _embedding(
        self, stage: PreparedStage, asking: StageRequest, entrance: FailurePolicy
    ) -> Stage:
        pool = self._pools[self._sites.key_of[id(asking)]]
        options, limits = self._prepared.options, asking.job.limits
        return EmbedStage(
            self._plans[id(asking)],
            pool.fleet,
            entrance,
            self._names(stage, asking),
            self._world,
            self._gate,
            guards=StopRules(canary=options.canary, stop_after=limits.stop_after_failures),
            has_prompt=asking.prompt is not None,
        )

    def _names(self, stage: PreparedStage, asking: StageRequest | None) -> PromptVariables:
        used = None
        if asking is not None and asking.prompt is not None:
            used = asking.prompt.fields
        if stage.until is not None and used is not None:
            used |= stage.until.names
        if stage.items is not None:
            used = stage.items.names | frozenset(stage.sources)
        elif stage.spec.split is not None:
            used = frozenset({stage.spec.split.field})
        return PromptVariables(used, self._records)

    def _asker(self, stage: PreparedStage, asking: StageRequest) -> RowRequester:
        pool = self._pools[self._sites.key_of[id(asking)]]
        plan = self._plans[id(asking)]
        separate = stage.spec.kind == "broadcast"
        asker = RowRequester(
            plan,
            self._records,
            self._gate,
            lambda emit, replace: self._services.row_runner(
                plan, pool, emit, replace=replace, job=asking.job, separate=separate
            ),
        )
        asker.engine.advice.add_done_callback(
            lambda advice: None if advice.cancelled() else self._stop(advice.result())
        )
        return asker


def _recipe(stage: PreparedStage) -> Recipe:
    if stage.items is not None:
        return Items(stage.items, stage.sources[0])
    assert stage.spec.split is not None
    return TextSplit(stage.spec.split)


def _measures(stage: PreparedStage) -> bool:
    """Whether the stage has to know how long input rows are."""
    return stage.spec.kind == "reduce" and INPUT in stage.sources
