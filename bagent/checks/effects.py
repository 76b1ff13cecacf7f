"""What a run of a job would execute, and which variables it would send to whom.

A job is a program: it names what is imported, started and asked. Who did not write it can read
here what it would do, before anything of it is done.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bagent.checks.report import EffectsReport, ExecuteReport, SendReport
from bagent.errors import UsageError
from bagent.fleet.hostfile import read_hostfile
from bagent.job.mask import mask_text
from bagent.job.parts import Path, stage_parts
from bagent.runs.endpoints import key_variables, server_address

if TYPE_CHECKING:
    from bagent.job.spec import Job
    from bagent.job.spec_agent import AgentSpec, ToolSpec

_STAYS = frozenset({"input", "id", "where", "results", "limits", "cluster", "name", "hostfile"})
"""Keys whose values no run sends to a server."""

MAX_HOSTS_NAMED = 5


def effects_of(job: Job, env: Mapping[str, str]) -> EffectsReport:
    """Return what a run of ``job`` would execute and send; nothing is executed or sent."""
    parts: list[tuple[Path, Job]] = [((), job)]
    parts += [(path, job.for_stage(part)) for path, part in stage_parts(job)]
    executes = [one for path, part in parts for one in _executes(path, part)]
    sends = [one for path, part in parts for one in _sends(path, part, env)]
    sends += _substituted(job, env, dict(parts))
    return EffectsReport(tuple(dict.fromkeys(executes)), tuple(dict.fromkeys(sends)))


def _executes(path: Path, job: Job) -> Iterator[ExecuteReport]:
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


def _own_agent(path: Path, job: Job) -> AgentSpec | None:
    """The agent of a part; that of the whole job is listed once."""
    return job.agent if not path or job.agent is not None else None


def _sends(path: Path, job: Job, env: Mapping[str, str]) -> Iterator[SendReport]:
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
            from bagent.tools.web_search import search_target

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
    job: Job, env: Mapping[str, str], parts: Mapping[Path, Job]
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


def _tool_target(path: Path, job: Job) -> str | None:
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


def _program(path: Path, job: Job) -> str | None:
    if "agent" in path and job.agent is not None and job.agent.command:
        return f"the program {job.agent.command[0]}"
    return None
