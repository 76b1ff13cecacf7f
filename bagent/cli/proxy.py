"""``bagent proxy``: one address in front of a fleet."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from bagent.cli import options as opt
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.runs.endpoints import Servers


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
    need not know; requests keep the form that the server takes. Bedrock takes chats in OpenAI's.

    Example: bagent proxy --hostfile hosts.txt --port 8080

    Example: bagent proxy --backend anthropic
    """
    from bagent.proxy.serve import ProxyConfig, plain_states

    token = None
    if token_env is not None:
        token = os.environ.get(token_env) or None
        if token is None:
            raise UsageError(f"the environment variable {token_env} is not set")
    servers = _named(backend, hostfile, per_endpoint) if backend is not None else None
    endpoints = servers.endpoints if servers is not None else _fleet(hostfile)
    config = ProxyConfig(host, port, token, strip_preamble=strip_preamble)
    run = output or Path("runs") / time.strftime("proxy-%Y%m%d-%H%M%S")

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            reached = endpoints
            if servers is not None and servers.bedrock is not None:
                from bagent.proxy.bridge import bridged

                reached = [await stack.enter_async_context(bridged(servers, _notice))]
            await _serve(plain_states(reached, per_endpoint), config, run)

    asyncio.run(serve())
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


def _named(backend: str, hostfile: Path | None, per_endpoint: int) -> Servers:
    from bagent.runs.hosted import MOST_THREADS
    from bagent.runs.named import named_servers

    if hostfile is not None:
        raise UsageError("--backend and --hostfile exclude each other", hint="leave one out")
    found = named_servers(backend, "as asked", os.environ)
    if found.bedrock is None:
        return found
    threads = min(per_endpoint, MOST_THREADS)
    return msgspec.structs.replace(
        found, bedrock=msgspec.structs.replace(found.bedrock, threads=threads)
    )


async def _serve(states: list, config: object, run: Path) -> None:  # type: ignore[type-arg]
    from bagent.proxy.serve import ProxyConfig, start_proxy

    assert isinstance(config, ProxyConfig)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    async with start_proxy(states, config, run, _notice) as found:
        sys.stdout.write(f"{found.url}\n")
        sys.stdout.flush()
        _notice(f"a proxy in front of {len(states)} endpoints; Ctrl-C ends")
        _notice(f"next: export OPENAI_BASE_URL={found.url}")
        waiting = asyncio.ensure_future(stopped.wait())
        await asyncio.wait((waiting, found.fault), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if found.fault.done():
            raise found.fault.result()
    _notice(f'next: bagent query {run} "select endpoint, count(*) from results group by 1"')


def _notice(text: str) -> None:
    sys.stderr.write(f"{text}\n")
