"""``bagent sim``: serve simulated endpoints."""

from __future__ import annotations

import asyncio
import inspect
import signal
import socket
import sys
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any

import typer

from bagent.errors import UsageError
from bagent.files import write_atomic
from bagent.sim import OPTIONS, SimConfig, start_sim
from bagent.sim.config import SimOption

DEFAULT_PORT = 8000
"""Port of the first endpoint: the default of hostfiles."""

METAVARS = {int: "N", float: "X", str: "TEXT"}
_EVERYWHERE = ("", str(IPv4Address(0)), str(IPv6Address(0)))


def sim(**options: Any) -> None:
    """Serve simulated endpoints, to try things without a GPU.

    The addresses are printed once all of them answer. Ctrl-C or SIGTERM ends the command with exit
    code 0. Answers are made up: they follow a seed, fit the schema of the request, and their model
    name says that they are simulated.

    Example: bagent sim --replicas 4 --decode 60 --write-hostfile sim.hosts
    """
    hostfile: Path | None = options.pop("write_hostfile")
    settings = {name: value for name, value in options.items() if value is not None}
    asyncio.run(_serve(SimConfig.of(settings), hostfile))


def _parameter(option: SimOption) -> inspect.Parameter:
    """Make the option of one setting; rates and durations are texts."""
    text = option.kind in ("rate", "seconds")
    kind: Any = str if text else option.type
    default = DEFAULT_PORT if option.name == "port" else option.default
    if text and default is not None:
        default = f"{default:g}"
    metavar = option.kind.upper() if text else METAVARS.get(kind)
    flag = "--" + option.name.replace("_", "-")
    flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind | None,
            typer.Option(
                flags,
                metavar=metavar,
                help=option.help,
                rich_help_panel=option.group.capitalize() or None,
            ),
        ],
    )


def _signature() -> inspect.Signature:
    hostfile = inspect.Parameter(
        "write_hostfile",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--write-hostfile", metavar="FILE", help="Write the addresses as a hostfile."
            ),
        ],
    )
    return inspect.Signature([hostfile, *map(_parameter, OPTIONS.values())])


# The command line and sim:// URLs are made from the same definitions.
vars(sim)["__signature__"] = _signature()


async def _serve(config: SimConfig, hostfile: Path | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with start_sim(config) as fleet:
        urls = [_reachable(url, config.host) for url in fleet.urls]
        if hostfile is not None:
            _write_hostfile(hostfile, urls)
        sys.stdout.write("".join(f"{url}\n" for url in urls))
        sys.stdout.flush()
        noun = "endpoint" if len(urls) == 1 else "endpoints"
        backend_option = f"--hostfile {hostfile}" if hostfile else f"--backend {urls[0]}/v1"
        sys.stderr.write(
            f"{len(urls)} simulated {noun} of {config.model}; Ctrl-C ends\n"
            f"next: bagent run JOB.yaml {backend_option}\n"
        )
        await stopped.wait()


def _reachable(url: str, host: str) -> str:
    """Return the address for others: the host's name where the socket listens everywhere."""
    if host not in _EVERYWHERE:
        return url
    return f"http://{socket.gethostname()}:{url.rpartition(':')[2]}"


def _write_hostfile(path: Path, urls: list[str]) -> None:
    """Write ``host:port`` lines atomically: readers may be waiting for the file."""
    lines = "".join(f"{url.removeprefix('http://')}\n" for url in urls)
    try:
        write_atomic(path, "# simulated endpoints of bagent sim\n", lines)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
