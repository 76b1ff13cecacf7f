"""The one server that ``bagent bench --backend`` loads."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.errors import UsageError
from bagent.runs.endpoints import Servers
from bagent.runs.named import named_servers


def named_backend(given: dict[str, Any]) -> Servers:
    """The server that ``--backend`` names, as one that speaks OpenAI's protocol.

    Anthropic answers it too, at ``/v1/chat/completions`` with the key as a bearer token
    (https://docs.claude.com/en/api/openai-sdk).

    Raises:
        UsageError: the server cannot be loaded this way, or options contradict each other.
    """
    for name, option in (("hostfile", "--hostfile"), ("write_hostfile", "--write-hostfile")):
        if given[name] is not None:
            raise UsageError(f"--backend and {option} exclude each other", hint="leave one out")
    servers = named_servers(given["backend"], given["model"], os.environ)
    if servers.bedrock is not None:
        raise UsageError(
            "bagent bench speaks OpenAI's protocol, which Bedrock's Converse is not",
            hint="bagent run on bedrock measures each row: bagent report",
        )
    if servers.kind != "anthropic":
        return servers
    sys.stderr.write("note: Anthropic is loaded by its OpenAI-compatible route\n")
    return msgspec.structs.replace(
        servers, kind="openai", endpoints=[_with_bearer(one) for one in servers.endpoints]
    )


def _with_bearer(endpoint: Endpoint) -> Endpoint:
    key = endpoint.headers.get("x-api-key")
    if key is None:
        return endpoint
    headers = {"Authorization": f"Bearer {key}", **endpoint.headers}
    return msgspec.structs.replace(endpoint, headers=headers)
