"""Check of a job, from options to a report; nothing is generated and nothing is written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Protocol
from urllib.parse import urlsplit

import msgspec

from bagent.agents.plan import StagePlan
from bagent.backend_kinds import TRAITS
from bagent.backends.http.client import Transport
from bagent.backends.http.proxies import is_loopback
from bagent.check import facts
from bagent.check.estimate import (
    ServerTokenizer,
    SimTokenizer,
    Sizes,
    Tokenizer,
    cost_report,
    count_sample,
    estimate_sizes,
    max_tokens_range,
    mean_shift,
    prompts_as_bytes,
    round_to_three_digits,
    text_bytes,
    token_report,
    too_long_rows,
)
from bagent.check.facts import describe_effects, puts_variables_into_bodies
from bagent.check.prefix_sharing import BLOCK, PACKED, count_shares, warming
from bagent.check.probe import CheckTarget, Probed, capabilities_by_name, find_target, probe_all
from bagent.check.prompt_reorder import suggest, yaml_of
from bagent.check.report import CheckReport, ReorderReport, ShareReport
from bagent.check.sample import Sampled, as_embeddings, make_requests
from bagent.duck import without_installs
from bagent.errors import ChangedError
from bagent.interrupts import run_interruptible
from bagent.job.spec.stages import SplitSpec, StageSpec
from bagent.job.templates.prompt import Prompt
from bagent.money.prices import Price
from bagent.observe.formatting import counted
from bagent.redaction import Redactor
from bagent.rows import RowReader
from bagent.runs.agents_setup import add_tools, has_no_side_effect_on_open, open_job_tools
from bagent.runs.context import RunContext, RunOptions, open_input, prepare
from bagent.runs.plan import is_deduplicated, make_plan, resolve_model
from bagent.runs.run_store import check_unchanged
from bagent.servers.pricing import job_price
from bagent.stages.expand import pieces
from bagent.stages.loop import Board
from bagent.stages.prepare import PreparedStage
from bagent.stages.row import input_response, responses
from bagent.stages.topologies import expand_topology, topology_yaml
from bagent.store.run_dir import RunDir
from bagent.types import Row

if TYPE_CHECKING:
    from bagent.tools import ToolExecutor


def first_stage_view(prepared: RunContext) -> tuple[RunContext, str | None]:
    """Return the job as its first requesting stage sees it, and a topology's stages as YAML.

    A job of one map is returned unchanged.
    """
    stage = _first_requesting_stage(prepared)
    if stage is None:
        return prepared, None
    stage_request = stage.requests[0]
    view = replace(
        prepared, job=stage_request.job, prompt=stage_request.prompt, schema=stage_request.schema
    )
    expanded = expand_topology(prepared.job)
    return view, None if prepared.job.stages else topology_yaml(expanded, prepared.job)


def _first_requesting_stage(prepared: RunContext) -> PreparedStage | None:
    return next((stage for stage in prepared.stages if stage.requests), None)


def group_rows(prepared: RunContext, rows: Sequence[Row]) -> list[Row]:
    """Return input rows as the first requesting stage gets them: alone, in pieces, on a board, or
    in groups."""
    stage = _first_requesting_stage(prepared)
    if stage is None or not rows:
        return list(rows)
    for other in prepared.stages:
        if (
            (other.name,) == stage.sources
            and isinstance(other.spec, StageSpec)
            and other.spec.split
        ):
            rows = [piece for row in rows for piece in _pieces(other.name, other.spec.split, row)]
    if stage.spec.kind == "loop":
        extra = {"board": Board(), "round": 1, "section": stage.requests[0].name}
        return [msgspec.structs.replace(row, extra=extra) for row in rows]
    if stage.spec.kind == "reduce":
        size = stage.spec.fanin or len(rows)
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [_group_row(group) for group in groups]
    return list(rows)


def _pieces(stage: str, split: SplitSpec, row: Row) -> list[Row]:
    """Return a row for each piece of its text; the row itself where it has none."""
    text = row.data.get(split.field)
    if row.error is not None or not isinstance(text, str):
        return [row]
    parts = pieces(text, split.tokens, split.overlap)
    if not parts:
        return [msgspec.structs.replace(row, error="the text to split is empty")]
    return [
        msgspec.structs.replace(
            row,
            id=f"{row.id}/{number}",
            data={**row.data, split.field: text[piece.start : piece.end]},
            extra={
                stage: {"piece": number, "of": len(parts), "start": piece.start, "end": piece.end}
            },
        )
        for number, piece in enumerate(parts)
    ]


def _group_row(group: Sequence[Row]) -> Row:
    answers = responses([input_response(row) for row in group])
    extra = {"responses": answers, "n": len(group), "level": 1}
    return msgspec.structs.replace(group[0], extra=extra)


COUNT_BYTES = 16 << 20
COUNT_ROWS = 200_000
"""Reading stops beyond either, after about a second; smaller inputs are counted completely."""


class Source(Protocol):
    """Where rows come from: a :class:`bagent.rows.RowReader`."""

    def batches(self) -> Iterable[list[Row]]:
        """Return all rows, in lists."""
        ...

    def progress(self) -> tuple[int, int | None]:
        """Return the bytes read and the total; None where it is unknown."""
        ...


class MeasuredRows:
    """A source that adds up the characters of the fields of the prompt while its rows are read.

    Args:
        fields: the fields that the prompt uses; None: all.
    """

    def __init__(self, source: Source, fields: frozenset[str] | None) -> None:
        self._source = source
        self._fields = fields
        self._rows = self._characters = 0

    def batches(self) -> Iterator[list[Row]]:
        """Yield the source's rows."""
        for batch in self._source.batches():
            self._rows += len(batch)
            self._characters += sum(map(self.characters, batch))
            yield batch

    def progress(self) -> tuple[int, int | None]:
        """Return the source's progress."""
        return self._source.progress()

    def characters(self, row: Row) -> int:
        """Return the characters of the texts that the prompt shows of one row."""
        names = row.data if self._fields is None else self._fields
        texts = (row.data.get(name) for name in names)
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def mean(self) -> float:
        """The mean over the rows that were read."""
        return self._characters / self._rows if self._rows else 0.0


class RowCount(msgspec.Struct, frozen=True):
    """Number of rows of the job."""

    rows: int
    how: str
    """``counted``, ``about`` (by bytes), or ``at least``."""


def count_rows(
    source: Source, sample_size: int, *, limit: int | None = None, piped: bool = False
) -> tuple[list[Row], RowCount]:
    """Return the first ``sample_size`` rows of ``source`` and how many it has.

    Args:
        limit: the rows that are delivered at most.
        piped: rows come as they are made: read no more than the sample.
    """
    sample: list[Row] = []
    count = previous = 0
    for batch in source.batches():
        position, size = source.progress()
        enough = len(sample) >= sample_size
        if enough and piped:
            return sample, RowCount(count, "at least")
        if position > previous:
            # This batch begins with the block just read; the rows so far took the bytes before it.
            if enough and (previous > COUNT_BYTES or count > COUNT_ROWS):
                return sample, _estimated_count(count, previous, size, limit)
            previous = position
        elif enough and not position and count > COUNT_ROWS:
            return sample, RowCount(count, "at least")
        count += len(batch)
        if not enough:
            sample.extend(batch[: sample_size - len(sample)])
        if piped and count > sample_size:
            return sample, RowCount(count, "at least")
    return sample, RowCount(count, "counted")


def _estimated_count(rows: int, read: int, size: int | None, limit: int | None) -> RowCount:
    if size is None:
        return RowCount(rows, "at least")
    total = max(rows, round(rows * size / read))
    if limit is not None and total >= limit:
        return RowCount(limit, "counted")
    return RowCount(round_to_three_digits(total), "about")


MAX_LISTED_ROWS = 20
"""Rows that will fail or do not fit which are listed."""

_HOSTED = frozenset(
    urlsplit(traits.address).netloc for traits in TRAITS.values() if traits.address is not None
)
"""Hosts without a tokenizer route."""


@dataclass(frozen=True)
class CheckOptions:
    """What to check.

    ``run`` are the options as ``bagent run`` takes them. ``rows`` is the size of the sample,
    ``prompts`` how many of its prompts are shown. ``price`` is in dollars per million tokens of
    prompts and of answers. ``open`` lets the check do what the job brings: import and start its
    tools, run its ``api_key_command`` and send its keys.
    """

    run: RunOptions
    rows: int = 200
    prompts: int = 2
    price: tuple[float, float] | None = None
    open: bool = False


@without_installs()
def run_check(options: CheckOptions, *, stdin: BinaryIO | None = None) -> CheckReport:
    """Load the job as a run does, probe its endpoints, and estimate.

    Raises:
        UsageError: the job, its input, schema, hostfile or an option is wrong.
    """
    prepared = prepare(options.run)
    # A run spools stdin; a check leaves nothing behind.
    prepared = replace(prepared, rows_config=replace(prepared.rows_config, stdin_spool=None))
    source = open_input(prepared, stdin=stdin)
    try:
        view, stages_yaml = first_stage_view(prepared)
        report = run_interruptible(_report(options, view, source))
        redact = Redactor(prepared.job.source.secrets)
        return msgspec.structs.replace(
            report,
            changed=_change_message(prepared),
            stages=stages_yaml,
            effects=describe_effects(prepared.job, options.run.env),
            model=redact.optional(report.model),
            parameters=redact.values(report.parameters),
            warnings=tuple(map(redact, report.warnings)),
        )
    finally:
        source.close()


def _change_message(prepared: RunContext) -> str | None:
    """Return why the next start refuses to continue the run; None where it does not."""
    directory, fingerprints = RunDir(prepared.run_dir), prepared.fingerprints()
    try:
        check_unchanged(directory, fingerprints, "refuse", prepared.part)
    except ChangedError as error:
        return error.message
    return None


async def _report(options: CheckOptions, prepared: RunContext, source: RowReader) -> CheckReport:
    async with AsyncExitStack() as stack:
        target = await find_target(prepared.job, options.run.env, stack, keys=options.open)
        fields = None if prepared.prompt is None else prepared.prompt.fields
        reading = MeasuredRows(source, fields)
        rows, count = count_rows(
            reading, options.rows, limit=options.run.limit, piped=prepared.piped
        )
        prepared.warnings.extend(source.warnings)
        input_rows, rows = rows, group_rows(prepared, rows)
        same = len(rows) == len(input_rows) and all(map(operator.is_, rows, input_rows))
        measured = reading if same else None
        accept = (lambda _: True) if options.open else has_no_side_effect_on_open
        tools = open_job_tools(prepared.job, options.run.env, accept)
        pool = await stack.enter_async_context(tools)
        check = _Check(options, prepared, target, rows, len(input_rows), count, pool, measured)
        return await check.report()


class _Check:
    """One check; its methods share what was found so far."""

    def __init__(
        self,
        options: CheckOptions,
        prepared: RunContext,
        target: CheckTarget,
        rows: list[Row],
        looked_at: int,
        row_count: RowCount,
        pool: ToolExecutor | None,
        measured: MeasuredRows | None,
    ) -> None:
        self._measured = measured
        """The rows that were read; None where prompts are not made of single rows."""
        self._pool = pool
        self._options = options
        self._prepared = prepared
        self._target = target
        self._rows, self._looked_at, self._row_count = rows, looked_at, row_count

    async def report(self) -> CheckReport:
        """Return the complete report."""
        transport = Transport()
        servers = self._target.servers
        backend = servers.make_backend(transport, enforce=self._prepared.job.output.enforce)
        try:
            probed = await probe_all(backend, transport, self._target)
            model = self._model(probed)
            plan = make_plan(
                self._prepared, self._target.servers, model, capabilities_by_name(probed)
            )
            if self._pool is not None:
                add_tools(plan, self._prepared.job, servers, self._pool)
            sample = make_requests(plan, self._rows)
            stage = _first_requesting_stage(self._prepared)
            if stage is not None and stage.spec.kind == "embed":
                plan.stream, sample = False, as_embeddings(sample)
            tokenizer = self._tokenizer(transport, probed, model)
            counted = await count_sample(sample, tokenizer) if tokenizer else {}
        finally:
            await backend.close()
        report = self._make_report(probed, plan, sample, estimate_sizes(sample, counted), tokenizer)
        return msgspec.structs.replace(
            report,
            opened=self._options.open,
            tools=tuple(plan.settings.tools),
            unserved=facts.unserved_model(
                self._prepared, probed, self._target.model if servers.simulated else None
            ),
            unsendable=facts.unsendable_reason(sample),
            hosted=TRAITS[servers.kind].hosted,
            without_ids=any(row.id == f"{row.key:016x}" for row in self._rows[:1]),
        )

    def _model(self, probed: Sequence[Probed]) -> str | None:
        job = self._prepared.job
        if self._prepared.own_bodies and job.model == "auto":
            return None
        if job.model != "auto" or self._target.planned is not None:
            return self._target.model if job.model == "auto" else job.model
        if not any(result.capabilities is not None for result in probed):
            return None
        return resolve_model(job, capabilities_by_name(probed))

    def _price(self, plan: StagePlan) -> Price | None:
        """Return the price of the options, else the job's own, else the known price of its
        model."""
        price, model = self._options.price, plan.settings.model
        if price is not None:
            return Price("", model or "", *price, source="--price")
        return job_price(self._prepared.job, self._target.servers.kind, model)

    def _tokenizer(
        self, transport: Transport, probed: Sequence[Probed], model: str | None
    ) -> Tokenizer | None:
        if self._target.planned is not None:
            return SimTokenizer() if self._target.servers.simulated else None
        if TRAITS[self._target.servers.kind].protocol != "openai":
            return None  # the server might take the request for a call
        for result in probed:
            loopback = is_loopback(urlsplit(result.endpoint.url).hostname or "")
            may_send = self._options.open or (
                loopback and not puts_variables_into_bodies(self._prepared.job)
            )
            if result.capabilities is not None and result.endpoint.name not in _HOSTED and may_send:
                return ServerTokenizer(transport, result.endpoint, model)
        return None

    def _make_report(
        self,
        probed: Sequence[Probed],
        plan: StagePlan,
        sample: Sequence[Sampled],
        sizes: Sizes,
        tokenizer: Tokenizer | None,
    ) -> CheckReport:
        prepared, options, api = self._prepared, self._options, self._target.servers.api
        job, context = prepared.job, plan.budget.context
        made = len(self._rows) / self._looked_at if self._looked_at else 1.0
        least, most = self._requests_of_a_row(probed)
        answers = self._row_count.rows * job.answers * made
        requests = answers * least
        how = facts.counting_method(tokenizer, sizes)
        shift = self._mean_shift(sample, sizes)
        tokens = token_report(sample, sizes, requests, how, most=answers * most, shift=shift)
        sharing = self._share_report(probed, sample, sizes)
        automatic = job.sampling.max_tokens is None and not prepared.own_bodies
        long_rows = too_long_rows(sample, sizes, context)
        failing_rows = facts.failing_rows(sample)
        return CheckReport(
            job=job.name,
            file=str(options.run.job),
            backend=facts.backend_text(job),
            planned=self._target.planned,
            endpoints=tuple(facts.endpoint_report(result, job.source.secrets) for result in probed),
            model=plan.settings.model,
            model_auto=job.model == "auto",
            context=context,
            inputs=facts.input_names(job),
            rows=self._row_count.rows,
            rows_how=self._row_count.how,
            looked_at=round(len(sample) / (made or 1.0)),
            answers=job.answers,
            max_tokens=max_tokens_range(sample, automatic=automatic),
            schema=facts.schema_report(prepared, plan),
            dedupe=is_deduplicated(job),
            stream=facts.stream_text(plan, job, sample),
            batching=facts.batching_text(job),
            results=facts.short_path(prepared.run_dir, options.run.cwd),
            parameters=facts.first_parameters(sample, plan, job.output.enforce, api),
            prompts=tuple(
                facts.prompt_report(result, sizes, index)
                for index, result in enumerate(sample[: options.prompts])
            ),
            tokens=tokens,
            cost=cost_report(
                self._price(plan), tokens, round(requests), sharing.by_all if sharing else 0.0
            ),
            sharing=sharing,
            reorder=self._reorder(plan, sample, sizes),
            failing=tuple(failing_rows[:MAX_LISTED_ROWS]),
            failing_count=len(failing_rows),
            too_long=tuple(long_rows[:MAX_LISTED_ROWS]),
            too_long_count=len(long_rows),
            warnings=tuple(dict.fromkeys(self._warnings(plan, probed))),
            dead=facts.dead_reason(probed),
            refused=facts.refused_reason(probed),
        )

    def _mean_shift(self, sample: Sequence[Sampled], sizes: Sizes) -> float:
        """Return by how many tokens the mean prompt of all rows exceeds that of the sample."""
        if self._measured is None:
            return 0.0
        characters = [self._measured.characters(sampled.row) for sampled in sample]
        return mean_shift(characters, sizes, self._measured.mean)

    def _requests_of_a_row(self, probed: Sequence[Probed]) -> tuple[int, int]:
        """Return how often the first requesting stage asks about a row at least and at most."""
        stage, agent = _first_requesting_stage(self._prepared), self._prepared.job.agent
        turns = agent.max_turns if agent is not None and agent.tools else 1
        if stage is None or not isinstance(stage.spec, StageSpec):
            return 1, turns
        if stage.spec.kind == "loop":
            sections = len(stage.requests)
            return sections, sections * stage.spec.max_rounds * turns
        copies = len(probed) if stage.spec.kind == "broadcast" else 1
        return copies, copies * turns

    def _of_a_board(self) -> list[str]:
        """Return the warning about prompts that grow."""
        stage = _first_requesting_stage(self._prepared)
        if stage is None or stage.spec.kind != "loop":
            return []
        return [
            f"stage {stage.name}: the prompts are those of section {stage.requests[0].name} with an"
            " empty board, and grow with it"
        ]

    def _warnings(self, plan: StagePlan, probed: Sequence[Probed]) -> list[str]:
        return [
            *self._prepared.warnings,
            *self._missing_key(),
            *facts.brace_warnings(self._prepared, self._rows),
            *facts.empty_cells(self._prepared, self._rows),
            *facts.warnings(self._prepared, plan, probed),
            *self._not_opened(),
            *self._of_a_board(),
        ]

    def _missing_key(self) -> list[str]:
        name = self._target.missing_key
        return [f"{name} is not set, and a run needs it: export {name}=..."] if name else []

    def _not_opened(self) -> list[str]:
        """Return the warning about tools whose definitions are not counted."""
        agent = self._prepared.job.agent
        if self._options.open or agent is None:
            return []
        count = sum(not has_no_side_effect_on_open(tool) for tool in agent.tools)
        if not count:
            return []
        return [f"{counted(count, 'tool')} not opened: definitions are not counted (--open does)"]

    # --- prefix sharing -------------------------------------------------------------------------

    def _share_report(
        self, probed: Sequence[Probed], sample: Sequence[Sampled], sizes: Sizes
    ) -> ShareReport | None:
        prompts, ratio = prompts_as_bytes(sample, sizes)
        shares = count_shares(prompts, ratio)
        if shares is None:
            return None
        job = self._prepared.job
        calls = self._row_count.rows * job.answers
        caches = [result.kv_tokens for result in probed if result.kv_tokens]
        smallest_cache = min(caches, default=None)
        longest = max((sampled.max_tokens or 0 for sampled in sample), default=0)
        own_tokens = shares.prompt - shares.by_all + longest
        fits = (
            None
            if smallest_cache is None or own_tokens <= 0
            else int((smallest_cache - shares.by_all) / own_tokens)
        )
        return ShareReport(
            block=BLOCK,
            rows=shares.rows,
            exact=ratio == PACKED and bool(sizes.counted),
            prompt=round(shares.prompt, 1),
            by_all=round(shares.by_all, 1),
            by_most=round(shares.by_most, 1),
            by_some=round(shares.by_some, 1),
            by_none=round(shares.by_none, 1),
            kv_tokens=smallest_cache,
            kv_rows=None if fits is None else max(0, fits),
            warming=warming(job, self._target.servers, shares.by_all, calls),
        )

    def _reorder(
        self, plan: StagePlan, sample: Sequence[Sampled], sizes: Sizes
    ) -> ReorderReport | None:
        job = self._prepared.job
        rows = [sampled.row for sampled in sample if sampled.request is not None]
        if job.prompt is None or self._prepared.own_bodies:
            return None

        def score(prompt: Prompt) -> float:
            other = msgspec.structs.replace(plan, prompt=prompt)
            texts = text_bytes(make_requests(other, rows), sizes.text_ratio)
            shares = count_shares(texts, sizes.text_ratio)
            return shares.by_all if shares else 0.0

        suggestion = suggest(job, [row.data for row in rows], score, float(BLOCK))
        if suggestion is None:
            return None
        return ReorderReport(
            gain=round(suggestion.gain),
            gain_total=round(suggestion.gain * self._row_count.rows * job.answers),
            points_back=suggestion.points_back,
            yaml=yaml_of(suggestion, job.prompt),
        )
