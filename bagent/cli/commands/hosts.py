"""``bagent hosts``: which endpoints of a hostfile are ready, and what they are."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bagent.cli import options as opt
from bagent.errors import EXIT_ROWS_FAILED, HostfileError, Position, StoppedEarly, UsageError

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.fleet.health_check import HealthCheckPlan, HealthResult
    from bagent.fleet.hostfile import HostEntry

MOST_AT_ONCE = 2048
"""Endpoints that are checked at once; each may hold two connections."""

_STDIN = "-"


HostsFile = Annotated[
    str | None,
    typer.Argument(
        metavar="[HOSTS]",
        help="A hostfile or PBS node file; - is standard input. The default is BAGENT_HOSTFILE.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Ask again until enough endpoints are ready.")]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="Stop after this time in any case.")
]
MinFraction = Annotated[
    float | None,
    typer.Option(
        "--min-fraction", metavar="F", help="Call it enough when this share is ready, from 0 to 1."
    ),
]
MinHosts = Annotated[
    int | None, typer.Option("--min-hosts", metavar="N", help="Call it enough when N are ready.")
]
Served = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Call an endpoint ready only if it serves this model."
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(
        "--write",
        metavar="FILE",
        help="Write the ready endpoints, with their tags.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Form = Annotated[
    Literal["table", "json"],
    typer.Option(
        "--format", help="Print a table, or one JSON object a line.", rich_help_panel=opt.OUTPUT
    ),
]


def hosts(
    hosts: HostsFile = None,
    hostfile: opt.Hostfile = None,
    backend: opt.Backend = None,
    wait: Wait = False,
    timeout: Timeout = "30s",
    min_fraction: MinFraction = None,
    min_hosts: MinHosts = None,
    model: Served = None,
    write: Write = None,
    form: Form = "table",
    as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> int:
    """Show which endpoints of a hostfile are ready, and what they are.

    Each ready endpoint has answered a real request of one token. Enough are all of them, unless
    --min-fraction or --min-hosts say less. --backend looks at one server, also a hosted one, which
    costs the price of one token.

    Exit codes: 0 enough are ready; 1 not enough; 75 not enough after --wait; 2 the hostfile or an
    option is wrong.

    Example: bagent hosts nodes.txt --wait --min-fraction 0.9 --timeout 20m --write ready.txt
    """
    from bagent.cli.render.hosts import log_end, print_results
    from bagent.fleet.hostfile import hostfile_notes

    form = "json" if as_json else form
    hosts = one_hostfile(hosts, hostfile)
    if backend is not None:
        if hosts is not None or write is not None:
            raise UsageError(
                "--backend is one server, without a hostfile to read or to write",
                hint="leave out HOSTS and --write, or --backend",
            )
        return _check_backend(backend, model, timeout, form)
    fleet = read_fleet(hosts)
    for note in hostfile_notes(fleet.text):
        _notice(note)
    count = len(fleet.hosts)
    plan = _plan(count, timeout, _required(count, min_fraction, min_hosts), model, wait)
    results = _call(fleet.endpoints, plan)
    print_results(results, form)
    ready = {result.endpoint.url for result in results if result.ready}
    if write is not None and ready:
        from bagent.fleet.hostfile import hostfile_text, write_hostfile

        write_hostfile(write, hostfile_text(fleet.hosts, ready, fleet.text))
    enough = len(ready) >= plan.required
    log_end(results, write, fleet.path, enough=enough)
    if enough:
        return 0
    if not wait:
        return EXIT_ROWS_FAILED
    raise StoppedEarly(
        f"{len(ready)} of {count} endpoints ready after {timeout}, {plan.required} required",
        hint="the same command resumes; --timeout sets how long",
    )


def one_hostfile(argument: str | None, option: str | None) -> str | None:
    """Return the hostfile of the argument or of ``--hostfile``.

    Raises:
        UsageError: both name one.
    """
    if argument is not None and option is not None:
        raise UsageError(f"{argument} and --hostfile {option}: two hostfiles", hint="name one")
    return argument or option


def _check_backend(
    backend: str, model: str | None, timeout: str, form: Literal["table", "json"]
) -> int:
    """Check the server that ``--backend`` names."""
    from bagent.cli.render.hosts import log_single, print_results
    from bagent.interrupts import run_interruptible
    from bagent.servers.resolve import check_server, resolve_backend

    servers = resolve_backend(backend, model, os.environ, _notice)
    seconds = _plan(1, timeout, 1, model, wait=False).seconds
    result = run_interruptible(check_server(servers, model, seconds))
    print_results([result], form)
    log_single(result, backend)
    return 0 if result.ready else EXIT_ROWS_FAILED


@dataclass(frozen=True, slots=True)
class HostfileInput:
    """A hostfile: its path, its text, its hosts, and the endpoint of each."""

    path: str
    text: str
    hosts: Sequence[HostEntry]
    endpoints: Sequence[Endpoint]


def read_fleet(hostfile: str | None, hint: str = "bagent hosts FILE") -> HostfileInput:
    """Read ``hostfile`` (``-`` is stdin), or the one that BAGENT_HOSTFILE names.

    Args:
        hint: how to name one, for the error.

    Raises:
        UsageError: none is named.
        HostfileError: it cannot be read, or a line is wrong.
    """
    from bagent.fleet.hostfile import hosts_in
    from bagent.runs.environment import read_environment
    from bagent.servers.resolve import host_endpoints

    name = hostfile or read_environment(os.environ, _notice).hostfile
    if name is None:
        raise UsageError("no hostfile", hint=f"{hint}, or set BAGENT_HOSTFILE")
    path = Path("stdin") if name == _STDIN else Path(name).expanduser()
    if name == _STDIN:
        content = sys.stdin.buffer.read()
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise HostfileError(
                f"the hostfile cannot be read: {reason}", at=Position(path)
            ) from None
    hosts = hosts_in(content, path)
    endpoints = host_endpoints(hosts, path, None, os.environ)
    return HostfileInput(name, content.decode("utf-8-sig"), hosts, endpoints)


def _required(count: int, min_fraction: float | None, min_hosts: int | None) -> int:
    """Return how many ready endpoints are enough."""
    if min_fraction is None and min_hosts is None:
        return count
    required = 1
    if min_fraction is not None:
        if not 0 <= min_fraction <= 1:
            raise UsageError(
                f"--min-fraction {min_fraction:g}: not between 0 and 1",
                hint="such as --min-fraction 0.9",
            )
        required = max(required, math.ceil(min_fraction * count - 1e-9))
    if min_hosts is not None:
        if not 1 <= min_hosts <= count:
            there = "1 endpoint is" if count == 1 else f"{count} endpoints are"
            raise UsageError(
                f"--min-hosts {min_hosts}: {there} in the hostfile",
                hint=f"write --min-hosts {count} or less" if count > 1 else "leave it out",
            )
        required = max(required, min_hosts)
    return required


def _plan(
    count: int, timeout: str, required: int, model: str | None, wait: bool
) -> HealthCheckPlan:
    from bagent.fleet.health_check import HealthCheckPlan
    from bagent.runs.shutdown import raise_file_limit
    from bagent.text.durations import parse_duration

    try:
        seconds = 0.0 if timeout == "none" else parse_duration(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout {timeout}: not a duration", hint="write 30s, 5m or 1h30m")
    width = min(MOST_AT_ONCE, count)
    width = max(1, min(width, raise_file_limit(2 * width) // 2))
    return HealthCheckPlan(seconds, width, required, model, repeat=wait)


def _call(endpoints: Sequence[Endpoint], plan: HealthCheckPlan) -> list[HealthResult]:
    import asyncio

    from bagent.backends.http.client import Transport
    from bagent.backends.http.resolver import ResolverLoop
    from bagent.cli.render.hosts import log_progress
    from bagent.fleet.health_check import FleetHealthCheck
    from bagent.interrupts import run_interruptible

    async def call() -> list[HealthResult]:
        transport = Transport()
        check = FleetHealthCheck(endpoints, plan, transport)
        progress = asyncio.ensure_future(log_progress(check, plan.seconds))
        try:
            return await check.run()
        finally:
            progress.cancel()
            await asyncio.wait([progress, asyncio.ensure_future(transport.close())], timeout=0.5)

    return run_interruptible(call(), ResolverLoop)


def _notice(message: str) -> None:
    sys.stderr.write(f"note: {message}\n")
