"""The secrets that a run works with, so that nothing written about it holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bagent.fleet.hostfile import read_hostfile
from bagent.job.parts import stage_parts
from bagent.redaction import Redactor
from bagent.runs.endpoints import key_variables

if TYPE_CHECKING:
    from bagent.job.spec import Job


def redactor_of(job: Job, env: Mapping[str, str]) -> Redactor:
    """Return what masks the secrets of ``job``: its variables, and the keys that it names.

    Keys that an ``api_key_command`` prints are masked by the endpoint that they are sent to.
    """
    values = {env[name].strip() for name in _named_variables(job, env) if env.get(name)}
    return Redactor(values | job.source.secrets)


def _named_variables(job: Job, env: Mapping[str, str]) -> Iterator[str]:
    for part in (job, *(job.for_stage(part) for _, part in stage_parts(job))):
        yield from key_variables(part.backend, env)
        if part.hostfile is not None:
            for host in read_hostfile(part.hostfile.path):
                if "api_key_env" in host.tags:
                    yield host.tags["api_key_env"]
        for tool in part.agent.tools if part.agent is not None else ():
            if tool.api_key_env:
                yield tool.api_key_env
            elif tool.builtin == "web_search":
                from bagent.tools.web_search import search_target

                yield search_target(tool.url, None, env)[0]
