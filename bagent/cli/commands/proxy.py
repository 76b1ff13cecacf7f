"""``bagent proxy``: one address in front of a fleet."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from bagent.backend_kinds import TRAITS
from bagent.cli import options as opt
from bagent.errors import EXIT_INTERRUPTED, UsageError
from bagent.interrupts import handle_signals

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.fleet.endpoint_state import EndpointState
    from bagent.fleet.leases import EndpointLeaser
    from bagent.proxy.server import Proxy, ProxyConfig
    from bagent.runs.hostfile_reload import HostfileFollower
    from bagent.servers.resolve import Servers

TOKEN_FILE = "token"


def choose_token(
    variable: str | None, endpoints: Sequence[Endpoint], unix: Path | None
) -> str | None:
    """Return the token that clients have to send, None where they need none.

    A Unix socket lets in only this user, who has the keys anyway.

    Raises:
        UsageError: ``variable`` is named and not set.
    """
    from bagent.proxy.auth import holds_key, new_token

    if variable is not None:
        token = os.environ.get(variable, "").strip()
        if not token:
            raise UsageError(
                f"the environment variable {variable} is not set",
                hint="export it, with the token that clients send",
            )
        return token
    return new_token() if unix is None and any(map(holds_key, endpoints)) else None


@contextmanager
def token_file(run: Path, config: ProxyConfig, variable: str | None) -> Iterator[Path | None]:
    """Write a random token to a file of this user while the proxy serves.

    It is not printed: others read terminals and logs of batch jobs.
    """
    if config.token is None or variable is not None:
        yield None
        return
    path = run / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{config.token}\n")
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def announce(
    url: str, count: int, config: ProxyConfig, access: tuple[str | None, Path | None]
) -> None:
    """Print the address on stdout, and how a client gets in on stderr.

    Args:
        url: the base address.
        count: how many endpoints there are.
        config: where the proxy listens.
        access: the variable that holds the token, and the file that holds it.
    """
    variable, file = access
    socket_path = shlex.quote(str(config.unix))
    sys.stdout.write(f"{url}\n" if config.unix is None else f"unix:{config.unix}\n")
    sys.stdout.flush()
    _notice(f"a proxy in front of {count} endpoint{'' if count == 1 else 's'}; Ctrl-C ends")
    key = ""
    if config.token is not None:
        key = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file.absolute()))})"
        _notice("clients send the token as their API key (Authorization: Bearer, or x-api-key)")
    if config.unix is not None:
        bearer = f' -H "Authorization: Bearer {key}"' if key else ""
        _notice(f"next: curl --unix-socket {socket_path}{bearer} {url}/models")
        return
    _notice(f"next: export OPENAI_BASE_URL={url}" + (f' OPENAI_API_KEY="{key}"' if key else ""))


def keyless_only(
    states: Callable[[Sequence[Endpoint]], list[EndpointState]], config: ProxyConfig
) -> Callable[[Sequence[Endpoint]], list[EndpointState]]:
    """Return ``states`` without endpoints that need a key, where no client needs a token."""
    from bagent.proxy.auth import holds_key

    if config.token is not None or config.unix is not None:
        return states

    def without_keys(endpoints: Sequence[Endpoint]) -> list[EndpointState]:
        for endpoint in filter(holds_key, endpoints):
            _notice(
                f"{endpoint.name} needs a key and does not join: this proxy was started without"
                " a token (start it again)"
            )
        return states([endpoint for endpoint in endpoints if not holds_key(endpoint)])

    return without_keys


def _notice(text: str) -> None:
    sys.stderr.write(f"{text}\n")


Host = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="ADDRESS", help="Listen on this address; the default is 127.0.0.1."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        metavar="PORT",
        help="Listen on this port; the default is 8080, 0 takes a free one.",
    ),
]
Unix = Annotated[
    Path | None,
    typer.Option(
        "--unix", metavar="PATH", help="Listen on a Unix socket that only you may connect to."
    ),
]
TokenEnv = Annotated[
    str | None,
    typer.Option(
        "--token-env",
        metavar="NAME",
        help="Take the token that clients send as their API key from this variable; the default is"
        " a random one where the endpoints need a key.",
    ),
]


Hostfile = Annotated[
    Path | None,
    typer.Option("--hostfile", metavar="HOSTS", help="Use the endpoints in this file, one a line."),
]
PerEndpoint = Annotated[
    int,
    typer.Option(
        "--per-endpoint",
        min=1,
        metavar="N",
        help="Keep at most N requests in flight per endpoint.",
    ),
]
StripPreamble = Annotated[
    bool,
    typer.Option(
        "--strip-preamble", help="Drop session lines (x-anthropic-..., x-amz-...) from prompts."
    ),
]
OutputFolder = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", help="Write the run directory here."),
]


def proxy(
    hostfile: Hostfile = None,
    backend: opt.Backend = None,
    host: Host = None,
    port: Port = None,
    unix: Unix = None,
    token_env: TokenEnv = None,
    per_endpoint: PerEndpoint = 256,
    strip_preamble: StripPreamble = False,
    output: OutputFolder = None,
) -> int:
    """Serve one OpenAI-compatible address for a fleet, balanced and metered.

    --backend NAME serves one server, also a hosted one, whose key the clients need not know.
    Requests keep the form that the server takes; Bedrock takes OpenAI's chats.

    If the servers need a key, clients need a token as their API key: that of --token-env, or a
    random one in the file "token" of the run directory.

    Example: bagent proxy --hostfile hosts.txt --port 8080

    Example: bagent proxy --backend anthropic
    """
    from bagent.proxy.server import ProxyConfig, plain_states

    if unix is not None and (host is not None or port is not None):
        raise UsageError("--unix excludes --host and --port", hint="leave one out")
    servers = _backend_servers(backend, hostfile, per_endpoint) if backend is not None else None
    path = _hostfile(hostfile) if servers is None else None
    endpoints = _endpoints(servers, path)
    run = output or Path("runs") / time.strftime("proxy-%Y%m%d-%H%M%S")

    async def serve() -> int:
        async with AsyncExitStack() as stack:
            served = endpoints
            if servers is not None and not TRAITS[servers.kind].serves_chat_completions:
                from bagent.proxy.chat_bridge import bridged

                served = [await stack.enter_async_context(bridged(servers, _notice))]
            states = partial(plain_states, limit=per_endpoint)
            config = ProxyConfig(
                host or "127.0.0.1",
                8080 if port is None else port,
                unix,
                choose_token(token_env, served, unix),
                strip_preamble=strip_preamble,
            )
            return await _serve(served, states, config, (run, path, token_env))

    return asyncio.run(serve())


def _hostfile(option: Path | None) -> Path:
    from bagent.runs.environment import read_environment

    variable = read_environment(os.environ).hostfile
    path = option or (Path(variable) if variable else None)
    if path is None:
        raise UsageError(
            "no hostfile", hint="give --hostfile HOSTS or --backend NAME, or set BAGENT_HOSTFILE"
        )
    return path


def _endpoints(servers: Servers | None, hostfile: Path | None) -> list[Endpoint]:
    from bagent.fleet.hostfile import read_hostfile
    from bagent.servers.resolve import host_endpoints

    if servers is not None:
        return servers.endpoints
    assert hostfile is not None
    return host_endpoints(read_hostfile(hostfile), hostfile, None, os.environ)


def _backend_servers(backend: str, hostfile: Path | None, per_endpoint: int) -> Servers:
    from bagent.servers.hosted import MOST_THREADS
    from bagent.servers.resolve import resolve_backend

    if hostfile is not None:
        raise UsageError("--backend and --hostfile exclude each other", hint="leave one out")
    servers = resolve_backend(backend, "as asked", os.environ)
    if servers.bedrock is None:
        return servers
    threads = min(per_endpoint, MOST_THREADS)
    return msgspec.structs.replace(
        servers, bedrock=msgspec.structs.replace(servers.bedrock, threads=threads)
    )


async def _serve(
    endpoints: Sequence[Endpoint],
    states: Callable[[Sequence[Endpoint]], list[EndpointState]],
    config: ProxyConfig,
    places: tuple[Path, Path | None, str | None],
) -> int:
    """Serve until a signal or a fault; ``places`` are the run directory, the hostfile, which is
    followed, and the variable that holds the token. Returns the exit code."""
    from bagent.proxy.server import start_proxy
    from bagent.runs.shutdown import HANG_UP

    run, hostfile, token_env = places
    follower = _follower(endpoints, hostfile)
    stopped, hurried = asyncio.Event(), asyncio.Event()
    codes = [0]

    def heard(number: int) -> None:
        if not stopped.is_set():
            stopped.set()
        else:
            hurried.set()
            codes[0] = EXIT_INTERRUPTED if number == signal.SIGINT else 0

    with handle_signals((signal.SIGINT, signal.SIGTERM, *HANG_UP), heard):
        async with start_proxy(states(endpoints), config, run, _notice, hurried=hurried) as proxy:
            with token_file(run, config, token_env) as file:
                announce(proxy.url, len(endpoints), config, (token_env, file))
                joining = _following(follower, proxy.lessor, keyless_only(states, config))
                await _until_over(proxy, stopped, joining)
            if proxy.busy():
                _notice(
                    f"{proxy.busy()} requests are in flight: they have {config.drain:g} s to end;"
                    " once more ends them now"
                )
        _notice(f'next: bagent query {run} "select endpoint, count(*) from results group by 1"')
    return codes[0]


async def _until_over(proxy: Proxy, stopped: asyncio.Event, following: Awaitable[None]) -> None:
    """Wait for a signal, or raise a fault; a later signal is the second."""
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(stopped.wait()),
        asyncio.ensure_future(following),
    ]
    try:
        await asyncio.wait((*waits, proxy.fault), return_when=asyncio.FIRST_COMPLETED)
        if proxy.fault.done():
            raise proxy.fault.result()
        if waits[1].done():
            await waits[1]
    finally:
        stopped.set()
        for future in waits:
            future.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _follower(endpoints: Sequence[Endpoint], hostfile: Path | None) -> HostfileFollower | None:
    # Imported before serving: on a full disk a compiled module may be cut off.
    from bagent.runs.hostfile_reload import HostfileFollower

    if hostfile is None:
        return None
    return HostfileFollower(hostfile, None, os.environ, _notice, endpoints)


async def _following(
    follower: HostfileFollower | None,
    lessor: EndpointLeaser,
    states: Callable[[Sequence[Endpoint]], list[EndpointState]],
) -> None:
    """Apply changes of the hostfile until cancelled."""
    if follower is None:
        await asyncio.Event().wait()
    else:
        await follower.follow(lessor, states)
