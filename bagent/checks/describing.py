"""The single facts of a report, each made of what the other modules found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bagent.agents.plan import STREAM_EVERY, StagePlan
from bagent.checks.estimate import Sizes
from bagent.checks.report import EndpointReport, PromptReport, RowReport, SchemaReport
from bagent.checks.sample import Sampled, parameters
from bagent.checks.servers import Probed
from bagent.checks.tokens import BYTES_PER_TOKEN, SimTokenizer, Tokenizer
from bagent.errors import JobError
from bagent.job.mask import mask_text
from bagent.job.spec import Job
from bagent.runs.model_check import named_models
from bagent.runs.prepare import Prepared
from bagent.types import Json, Row

MOST_WARNED = 10
"""Endpoints that are warned of by name, at most."""


def backend_words(job: Job) -> str:
    """What answers, as the user wrote it."""
    address = job.backend.url if job.backend else None
    if job.hostfile is not None:
        return f"{address.kind} at {job.hostfile}" if address else str(job.hostfile)
    return mask_text(address.given, job.source.secrets) if address else ""


def input_words(job: Job) -> tuple[str, ...]:
    """The inputs as the user wrote them."""
    source = job.input
    if source is None:
        return ()
    named = [str(item) for item in (*source.path, *source.files)]
    return (*named, *(["sql"] if source.sql is not None else []))


def endpoint_report(one: Probed, secrets: frozenset[str] = frozenset()) -> EndpointReport:
    """What one endpoint told; never its headers, nor ``secrets``."""
    found = one.found
    return EndpointReport(
        name=mask_text(one.endpoint.name, secrets),
        url=mask_text(one.endpoint.url, secrets),
        alive=one.alive,
        error=one.failure.message if one.failure else None,
        models=found.models if found else (),
        context=found.context if found else None,
        version=one.version,
        engine=found.engine if found else None,
        kv_tokens=one.kv_tokens,
        not_asked=one.not_asked,
    )


def schema_report(prepared: Prepared, plan: StagePlan) -> SchemaReport | None:
    """How answers are made to fit the schema; None where there is none."""
    schema = plan.schema
    if schema is None:
        return None
    named = prepared.job.output.schema_
    return SchemaReport(
        source="inline" if isinstance(named, dict) else str(named),
        enforce=prepared.job.output.enforce,
        native=plan.settings.output is not None and not prepared.own_bodies,
        described=plan.describe and not (plan.prompt.raw or prepared.own_bodies),
        strict=schema.strict,
    )


def prompt_report(one: Sampled, sizes: Sizes, place: int) -> PromptReport:
    """One row's prompt for people."""
    tokens = sizes.tokens[place]
    return PromptReport(
        id=one.row.id,
        source=one.row.source,
        line=one.row.line,
        tokens=None if tokens is None else round(tokens),
        counted=place in sizes.counted,
        max_tokens=one.max_tokens,
        messages=one.messages,
        prompt=one.prompt,
        error=one.error,
    )


def failing(sample: Sequence[Sampled]) -> list[RowReport]:
    """The rows that cannot be read or rendered."""
    return [
        RowReport(one.row.id, one.row.source, one.row.line, one.error)
        for one in sample
        if one.error is not None
    ]


def first_parameters(sample: Sequence[Sampled], plan: StagePlan, enforce: str) -> dict[str, Json]:
    """The request of the first row that can be sent, less its prompt."""
    for one in sample:
        if one.request is not None:
            native = enforce != "prompt"
            return parameters(one.request, plan.settings.model, native_schema=native)
    return {}


def stream_words(plan: StagePlan) -> str:
    """Which requests are streamed."""
    if plan.own_bodies or plan.stream is False:
        return "never"
    if plan.stream:
        return "always"
    if plan.settings.tools:
        return "as long as tools can start before a turn ends, else a sample"
    return f"every {STREAM_EVERY}th request, for its first-token time"


def counting(tokenizer: Tokenizer | None, sizes: Sizes) -> tuple[str, str]:
    """How tokens were counted: a word for programs and words for people."""
    if tokenizer is None or not sizes.counted:
        return "characters", f"{BYTES_PER_TOKEN:g} bytes a token"
    kind = "simulated" if isinstance(tokenizer, SimTokenizer) else "tokenize"
    return kind, tokenizer.name


def brace_warnings(prepared: Prepared, rows: Sequence[Row]) -> list[str]:
    """Fields that the prompt names in single braces, which are sent as they are."""
    data = [row.data for row in rows if row.error is None]
    if prepared.prompt is None or not data:
        return []
    try:
        return prepared.prompt.check(data)
    except JobError:
        return []


def doubts(prepared: Prepared, plan: StagePlan, probed: Sequence[Probed]) -> list[str]:
    """What may go wrong although the job is right."""
    found = _endpoint_doubts(probed, plan.settings.model) + _unlisted_models(prepared, probed)
    alive = [one for one in probed if one.alive]
    contexts = {one.found.context for one in alive if one.found and one.found.context}
    if len(contexts) > 1:
        least = f"{min(contexts):,}"
        found.append(f"the endpoints differ in context length; the least, {least}, counts")
    schema = schema_report(prepared, plan)
    if schema is not None and not (schema.native or schema.described):
        found.append("the schema is neither enforced nor described: answers are only validated")
    return found


def _unlisted_models(prepared: Prepared, probed: Sequence[Probed]) -> list[str]:
    """The models that lines of a batch file name and no endpoint lists."""
    listed = [one.found.models for one in probed if one.found is not None and one.found.models]
    if prepared.job.model != "auto" or not listed or len(listed) < len(probed):
        return []
    served = {model for models in listed for model in models}
    named = named_models(prepared, [one.endpoint for one in probed])
    return [
        f"{one.where} the model {one.model}, which no endpoint lists"
        f" (--model {listed[0][0]} asks for what is served)"
        for one in named[:MOST_WARNED]
        if one.model not in served
    ]


def _endpoint_doubts(probed: Sequence[Probed], model: str | None) -> list[str]:
    """Endpoints that do not answer well, where others do; the first few by name."""
    found: list[str] = []
    if not any(one.alive for one in probed):
        return found
    for one in probed:
        if one.failure is not None:
            found.append(f"{one.endpoint.name}: {one.failure.message}")
        elif not _serves(one, model):
            serves = ", ".join(one.found.models[:5]) if one.found else ""
            hint = f" (--model {one.found.models[0]})" if one.found and one.found.models else ""
            found.append(f"{one.endpoint.name} serves {serves}, not {model}{hint}")
    more = len(found) - MOST_WARNED
    return [*found[:MOST_WARNED], f"and {more:,} more endpoints like these"] if more > 0 else found


def dead(probed: Sequence[Probed]) -> str | None:
    """Why no endpoint answers, None if one does or there is none yet."""
    if not probed or any(one.alive for one in probed):
        return None
    first = probed[0].failure
    words = first.message if first else "no answer"
    return words if len(probed) == 1 else f"none of {len(probed):,} endpoints answers: {words}"


def refused(probed: Sequence[Probed]) -> str | None:
    """The words of endpoints that all refuse the key, None if one does not."""
    failures = [one.failure for one in probed if one.alive]
    if not failures or any(one is None or one.status != 401 for one in failures):
        return None
    return failures[0].message if failures[0] else None


def short_path(path: Path, cwd: Path) -> str:
    """``path`` as people type it: from the current folder on where it is below it."""
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _serves(one: Probed, model: str | None) -> bool:
    """Whether the endpoint may serve the model: it says so, or does not say."""
    models = one.found.models if one.found else ()
    return not models or not model or model in models
