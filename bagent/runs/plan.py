"""Plans of stages: what a checked job requests from the servers that were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan, TokenBudget
from bagent.backend_kinds import TRAITS, BackendKind
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, OutputFormat
from bagent.errors import JobError
from bagent.runs.context import STAGE, RunContext
from bagent.runs.environment import read_environment
from bagent.servers.fleet_factory import make_batch_size_rule
from bagent.servers.pricing import job_pricer
from bagent.servers.resolve import Servers
from bagent.servers.startup_probe import (
    RequestedModel,
    batch_models,
    hostfile_models,
    job_models,
    stage_path,
)
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


class NoTemplate:
    """The prompt of rows that are request bodies themselves."""

    raw = False

    def render(
        self, data: Mapping[str, object], extra: Mapping[str, object] | None = None
    ) -> list[dict[str, object]]:
        """Raise: such rows are sent as they are."""
        raise TypeError("request bodies have no template")

    def render_raw(
        self, data: Mapping[str, object], extra: Mapping[str, object] | None = None
    ) -> str:
        """Raise: such rows are sent as they are."""
        raise TypeError("request bodies have no template")


def resolve_model(job: Job, capabilities: Mapping[str, Capabilities]) -> str:
    """Return the job's model, or for ``auto`` the one that all endpoints serve.

    Raises:
        JobError: the model is ``auto`` and the endpoints list no model or differ.
    """
    if job.model != "auto":
        return job.model
    served = {item.models[0]: name for name, item in capabilities.items() if item.models}
    if not served:
        raise JobError(
            "model: auto, but no endpoint tells what it serves (/v1/models)",
            hint="write model: NAME",
        )
    if len(served) > 1:
        listed = ", ".join(f"{name} serves {model}" for model, name in sorted(served.items()))
        raise JobError(f"model: auto, but the endpoints differ: {listed}", hint="write model: NAME")
    return next(iter(served))


def requested_models(prepared: RunContext, endpoints: Sequence[Endpoint]) -> list[RequestedModel]:
    """Return the models that a job without stages, its batch file and its hostfile name."""
    job, config = prepared.job, prepared.rows_config
    if not prepared.own_bodies or job.model != "auto":
        models = job_models(job, stage_path("map", prepared.prompt))
    elif config.sample is None and config.where is None and job.input:
        paths = [item.local for item in job.input.path if item.local is not None]
        models = batch_models(paths, config.limit)
    else:
        models = []
    return models + hostfile_models(endpoints, job, stage_path("map", prepared.prompt))


def make_plan(
    prepared: RunContext,
    servers: Servers,
    model: str | None,
    capabilities: Mapping[str, Capabilities],
    *,
    name: str = STAGE,
) -> StagePlan:
    """Make the plan of a stage with requests; ``prepared`` is the job as that stage sees it."""
    job, schema = prepared.job, prepared.schema
    fields = job.sampling.request_fields()
    max_tokens = fields.pop("max_tokens", None)
    extra = {key: fields.pop(key) for key in list(job.sampling.extra) if key in fields}
    if not job.batching.in_batches:
        extra.update(tier_fields(job, servers.kind))
    output = None
    if schema is not None and job.output.enforce != "prompt":
        output = OutputFormat("answer", schema.text, schema.strict)
    contexts = [item.context for item in capabilities.values() if item.context]
    preset = read_environment(prepared.options.env).model_max_context
    contexts += [preset] if preset else []
    context = servers.context or min(contexts, default=None)
    describe = job.output.describe
    return StagePlan(
        name=name,
        prompt=prepared.prompt or NoTemplate(),
        settings=CallSettings(model, fields, extra, output=output, max_tokens=max_tokens),
        schema=schema,
        budget=TokenBudget(context),
        describe=schema is not None
        and (describe == "always" or (describe == "auto" and (servers.own or output is None))),
        reasks=job.output.retries,
        grow=job.output.grow,
        truncated=job.output.truncated,
        stream=_stream_mode(job, servers),
        answers=job.answers,
        row_seconds=job.limits.row,
        own_bodies=prepared.own_bodies,
        images=prepared.prompt if prepared.prompt and prepared.prompt.reads_buckets else None,
        price=job_pricer(job, servers.kind, model),
    )


def tier_fields(job: Job, kind: BackendKind) -> dict[str, Json]:
    """Return the request field for the job's ``batching.service_tier`` in each API's form.

    Raises:
        JobError: servers of this kind have no tiers.
    """
    tier = job.batching.service_tier
    if tier is None or job.batching.mode == "provider":
        return {}
    match TRAITS[kind].service_tier:
        case (name,):
            return {name: tier}
        case (name, field):
            return {name: {field: tier}}
    raise JobError(
        f"batching.service_tier: servers of the kind {kind} have no tiers",
        hint="leave it out",
        at=job.source.position(("batching", "service_tier")),
    )


def _stream_mode(job: Job, servers: Servers) -> bool | None:
    """Return whether calls are streamed; None streams a sample.

    Where calls may share requests, the fleet picks the sample among those that do not.
    """
    if job.batching.in_batches:
        return False
    if job.stream != "auto":
        return bool(job.stream)
    return None if make_batch_size_rule(job, servers).single else False


def is_deduplicated(job: Job) -> bool:
    """Return whether equal requests are sent once; by default where answers cannot differ."""
    if job.dedupe == "auto":
        return job.sampling.temperature == 0
    return bool(job.dedupe)


def endpoint_summary(
    endpoints: Sequence[Endpoint], capabilities: Mapping[str, Capabilities]
) -> list[dict[str, object]]:
    """Return the endpoints for run.json, without headers and keys."""
    summary: list[dict[str, object]] = []
    for endpoint in endpoints:
        item = capabilities.get(endpoint.name)
        models, context = (None, None) if item is None else (list(item.models), item.context)
        summary.append(
            {"name": endpoint.name, "url": endpoint.url, "models": models, "context": context}
        )
    return summary
