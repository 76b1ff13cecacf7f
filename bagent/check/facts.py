"""Single facts of a check's report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bagent.agents.plan import STREAM_EVERY, StagePlan
from bagent.batches.scheduler import SendingTimes
from bagent.check.estimate import BYTES_PER_TOKEN, SimTokenizer, Sizes, Tokenizer
from bagent.check.probe import Probed
from bagent.check.report import (
    EffectsReport,
    EndpointReport,
    ExecuteReport,
    PromptReport,
    RowReport,
    SchemaReport,
    SendReport,
)
from bagent.check.sample import Sampled, parameters
from bagent.errors import JobError, UsageError
from bagent.fleet.hostfile import read_hostfile
from bagent.job.redaction import mask_text
from bagent.job.spec.job import Job, KeyPath, stage_parts
from bagent.observe.formatting import counted
from bagent.runs.context import RunContext
from bagent.runs.plan import requested_models
from bagent.runs.prompt_fields import EMPTY, required_columns
from bagent.servers.resolve import key_variables, server_address
from bagent.text.durations import time_by
from bagent.types import Json, Row

if TYPE_CHECKING:
    from bagent.job.spec.agent import AgentSpec, ToolSpec

MAX_WARNED = 10
"""Endpoints that warnings name."""


def backend_text(job: Job) -> str:
    """Return what answers, as the user wrote it."""
    address = job.backend.url if job.backend else None
    if job.hostfile is not None:
        return f"{address.kind} at {job.hostfile}" if address else str(job.hostfile)
    return mask_text(address.text, job.source.secrets) if address else ""


def input_names(job: Job) -> tuple[str, ...]:
    """Return the inputs as the user wrote them."""
    source = job.input
    if source is None:
        return ()
    named = [str(item) for item in (*source.path, *source.files)]
    return (*named, *(["sql"] if source.sql is not None else []))


def endpoint_report(result: Probed, secrets: frozenset[str] = frozenset()) -> EndpointReport:
    """Return what one endpoint reported, without its headers and ``secrets``."""
    capabilities = result.capabilities
    return EndpointReport(
        name=mask_text(result.endpoint.name, secrets),
        url=mask_text(result.endpoint.url, secrets),
        alive=result.alive,
        error=result.failure.message if result.failure else None,
        models=capabilities.models if capabilities else (),
        context=capabilities.context if capabilities else None,
        version=result.version,
        engine=capabilities.engine if capabilities else None,
        kv_tokens=result.kv_tokens,
        not_asked=result.not_asked,
    )


def schema_report(prepared: RunContext, plan: StagePlan) -> SchemaReport | None:
    """Return how answers are made to fit the schema; None without one."""
    schema = plan.schema
    if schema is None:
        return None
    schema_spec = prepared.job.output.schema_
    return SchemaReport(
        source="inline" if isinstance(schema_spec, dict) else str(schema_spec),
        enforce=prepared.job.output.enforce,
        native=plan.settings.output is not None and not prepared.own_bodies,
        described=plan.describe and not (plan.prompt.raw or prepared.own_bodies),
        strict=schema.strict,
    )


def prompt_report(sampled: Sampled, sizes: Sizes, index: int) -> PromptReport:
    """Return the report on one row's prompt."""
    tokens = sizes.tokens[index]
    return PromptReport(
        id=sampled.row.id,
        source=sampled.row.source,
        line=sampled.row.line,
        tokens=None if tokens is None else round(tokens),
        counted=(index in sizes.counted or sampled.token_ids > 0) and not sampled.tools_size,
        max_tokens=sampled.max_tokens,
        messages=sampled.messages,
        prompt=sampled.prompt,
        error=sampled.error,
    )


def failing_rows(sample: Sequence[Sampled]) -> list[RowReport]:
    """Return the rows that cannot be read or rendered."""
    return [
        RowReport(sampled.row.id, sampled.row.source, sampled.row.line, sampled.error)
        for sampled in sample
        if sampled.error is not None
    ]


def first_parameters(
    sample: Sequence[Sampled], plan: StagePlan, enforce: str, api: str
) -> dict[str, Json]:
    """Return the first request that can be sent, without its prompt."""
    for sampled in sample:
        if sampled.request is not None:
            native = enforce != "prompt"
            return parameters(sampled.request, plan.settings.model, native_schema=native, api=api)
    return {}


def stream_text(plan: StagePlan, job: Job, sample: Sequence[Sampled]) -> str:
    """Return which requests are streamed."""
    generates = any(sampled.generates for sampled in sample)
    if plan.stream is False and job.stream == "auto" and generates and not job.batching.in_batches:
        return f"every {STREAM_EVERY}th request of one row, for its first-token time"
    if plan.own_bodies or plan.stream is False:
        return "never"
    if plan.stream:
        return "always"
    if plan.settings.tools:
        return "as long as tools can start before a turn ends, else a sample"
    return f"every {STREAM_EVERY}th request, for its first-token time"


def batching_text(job: Job) -> str:
    """Return what ``batching: {mode: cheapest}`` does when; empty without it."""
    by = job.batching.by
    if by is None:
        return ""
    start = time.time()
    times = SendingTimes.of(start, time_by(by, start))
    return f"started now: {times.describe(job.batching.service_tier)}"


def counting_method(tokenizer: Tokenizer | None, sizes: Sizes) -> tuple[str, str]:
    """Return how tokens were counted, for programs and for people."""
    if tokenizer is None or not sizes.counted:
        return "characters", f"{BYTES_PER_TOKEN:g} bytes a token"
    kind = "simulated" if isinstance(tokenizer, SimTokenizer) else "tokenize"
    return kind, tokenizer.name


def brace_warnings(prepared: RunContext, rows: Sequence[Row]) -> list[str]:
    """Return the warnings about fields in single braces, which are sent as they are."""
    data = [row.data for row in rows if row.error is None]
    if prepared.prompt is None or not data:
        return []
    try:
        return prepared.prompt.check(data)
    except JobError:
        return []


def empty_cells(prepared: RunContext, rows: Sequence[Row]) -> list[str]:
    """Return for each column of the prompt how many of the sampled rows have no value in it.

    Columns that a condition of the template tests are left out.
    """
    readable = [row for row in rows if row.error is None]
    messages = []
    for name in required_columns(prepared.prompt):
        empty = [row for row in readable if row.data.get(name, "-") in EMPTY]
        if empty:
            count = f"{len(empty):,} of {counted(len(readable), 'row')}"
            verb = "has" if len(empty) == 1 else "have"
            first = f"{empty[0].source}:{empty[0].line}"
            messages.append(f"{count} {verb} an empty {name}, the first at {first}")
    return messages


def warnings(prepared: RunContext, plan: StagePlan, probed: Sequence[Probed]) -> list[str]:
    """Return what may go wrong although the job is valid."""
    messages = _endpoint_warnings(probed, plan.settings.model)
    if prepared.job.model == "auto":
        messages += _unlisted_models(prepared, probed)
    alive = [result for result in probed if result.alive]
    contexts = {
        result.capabilities.context
        for result in alive
        if result.capabilities and result.capabilities.context
    }
    if len(contexts) > 1:
        least = f"{min(contexts):,}"
        messages.append(f"the endpoints differ in context length; the least, {least}, counts")
    schema = schema_report(prepared, plan)
    if schema is not None and not (schema.native or schema.described):
        messages.append("the schema is neither enforced nor described: answers are only validated")
    return messages


def _unlisted_models(
    prepared: RunContext, probed: Sequence[Probed], simulated: str | None = None
) -> list[str]:
    """Return the models that the job or lines of a batch file name and no endpoint lists."""
    listed = [
        result.capabilities.models
        for result in probed
        if result.capabilities is not None and result.capabilities.models
    ]
    if simulated is not None:
        listed.append((simulated,))
    if not listed or len(listed) < len(probed):
        return []
    served = {model for models in listed for model in models}
    named = requested_models(prepared, [result.endpoint for result in probed])
    return [
        f"{use.where} the model {use.model}, which no endpoint lists"
        f" (--model {listed[0][0]} asks for what is served)"
        for use in named[:MAX_WARNED]
        if use.model not in served
    ]


_REFUSE_OTHER_MODELS = frozenset({"vllm", "nvidia", "bagent-sim"})
"""Owners of models in the lists of servers that refuse requests for a model not listed."""


def unserved_model(
    prepared: RunContext, probed: Sequence[Probed], simulated: str | None
) -> str | None:
    """Return why no endpoint takes a model of the job; None if one does, or might.

    Args:
        prepared: the job.
        probed: its endpoints.
        simulated: the model of simulated engines, which a check does not start.
    """
    engines = {result.capabilities.engine for result in probed if result.capabilities is not None}
    if not engines <= _REFUSE_OTHER_MODELS:
        return None
    return next(iter(_unlisted_models(prepared, probed, simulated)), None)


def unsendable_reason(sample: Sequence[Sampled]) -> str | None:
    """Return why no row of the sample can be sent; None if one can, or there is none."""
    failing = failing_rows(sample)
    if not failing or len(failing) < len(sample):
        return None
    first = failing[0]
    rows = counted(len(failing), "row")
    return f"none of {rows} can be sent: {first.source}:{first.line}: {first.error}"


def _endpoint_warnings(probed: Sequence[Probed], model: str | None) -> list[str]:
    """Return warnings about endpoints that do not answer well where others do."""
    messages: list[str] = []
    if not any(result.alive for result in probed):
        return messages
    for result in probed:
        if result.failure is not None:
            messages.append(f"{result.endpoint.name}: {result.failure.message}")
        elif not _serves(result, model):
            serves = ", ".join(result.capabilities.models[:5]) if result.capabilities else ""
            hint = (
                f" (--model {result.capabilities.models[0]})"
                if result.capabilities and result.capabilities.models
                else ""
            )
            messages.append(f"{result.endpoint.name} serves {serves}, not {model}{hint}")
    more = len(messages) - MAX_WARNED
    return (
        [*messages[:MAX_WARNED], f"and {more:,} more endpoints like these"]
        if more > 0
        else messages
    )


def dead_reason(probed: Sequence[Probed]) -> str | None:
    """Return why no endpoint answers; None if one does or there is none yet."""
    if not probed or any(result.alive for result in probed):
        return None
    first = probed[0].failure
    message = first.message if first else "no answer"
    return message if len(probed) == 1 else f"none of {len(probed):,} endpoints answers: {message}"


def refused_reason(probed: Sequence[Probed]) -> str | None:
    """Return the message of endpoints that all refuse the key; None if one does not."""
    failures = [result.failure for result in probed if result.alive]
    if not failures or any(result is None or result.status != 401 for result in failures):
        return None
    return failures[0].message if failures[0] else None


def short_path(path: Path, cwd: Path) -> str:
    """Return ``path`` relative to the current folder where it is below it."""
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _serves(result: Probed, model: str | None) -> bool:
    """Return whether the endpoint may serve the model; one that lists no models may."""
    models = result.capabilities.models if result.capabilities else ()
    return not models or not model or model in models


_NOT_SENT = frozenset({"input", "id", "where", "results", "limits", "cluster", "name", "hostfile"})
"""Keys of the job whose values are never sent."""

MAX_HOSTS_NAMED = 5


def describe_effects(job: Job, env: Mapping[str, str]) -> EffectsReport:
    """Return what a run of ``job`` would execute and send, without doing either."""
    parts: list[tuple[KeyPath, Job]] = [((), job)]
    parts += [(path, job.for_stage(part)) for path, part in stage_parts(job)]
    executes = [effect for path, part in parts for effect in _executes(path, part)]
    sends = [effect for path, part in parts for effect in _sends(path, part, env)]
    sends += _sent_variables(job, env, dict(parts))
    return EffectsReport(tuple(dict.fromkeys(executes)), tuple(dict.fromkeys(sends)))


def _executes(path: KeyPath, job: Job) -> Iterator[ExecuteReport]:
    def program(kind: str, argv: tuple[str, ...]) -> ExecuteReport:
        return ExecuteReport(kind, mask_text(shlex.join(argv), job.source.secrets))

    ref = job.backend
    if ref is not None and ref.api_key_command:
        yield program("api_key_command", ref.api_key_command)
    if ref is not None and ref.kind == "local" and job.hostfile is None:
        yield ExecuteReport("local", "a model of this machine")
    agent = _own_agent(path, job)
    if agent is None:
        return
    if agent.command:
        yield program("agent.command", agent.command)
    for tool in agent.tools:
        if tool.python is not None:
            yield ExecuteReport("python", f"{tool.python} (the file is imported)")
        elif tool.command:
            yield program("command", tool.command)
        elif tool.mcp is not None and tool.mcp.command:
            yield program("mcp", tool.mcp.command)
        elif tool.builtin in ("shell", "python_eval"):
            yield ExecuteReport(str(tool.builtin), "what the model writes")


def _own_agent(path: KeyPath, job: Job) -> AgentSpec | None:
    """Return the agent of a part; that of the whole job is listed once."""
    return job.agent if not path or job.agent is not None else None


def _sends(path: KeyPath, job: Job, env: Mapping[str, str]) -> Iterator[SendReport]:
    hosts = hosts_of(job, env)
    if hosts:
        for name in key_variables(job.backend, env):
            yield SendReport(name, hosts)
        if job.backend is not None and job.backend.api_key_command:
            yield SendReport("what api_key_command prints", hosts)
    if job.hostfile is not None:
        for host in read_hostfile(job.hostfile.path):
            if "api_key_env" in host.tags:
                yield SendReport(host.tags["api_key_env"], host.name)
    agent = job.agent
    for tool in agent.tools if agent is not None else ():
        if tool.builtin == "web_search":
            from bagent.tools.builtin.web_search import search_target

            names, url = search_target(tool.url, tool.api_key_env, env)
            yield SendReport(names, urlsplit(url).netloc.rpartition("@")[2])


def hosts_of(job: Job, env: Mapping[str, str]) -> str:
    """Return the hosts that ``job`` sends its calls to, for people; empty where it has none."""
    if job.hostfile is not None:
        names = [host.name for host in read_hostfile(job.hostfile.path)]
        more = len(names) - MAX_HOSTS_NAMED
        return ", ".join(names[:MAX_HOSTS_NAMED]) + (f" and {more:,} more hosts" * (more > 0))
    if job.backend is None:
        return ""
    try:
        address = server_address(job.backend, env)
    except UsageError:
        return ""
    return mask_text(address, job.source.secrets)


def puts_variables_into_bodies(job: Job) -> bool:
    """Return whether a variable of the environment may be in the body of a request."""
    return any(use.path[0] not in _NOT_SENT | {"backend"} for use in job.source.variables)


def _sent_variables(
    job: Job, env: Mapping[str, str], parts: Mapping[KeyPath, Job]
) -> Iterator[SendReport]:
    """Yield the variables in the job (``${VAR}``) with their receivers."""
    for use in job.source.variables:
        if use.path[0] in _NOT_SENT:
            continue
        part = next(
            (
                parts[use.path[:end]]
                for end in range(len(use.path), -1, -1)
                if use.path[:end] in parts
            ),
            job,
        )
        target = _tool_target(use.path, part) or _program(use.path, part) or hosts_of(part, env)
        yield SendReport(use.name, target or "the server")


def _tool_target(path: KeyPath, job: Job) -> str | None:
    if "tools" not in path or job.agent is None:
        return None
    index = path[path.index("tools") + 1] if path[-1] != "tools" else 0
    if not isinstance(index, int) or index >= len(job.agent.tools):
        return None
    tool: ToolSpec = job.agent.tools[index]
    if tool.mcp is not None and tool.mcp.url is not None:
        return urlsplit(tool.mcp.url).netloc.rpartition("@")[2]
    if tool.mcp is not None:
        return f"the program {tool.mcp.command[0]}"
    return f"the tool {tool.name or tool.builtin or tool.python}"


def _program(path: KeyPath, job: Job) -> str | None:
    if "agent" in path and job.agent is not None and job.agent.command:
        return f"the program {job.agent.command[0]}"
    return None
