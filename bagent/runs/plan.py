"""From a checked job and the servers found to what the engine and the fleet are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.agents.plan import StagePlan
from bagent.agents.token_budget import TokenBudget
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
    """Stands for the prompt where rows are request bodies themselves."""

    raw = False

    def render(
        self, data: Mapping[str, object], extra: Mapping[str, object] | None = None
    ) -> list[dict[str, object]]:
        """Never called: such rows are sent as they are."""
        raise TypeError("request bodies have no template")

    def render_raw(
        self, data: Mapping[str, object], extra: Mapping[str, object] | None = None
    ) -> str:
        """Never called either."""
        raise TypeError("request bodies have no template")


def resolve_model(job: Job, known: Mapping[str, Capabilities]) -> str:
    """The model to ask for: the job's, or for ``auto`` what all endpoints serve.

    Raises:
        JobError: ``auto``, and the endpoints do not tell or do not agree.
    """
    if job.model != "auto":
        return job.model
    served = {found.models[0]: name for name, found in known.items() if found.models}
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
        named = job_models(job, stage_path("map", prepared.prompt))
    elif config.sample is None and config.where is None and job.input:
        paths = [Path(item.path) for item in job.input.path if not item.is_glob]
        named = batch_models(paths, config.limit)
    else:
        named = []
    return named + hostfile_models(endpoints, job, stage_path("map", prepared.prompt))


def make_plan(
    prepared: RunContext,
    servers: Servers,
    model: str | None,
    known: Mapping[str, Capabilities],
    *,
    name: str = STAGE,
) -> StagePlan:
    """The plan of a stage that asks; ``prepared`` is the job as that stage sees it."""
    job, schema = prepared.job, prepared.schema
    fields = job.sampling.request_fields()
    max_tokens = fields.pop("max_tokens", None)
    extra = {key: fields.pop(key) for key in list(job.sampling.extra) if key in fields}
    extra.update(tier_fields(job, servers.kind))
    output = None
    if schema is not None and job.output.enforce != "prompt":
        output = OutputFormat("answer", schema.text, schema.strict)
    contexts = [found.context for found in known.values() if found.context]
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
        stream=_streamed(job, servers),
        answers=job.answers,
        row_seconds=job.limits.row,
        own_bodies=prepared.own_bodies,
        price=job_pricer(job, servers.kind, model),
    )


def tier_fields(job: Job, kind: str) -> dict[str, Json]:
    """The field that asks for the job's ``batching.service_tier``, in the words of each API.

    Raises:
        JobError: servers of this kind have no tiers.
    """
    tier = job.batching.service_tier
    if tier is None or job.batching.mode == "provider":
        return {}
    if kind == "bedrock":
        return {"serviceTier": {"type": tier}}
    if kind in ("openai", "anthropic", "compatible"):
        return {"service_tier": tier}
    raise JobError(
        f"batching.service_tier: servers of the kind {kind} have no tiers",
        hint="leave it out",
        at=job.source.position(("batching", "service_tier")),
    )


def _streamed(job: Job, servers: Servers) -> bool | None:
    """Whether calls are streamed; None for a sample. Where calls may share requests the fleet
    takes the sample, of those that go alone."""
    if job.batching.mode == "provider":
        return False
    if job.stream != "auto":
        return bool(job.stream)
    return None if make_batch_size_rule(job, servers).single else False


def is_deduplicated(job: Job) -> bool:
    """Whether equal requests are sent once: by default where answers can not differ."""
    if job.dedupe == "auto":
        return job.sampling.temperature == 0
    return bool(job.dedupe)


def endpoint_summary(
    endpoints: Sequence[Endpoint], known: Mapping[str, Capabilities]
) -> list[dict[str, object]]:
    """The endpoints for run.json: never headers or keys."""
    return [
        {
            "name": endpoint.name,
            "url": endpoint.url,
            "models": list(known[endpoint.name].models) if endpoint.name in known else None,
            "context": known[endpoint.name].context if endpoint.name in known else None,
        }
        for endpoint in endpoints
    ]
