"""The one server that ``bagent bench --backend`` loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.errors import UsageError
from bagent.runs.endpoints import Servers
from bagent.runs.hosted import MOST_THREADS
from bagent.runs.named import named_servers

if TYPE_CHECKING:
    from bagent.bench.plan import BenchPlan


def named_backend(given: dict[str, Any]) -> Servers:
    """The server that ``--backend`` names; all but Bedrock (see :func:`reachable`) as one that
    speaks OpenAI's protocol.

    Anthropic answers it too, at ``/v1/chat/completions`` with the key as a bearer token
    (https://docs.claude.com/en/api/openai-sdk).

    Raises:
        UsageError: the server cannot be loaded this way, or options contradict each other.
    """
    for name, option in (("hostfile", "--hostfile"), ("write_hostfile", "--write-hostfile")):
        if given[name] is not None:
            raise UsageError(f"--backend and {option} exclude each other", hint="leave one out")
    servers = named_servers(given["backend"], given["model"], os.environ)
    if servers.kind != "anthropic":
        return servers
    sys.stderr.write("note: Anthropic is loaded by its OpenAI-compatible route\n")
    return msgspec.structs.replace(
        servers, kind="openai", endpoints=[_with_bearer(one) for one in servers.endpoints]
    )


@contextmanager
def reachable(servers: Servers, plan: BenchPlan, tell: Callable[[str], None]) -> Iterator[Servers]:
    """The same server by OpenAI's protocol: Bedrock through a bridge in this process."""
    if servers.bedrock is None:
        yield servers
        return
    from bagent.proxy.bridge import bridged_apart

    tell("Bedrock is loaded through boto3 in this process: what that takes counts as the server's")
    wanted = max(servers.bedrock.threads, *plan.concurrency, 1)
    reached = msgspec.structs.replace(servers.bedrock, threads=min(wanted, MOST_THREADS))
    told = msgspec.structs.replace(servers, bedrock=reached)
    with bridged_apart(told, tell, plan.timeouts) as found:
        yield found


def _with_bearer(endpoint: Endpoint) -> Endpoint:
    key = endpoint.headers.get("x-api-key")
    if key is None:
        return endpoint
    headers = {"Authorization": f"Bearer {key}", **endpoint.headers}
    return msgspec.structs.replace(endpoint, headers=headers)
