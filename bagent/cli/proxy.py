"""``bagent proxy``: one address in front of a fleet."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagent.cli import options as opt
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint


def proxy(
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="HOSTS", help="The endpoints.")
    ] = None,
    backend: opt.Backend = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8080,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="NAME", help="Variable with the token to ask for."),
    ] = None,
    per_endpoint: Annotated[
        int, typer.Option("--per-endpoint", min=1, help="Requests in flight per endpoint.")
    ] = 256,
    strip_preamble: Annotated[
        bool,
        typer.Option("--strip-preamble", help="Drop session lines (x-anthropic-..., x-amz-...)."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The run directory.")
    ] = None,
) -> int:
    """One OpenAI-compatible local address in front of a fleet, balanced and metered.

    With --backend NAME it is in front of that one server, also a hosted one, whose key clients
    need not know; requests keep the form that the server takes.

    Example: bagent proxy --hostfile hosts.txt --port 8080

    Example: bagent proxy --backend anthropic
    """
    from bagent.proxy.serve import ProxyConfig, plain_states

    token = None
    if token_env is not None:
        token = os.environ.get(token_env) or None
        if token is None:
            raise UsageError(f"the environment variable {token_env} is not set")
    endpoints = _named(backend, hostfile) if backend is not None else _fleet(hostfile)
    config = ProxyConfig(host, port, token, strip_preamble=strip_preamble)
    run = output or Path("runs") / time.strftime("proxy-%Y%m%d-%H%M%S")
    asyncio.run(_serve(plain_states(endpoints, per_endpoint), config, run))
    return 0


def _fleet(hostfile: Path | None) -> list[Endpoint]:
    from bagent.fleet.hostfile import read_hostfile
    from bagent.runs.endpoints import host_endpoints
    from bagent.runs.environment import read_environment

    named = read_environment(os.environ).hostfile
    given = hostfile or (Path(named) if named else None)
    if given is None:
        raise UsageError(
            "no hostfile", hint="give --hostfile HOSTS or --backend NAME, or set BAGENT_HOSTFILE"
        )
    return host_endpoints(read_hostfile(given), given, None, os.environ)


def _named(backend: str, hostfile: Path | None) -> list[Endpoint]:
    from bagent.runs.named import named_servers

    if hostfile is not None:
        raise UsageError("--backend and --hostfile exclude each other", hint="leave one out")
    servers = named_servers(backend, "as asked", os.environ)
    if servers.bedrock is not None:
        raise UsageError(
            "a proxy passes HTTP requests on, and Bedrock's have to be signed one by one",
            hint="give the agents AWS credentials of their own",
        )
    return servers.endpoints


async def _serve(states: list, config: object, run: Path) -> None:  # type: ignore[type-arg]
    from bagent.proxy.serve import ProxyConfig, start_proxy

    assert isinstance(config, ProxyConfig)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    def notice(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    async with start_proxy(states, config, run, notice) as found:
        sys.stdout.write(f"{found.url}\n")
        sys.stdout.flush()
        notice(f"a proxy in front of {len(states)} endpoints; Ctrl-C ends")
        notice(f"next: export OPENAI_BASE_URL={found.url}")
        await stopped.wait()
    notice(f'next: bagent query {run} "select endpoint, count(*) from results group by 1"')
