"""The single facts of a report, each made of what the other modules found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bagent.agents.plan import STREAM_EVERY, StagePlan
from bagent.check.estimate import Sizes
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
from bagent.check.tokens import BYTES_PER_TOKEN, SimTokenizer, Tokenizer
from bagent.errors import JobError, UsageError
from bagent.fleet.hostfile import read_hostfile
from bagent.job.redaction import mask_text
from bagent.job.spec.job import Job, KeyPath, stage_parts
from bagent.runs.context import RunContext
from bagent.runs.plan import requested_models
from bagent.servers.resolve import key_variables, server_address
from bagent.types import Json, Row

if TYPE_CHECKING:
    from bagent.job.spec.agent import AgentSpec, ToolSpec
    from bagent.job.spec.job import Job

MOST_WARNED = 10
"""Endpoints that are warned of by name, at most."""


def backend_words(job: Job) -> str:
    """What answers, as the user wrote it."""
    address = job.backend.url if job.backend else None
    if job.hostfile is not None:
        return f"{address.kind} at {job.hostfile}" if address else str(job.hostfile)
    return mask_text(address.text, job.source.secrets) if address else ""


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


def schema_report(prepared: RunContext, plan: StagePlan) -> SchemaReport | None:
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


def brace_warnings(prepared: RunContext, rows: Sequence[Row]) -> list[str]:
    """Fields that the prompt names in single braces, which are sent as they are."""
    data = [row.data for row in rows if row.error is None]
    if prepared.prompt is None or not data:
        return []
    try:
        return prepared.prompt.check(data)
    except JobError:
        return []


def doubts(prepared: RunContext, plan: StagePlan, probed: Sequence[Probed]) -> list[str]:
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


def _unlisted_models(prepared: RunContext, probed: Sequence[Probed]) -> list[str]:
    """The models that lines of a batch file name and no endpoint lists."""
    listed = [one.found.models for one in probed if one.found is not None and one.found.models]
    if prepared.job.model != "auto" or not listed or len(listed) < len(probed):
        return []
    served = {model for models in listed for model in models}
    named = requested_models(prepared, [one.endpoint for one in probed])
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


_STAYS = frozenset({"input", "id", "where", "results", "limits", "cluster", "name", "hostfile"})
"""Keys whose values no run sends to a server."""

MAX_HOSTS_NAMED = 5


def effects_of(job: Job, env: Mapping[str, str]) -> EffectsReport:
    """Return what a run of ``job`` would execute and send; nothing is executed or sent."""
    parts: list[tuple[KeyPath, Job]] = [((), job)]
    parts += [(path, job.for_stage(part)) for path, part in stage_parts(job)]
    executes = [one for path, part in parts for one in _executes(path, part)]
    sends = [one for path, part in parts for one in _sends(path, part, env)]
    sends += _substituted(job, env, dict(parts))
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
    """The agent of a part; that of the whole job is listed once."""
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
    return any(use.path[0] not in _STAYS | {"backend"} for use in job.source.variables)


def _substituted(
    job: Job, env: Mapping[str, str], parts: Mapping[KeyPath, Job]
) -> Iterator[SendReport]:
    """The variables that stand in the job as ``${VAR}``, with where their values go."""
    for use in job.source.variables:
        if use.path[0] in _STAYS:
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
