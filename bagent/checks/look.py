"""A look at a job from its options to a report. Nothing is generated and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backends.choose import BackendConfig, make_backend
from bagent.backends.proxy import is_loopback
from bagent.backends.transport import Transport
from bagent.checks import describing
from bagent.checks.effects import effects_of, puts_variables_into_bodies
from bagent.checks.estimate import (
    Sizes,
    cost_report,
    max_tokens_of,
    prompts_as_bytes,
    sizes_of,
    text_bytes,
    token_report,
    too_long,
)
from bagent.checks.reorder import suggest, yaml_of
from bagent.checks.report import CheckReport, ReorderReport, ShareReport
from bagent.checks.sample import Sampled, open_rows_as_requests
from bagent.checks.servers import Probed, Target, find_target, known_of, probe_all
from bagent.checks.sharing import BLOCK, PACKED, shares
from bagent.checks.staged import as_asked, first_view
from bagent.checks.tokens import ServerTokenizer, SimTokenizer, Tokenizer, count_some
from bagent.checks.volume import Volume, measure
from bagent.checks.warming import warming
from bagent.duck import without_installs
from bagent.interrupts import run_interruptible
from bagent.job.prompt import Prompt
from bagent.money.prices import Price
from bagent.observe.words import counted
from bagent.redaction import Redactor
from bagent.rows import RowSource
from bagent.runs.costs import price_of
from bagent.runs.equipping import opened_tools, runs_nothing, with_tools
from bagent.runs.options import RunOptions
from bagent.runs.plan import deduped, make_plan, resolve_model
from bagent.runs.prepare import Prepared, open_input, prepare
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.tools import ToolPool

MOST_NAMED = 20
"""Rows that will fail or do not fit are named up to this many."""

_NO_TOKENIZER = frozenset(("anthropic", "bedrock"))
"""Kinds of servers that are not asked to count tokens: they would take it for a call."""

_HOSTED = frozenset({"api.openai.com"})
"""Hosts that are known to serve no tokenizer."""


@dataclass(frozen=True)
class CheckOptions:
    """What to look at.

    ``run`` are the options as ``bagent run`` takes them. ``rows`` is how many rows are looked at,
    ``prompts`` how many of them are shown. ``price`` is in dollars per million tokens of prompts
    and of answers, None where unknown. ``open`` lets the check do what the job brings: import and
    start its tools, run its ``api_key_command`` and send its keys.
    """

    run: RunOptions
    rows: int = 200
    prompts: int = 2
    price: tuple[float, float] | None = None
    open: bool = False


@without_installs()
def look(options: CheckOptions, *, stdin: BinaryIO | None = None) -> CheckReport:
    """Load the job as a run does, ask its endpoints what they are, and estimate.

    Raises:
        UsageError: the job, its input, schema, hostfile or an option is wrong.
    """
    prepared = prepare(options.run)
    # A run keeps what stdin brings; a look leaves nothing behind.
    prepared.rows_config = replace(prepared.rows_config, stdin_spool=None)
    source = open_input(prepared, stdin=stdin)
    try:
        view, written = first_view(prepared)
        report = run_interruptible(_report(options, view, source))
        redact = Redactor(prepared.job.source.secrets)
        return msgspec.structs.replace(
            report,
            stages=written,
            effects=effects_of(prepared.job, options.run.env),
            model=redact.optional(report.model),
            parameters=redact.values(report.parameters),
            warnings=tuple(map(redact, report.warnings)),
        )
    finally:
        source.close()


async def _report(options: CheckOptions, prepared: Prepared, source: RowSource) -> CheckReport:
    async with AsyncExitStack() as stack:
        target = await find_target(prepared.job, options.run.env, stack, keys=options.open)
        found = measure(source, options.rows, limit=options.run.limit, piped=prepared.piped)
        prepared.warnings += source.warnings
        found = as_asked(prepared, found[0]), found[1]
        only = (lambda _: True) if options.open else runs_nothing
        tools = opened_tools(prepared.job, options.run.env, only)
        pool = await stack.enter_async_context(tools)
        return await _Look(options, prepared, target, found, pool).report()


class _Look:
    """One look; its parts share what was found so far."""

    def __init__(
        self,
        options: CheckOptions,
        prepared: Prepared,
        target: Target,
        found: tuple[list[Row], Volume],
        pool: ToolPool | None,
    ) -> None:
        self._pool = pool
        self._options = options
        self._prepared = prepared
        self._target = target
        self._rows, self._volume = found

    async def report(self) -> CheckReport:
        """Everything that is to be told."""
        transport = Transport()
        servers = self._target.servers
        config = BackendConfig(
            enforce=self._prepared.job.output.enforce, keys=servers.keys, bedrock=servers.bedrock
        )
        backend = make_backend(servers.kind, transport, config)
        try:
            probed = await probe_all(backend, transport, self._target)
            model = self._model(probed)
            plan = make_plan(self._prepared, self._target.servers, model, known_of(probed))
            if self._pool is not None:
                with_tools(plan, self._prepared.job, servers, self._pool)
            sample = open_rows_as_requests(plan, self._rows)
            tokenizer = self._tokenizer(transport, probed, model)
            counted = await count_some(sample, tokenizer) if tokenizer else {}
        finally:
            await backend.close()
        report = self._told(probed, plan, sample, sizes_of(sample, counted), tokenizer)
        return msgspec.structs.replace(
            report, opened=self._options.open, tools=tuple(plan.settings.tools)
        )

    def _model(self, probed: Sequence[Probed]) -> str | None:
        job = self._prepared.job
        if self._prepared.own_bodies and job.model == "auto":
            return None
        if job.model != "auto" or self._target.planned is not None:
            return self._target.model if job.model == "auto" else job.model
        if not any(one.found is not None for one in probed):
            return None
        return resolve_model(job, known_of(probed))

    def _price(self, plan: StagePlan) -> Price | None:
        """The given price, else the job's own, else that known for its model."""
        given, model = self._options.price, plan.settings.model
        if given is not None:
            return Price("", model or "", *given, source="--price")
        return price_of(self._prepared.job, self._target.servers.kind, model)

    def _tokenizer(
        self, transport: Transport, probed: Sequence[Probed], model: str | None
    ) -> Tokenizer | None:
        if self._target.planned is not None:
            return SimTokenizer() if self._target.servers.simulated else None
        if self._target.servers.kind in _NO_TOKENIZER:
            return None
        for one in probed:
            here = is_loopback(urlsplit(one.endpoint.url).hostname or "")
            sends = self._options.open or (
                here and not puts_variables_into_bodies(self._prepared.job)
            )
            if one.found is not None and one.endpoint.name not in _HOSTED and sends:
                return ServerTokenizer(transport, one.endpoint, model)
        return None

    def _told(
        self,
        probed: Sequence[Probed],
        plan: StagePlan,
        sample: Sequence[Sampled],
        sizes: Sizes,
        tokenizer: Tokenizer | None,
    ) -> CheckReport:
        prepared, options = self._prepared, self._options
        job, context = prepared.job, plan.budget.context
        requests = float(self._volume.rows * job.answers)
        how = describing.counting(tokenizer, sizes)
        tokens = token_report(sample, sizes, requests, how)
        sharing = self._share_report(probed, sample, sizes)
        automatic = job.sampling.max_tokens is None and not prepared.own_bodies
        long_rows = too_long(sample, sizes, context)
        failing = describing.failing(sample)
        warnings = self._warnings(plan, probed)
        return CheckReport(
            job=job.name,
            file=str(options.run.job),
            backend=describing.backend_words(job),
            planned=self._target.planned,
            endpoints=tuple(describing.endpoint_report(one, job.source.secrets) for one in probed),
            model=plan.settings.model,
            model_auto=job.model == "auto",
            context=context,
            inputs=describing.input_words(job),
            rows=self._volume.rows,
            rows_how=self._volume.how,
            looked_at=len(sample),
            answers=job.answers,
            max_tokens=max_tokens_of(sample, automatic=automatic),
            schema=describing.schema_report(prepared, plan),
            dedupe=deduped(job),
            stream=describing.stream_words(plan),
            results=describing.short_path(prepared.run_dir, options.run.cwd),
            parameters=describing.first_parameters(sample, plan, job.output.enforce),
            prompts=tuple(
                describing.prompt_report(one, sizes, place)
                for place, one in enumerate(sample[: options.prompts])
            ),
            tokens=tokens,
            cost=cost_report(
                self._price(plan), tokens, round(requests), sharing.by_all if sharing else 0.0
            ),
            sharing=sharing,
            reorder=self._reorder(plan, sample, sizes),
            failing=tuple(failing[:MOST_NAMED]),
            failing_count=len(failing),
            too_long=tuple(long_rows[:MOST_NAMED]),
            too_long_count=len(long_rows),
            warnings=tuple(dict.fromkeys(warnings)),
            dead=describing.dead(probed),
            refused=describing.refused(probed),
        )

    def _warnings(self, plan: StagePlan, probed: Sequence[Probed]) -> list[str]:
        return [
            *self._prepared.warnings,
            *describing.brace_warnings(self._prepared, self._rows),
            *describing.doubts(self._prepared, plan, probed),
            *self._not_opened(),
        ]

    def _not_opened(self) -> list[str]:
        """Tools whose definitions are not among what was counted."""
        agent = self._prepared.job.agent
        if self._options.open or agent is None:
            return []
        count = sum(not runs_nothing(tool) for tool in agent.tools)
        if not count:
            return []
        return [f"{counted(count, 'tool')} not opened: definitions are not counted (--open does)"]

    # --- what is shared -------------------------------------------------------------------------

    def _share_report(
        self,
        probed: Sequence[Probed],
        sample: Sequence[Sampled],
        sizes: Sizes,
    ) -> ShareReport | None:
        prompts, ratio = prompts_as_bytes(sample, sizes)
        found = shares(prompts, ratio)
        if found is None:
            return None
        job = self._prepared.job
        calls = self._volume.rows * job.answers
        caches = [one.kv_tokens for one in probed if one.kv_tokens]
        cache = min(caches, default=None)
        longest = max((one.max_tokens or 0 for one in sample), default=0)
        own = found.prompt - found.by_all + longest
        fits = None if cache is None or own <= 0 else int((cache - found.by_all) / own)
        return ShareReport(
            block=BLOCK,
            rows=found.rows,
            exact=ratio == PACKED and bool(sizes.counted),
            prompt=round(found.prompt, 1),
            by_all=round(found.by_all, 1),
            by_most=round(found.by_most, 1),
            by_some=round(found.by_some, 1),
            by_none=round(found.by_none, 1),
            kv_tokens=cache,
            kv_rows=None if fits is None else max(0, fits),
            warming=warming(job, self._target.servers, found.by_all, calls),
        )

    def _reorder(
        self, plan: StagePlan, sample: Sequence[Sampled], sizes: Sizes
    ) -> ReorderReport | None:
        job = self._prepared.job
        rows = [one.row for one in sample if one.request is not None]
        if job.prompt is None or self._prepared.own_bodies:
            return None

        def score(prompt: Prompt) -> float:
            other = msgspec.structs.replace(plan, prompt=prompt)
            texts = text_bytes(open_rows_as_requests(other, rows), sizes.text_ratio)
            found = shares(texts, sizes.text_ratio)
            return found.by_all if found else 0.0

        found = suggest(job, [row.data for row in rows], score, float(BLOCK))
        if found is None:
            return None
        return ReorderReport(
            gain=round(found.gain),
            gain_total=round(found.gain * self._volume.rows * job.answers),
            points_back=found.points_back,
            yaml=yaml_of(found, job.prompt),
        )
