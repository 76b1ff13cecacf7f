"""A look at a job from its options to a report. Nothing is generated and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Protocol
from urllib.parse import urlsplit

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backends.http.client import Transport
from bagent.backends.http.proxies import is_loopback
from bagent.backends.registry import BackendConfig, make_backend
from bagent.check import facts as describing
from bagent.check.estimate import (
    Sizes,
    cost_report,
    max_tokens_of,
    prompts_as_bytes,
    sizes_of,
    text_bytes,
    token_report,
    too_long,
)
from bagent.check.facts import effects_of, puts_variables_into_bodies
from bagent.check.prefix_sharing import BLOCK, PACKED, shares, warming
from bagent.check.probe import CheckTarget, Probed, find_target, known_of, probe_all
from bagent.check.prompt_reorder import suggest, yaml_of
from bagent.check.report import CheckReport, ReorderReport, ShareReport
from bagent.check.sample import Sampled, open_rows_as_requests
from bagent.check.tokens import ServerTokenizer, SimTokenizer, Tokenizer, count_some
from bagent.duck import without_installs
from bagent.interrupts import run_interruptible
from bagent.job.templates.prompt import Prompt
from bagent.money.prices import Price
from bagent.observe.formatting import counted
from bagent.redaction import Redactor
from bagent.rows import RowReader
from bagent.runs.agents_setup import add_tools, has_no_side_effect_on_open, open_job_tools
from bagent.runs.context import RunContext, RunOptions, open_input, prepare
from bagent.runs.plan import is_deduplicated, make_plan, resolve_model
from bagent.servers.pricing import job_price
from bagent.stages.loop import Board
from bagent.stages.prepare import PreparedStage
from bagent.stages.row import input_response, responses
from bagent.stages.topologies import expand_topology, topology_yaml
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.tools import ToolExecutor


def first_view(prepared: RunContext) -> tuple[RunContext, str | None]:
    """The job as its first stage that asks sees it, and the stages of a topology as YAML.

    A job of one map is looked at as it is.
    """
    stage = _first(prepared)
    if stage is None:
        return prepared, None
    asking = stage.asking[0]
    view = replace(prepared, job=asking.job, prompt=asking.prompt, schema=asking.schema)
    laid = expand_topology(prepared.job)
    return view, None if prepared.job.stages else topology_yaml(laid, prepared.job)


def _first(prepared: RunContext) -> PreparedStage | None:
    return next((stage for stage in prepared.stages if stage.asking), None)


def as_asked(prepared: RunContext, rows: Sequence[Row]) -> list[Row]:
    """Input rows as the first stage that asks gets them: alone, on a board, or as one group."""
    stage = _first(prepared)
    if stage is None or not rows:
        return list(rows)
    if stage.spec.kind == "loop":
        extra = {"board": Board(), "round": 1, "section": stage.asking[0].name}
        return [msgspec.structs.replace(row, extra=extra) for row in rows]
    if stage.spec.kind == "reduce":
        size = stage.spec.fanin or len(rows)
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [_grouped(group) for group in groups]
    return list(rows)


def _grouped(group: Sequence[Row]) -> Row:
    found = responses([input_response(row) for row in group])
    extra = {"responses": found, "n": len(group), "level": 1}
    return msgspec.structs.replace(group[0], extra=extra)


COUNT_BYTES = 16 << 20
COUNT_ROWS = 200_000
"""Reading stops past either: about a second. What is smaller is counted to its end."""


class Source(Protocol):
    """Where rows come from: a :class:`bagent.rows.RowReader`."""

    def batches(self) -> Iterable[list[Row]]:
        """All rows, in lists."""
        ...

    def progress(self) -> tuple[int, int | None]:
        """How many bytes were read, and of how many; None where no one can know."""
        ...


class Volume(msgspec.Struct, frozen=True):
    """``rows`` of the job. ``how``: ``counted``, ``about`` (by bytes), or ``at least``."""

    rows: int
    how: str


def measure(
    source: Source, keep: int, *, limit: int | None = None, piped: bool = False
) -> tuple[list[Row], Volume]:
    """The first ``keep`` rows of ``source`` and how many it has.

    Args:
        limit: the rows that are delivered at most.
        piped: rows come as they are made: read no more than are kept.
    """
    kept: list[Row] = []
    rows = before = 0
    for batch in source.batches():
        position, size = source.progress()
        enough = len(kept) >= keep
        if enough and piped:
            return kept, Volume(rows, "at least")
        if position > before:
            # This batch begins with the block just read: the rows so far took what was before it.
            if enough and (before > COUNT_BYTES or rows > COUNT_ROWS):
                return kept, _estimate(rows, before, size, limit)
            before = position
        elif enough and not position and rows > COUNT_ROWS:
            return kept, Volume(rows, "at least")
        rows += len(batch)
        if not enough:
            kept.extend(batch[: keep - len(kept)])
        if piped and rows > keep:
            return kept, Volume(rows, "at least")
    return kept, Volume(rows, "counted")


def _estimate(rows: int, read: int, size: int | None, limit: int | None) -> Volume:
    if size is None:
        return Volume(rows, "at least")
    total = max(rows, round(rows * size / read))
    if limit is not None and total >= limit:
        return Volume(limit, "counted")
    return Volume(_rounded(total), "about")


def _rounded(number: int) -> int:
    """Three significant digits: more would promise what an estimate cannot hold."""
    step = int("1" + "0" * max(0, len(str(number)) - 3))
    return round(number / step) * step


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
def run_check(options: CheckOptions, *, stdin: BinaryIO | None = None) -> CheckReport:
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


async def _report(options: CheckOptions, prepared: RunContext, source: RowReader) -> CheckReport:
    async with AsyncExitStack() as stack:
        target = await find_target(prepared.job, options.run.env, stack, keys=options.open)
        found = measure(source, options.rows, limit=options.run.limit, piped=prepared.piped)
        prepared.warnings += source.warnings
        found = as_asked(prepared, found[0]), found[1]
        only = (lambda _: True) if options.open else has_no_side_effect_on_open
        tools = open_job_tools(prepared.job, options.run.env, only)
        pool = await stack.enter_async_context(tools)
        return await _Look(options, prepared, target, found, pool).report()


class _Look:
    """One look; its parts share what was found so far."""

    def __init__(
        self,
        options: CheckOptions,
        prepared: RunContext,
        target: CheckTarget,
        found: tuple[list[Row], Volume],
        pool: ToolExecutor | None,
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
                add_tools(plan, self._prepared.job, servers, self._pool)
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
        return job_price(self._prepared.job, self._target.servers.kind, model)

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
            dedupe=is_deduplicated(job),
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
        count = sum(not has_no_side_effect_on_open(tool) for tool in agent.tools)
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
