"""Jobs of several stages: a pipeline over the plans and servers of their requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from bagent.agents.plan import StagePlan
from bagent.runs.context import RunContext
from bagent.runs.services import RunServices
from bagent.servers.server_pool import FleetSet, ServerPool
from bagent.stages.base import FailurePolicy, PromptVariables, RowRequester, Stage, StageContext
from bagent.stages.embed import EmbedStage
from bagent.stages.expand import ExpandStage, Items, Recipe, TextSplit
from bagent.stages.feeder import Backpressure, Feeder
from bagent.stages.loop import BoardWriter, LoopRule, LoopStage
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
            store.journal, earlier, services.emit, all_rows=store.part == "all"
        )
        self._context = StageContext(self._results, self._stop, services.messages.notify, time.time)
        self._policies: list[FailurePolicy] = []
        self._stages = [self._stage(stage) for stage in context.stages]

    async def run(self, feeder: Feeder) -> None:
        """Send all rows through all stages."""
        measured = any(
            stage.spec.kind == "reduce" and INPUT in stage.sources
            for stage in self._run_context.stages
        )
        intake = Intake(feeder, self._gate, self._expect, measured=measured)
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
