"""From a checked job and the servers found to what the engine and the fleet are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from bagent.agents.budget import TokenBudget
from bagent.agents.plan import StagePlan
from bagent.backends.base import Backend, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, OutputFormat
from bagent.errors import JobError
from bagent.fleet.account import Account
from bagent.fleet.dispatcher import Fleet, FleetConfig
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limiter import InFlightLimit
from bagent.fleet.retry import RetryPolicy
from bagent.runs.endpoints import Servers
from bagent.runs.prepare import STAGE, Prepared
from bagent.types import Attempt

if TYPE_CHECKING:
    from bagent.job.spec import Job

AUTO_START = 16
AUTO_CEILING = 256
"""In flight per endpoint where the user names no number: where vLLM's own batches end."""

NO_CAP = 1e9
"""Seconds that stand for no cap on a wait that a server asks for."""

SEED = 20_240_229
"""Seed of the spread of retries: runs are repeatable, and no two waits are alike anyway."""


class NoTemplate:
    """Stands for the prompt where rows are request bodies themselves."""

    raw = False

    def render(self, data: Mapping[str, object]) -> list[dict[str, object]]:
        """Never called: such rows are sent as they are."""
        raise TypeError("request bodies have no template")

    def render_raw(self, data: Mapping[str, object]) -> str:
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


def make_plan(
    prepared: Prepared, servers: Servers, model: str | None, known: Mapping[str, Capabilities]
) -> StagePlan:
    """The stage plan of a job with one ``map`` stage."""
    job, schema = prepared.job, prepared.schema
    fields = job.sampling.request_fields()
    max_tokens = fields.pop("max_tokens", None)
    extra = {key: fields.pop(key) for key in list(job.sampling.extra) if key in fields}
    output = None
    if schema is not None and job.output.enforce != "prompt":
        output = OutputFormat("answer", schema.text, schema.strict)
    contexts = [found.context for found in known.values() if found.context]
    context = servers.context or min(contexts, default=None)
    describe = job.output.describe
    return StagePlan(
        name=STAGE,
        prompt=prepared.prompt or NoTemplate(),
        settings=CallSettings(model, fields, extra, output=output, max_tokens=max_tokens),
        schema=schema,
        budget=TokenBudget(context),
        describe=schema is not None
        and (describe == "always" or (describe == "auto" and (servers.own or output is None))),
        reasks=job.output.retries,
        grow=job.output.grow,
        stream=None if job.stream == "auto" else bool(job.stream),
        answers=job.answers,
        row_seconds=job.limits.row,
        own_bodies=prepared.own_bodies,
    )


def deduped(job: Job) -> bool:
    """Whether equal requests are sent once: by default where answers can not differ."""
    if job.dedupe == "auto":
        return job.sampling.temperature == 0
    return bool(job.dedupe)


def make_timeouts(job: Job) -> Timeouts:
    """The time limits of one request."""
    limits = job.limits.timeout
    return Timeouts(limits.connect, limits.first_token, limits.idle, limits.total)


def make_fleet(
    job: Job,
    servers: Servers,
    backend: Backend,
    *,
    handles: int,
    on_attempt: Callable[[Attempt], None],
    notice: Callable[[str], None],
) -> Fleet:
    """The fleet over the servers; ``handles`` is how many connections may be open."""
    limits = job.limits
    wanted = limits.concurrency
    most = AUTO_CEILING * len(servers.endpoints) if wanted == "auto" else int(wanted)
    if most > handles:
        if wanted != "auto":
            notice(
                f"only {handles} connections can be open (ulimit -n);"
                f" concurrency is {handles}, not {most}"
            )
        most = handles
    config = FleetConfig(
        concurrency=most,
        timeouts=make_timeouts(job),
        retry=RetryPolicy(retries=limits.retries, told_longest=limits.retry_after_max or NO_CAP),
        lookahead=min(256, max(16, most)),
    )
    states = make_states(job, servers, most)
    return Fleet(
        states,
        backend,
        config,
        on_attempt=on_attempt,
        notice=notice,
        random=Random(SEED),
    )


def make_states(job: Job, servers: Servers, most: int) -> list[EndpointState]:
    """The endpoints with their limits; what one account may be asked is shared by all of its."""
    limits = job.limits
    accounts: dict[str, Account] = {}
    states = []
    for endpoint in servers.endpoints:
        account = accounts.get(endpoint.account)
        if account is None:
            account = Account(limits.rpm, limits.tpm, limits.retry_after_max or NO_CAP)
            accounts[endpoint.account] = account
        weight = float(endpoint.tags.get("weight") or endpoint.tags.get("gpus") or 1)
        states.append(
            EndpointState(
                endpoint, _endpoint_limit(job, servers, endpoint, most), account, weight=weight
            )
        )
    return states


def _endpoint_limit(job: Job, servers: Servers, endpoint: Endpoint, most: int) -> InFlightLimit:
    per_endpoint, concurrency = job.limits.per_endpoint, job.limits.concurrency
    if per_endpoint != "auto":
        return InFlightLimit(int(per_endpoint), int(per_endpoint), growing=False)
    if concurrency != "auto":
        return InFlightLimit(most, most, growing=False)
    if servers.slots is not None:
        # More than the slots of an embedded engine would only wait inside it.
        return InFlightLimit(servers.slots * 2, servers.slots * 2, growing=False)
    return InFlightLimit(AUTO_START, AUTO_CEILING)


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
