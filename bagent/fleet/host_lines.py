"""Endpoints written as a hostfile."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from bagent.errors import WriteError
from bagent.fleet.hostfile import FIRST_FREE_PORT, Host


def host_line(host: Host) -> str:
    """The line of a hostfile that stands for ``host``: read again, it is the same endpoint."""
    # Without a port a URL means port 80, a bare name another; small ports need a URL.
    port = urlsplit(host.url).port or 0
    plain = f"http://{host.name}/v1" == host.url and port >= FIRST_FREE_PORT
    return " ".join([host.name if plain else host.url, *(f"{k}={v}" for k, v in host.tags.items())])


def hostfile_text(hosts: Sequence[Host], kept: Collection[str], source: str) -> str:
    """A hostfile of those ``hosts`` whose address (``url``) is in ``kept``.

    A line of ``source``, the text that ``hosts`` was read from, stays as it was written where all
    its endpoints are kept; where some are gone, each other one gets a line of its own.
    """
    lines = source.splitlines()
    groups: dict[int, list[Host]] = {}
    for host in hosts:
        groups.setdefault(host.line, []).append(host)
    out: list[str] = []
    for number, group in groups.items():
        staying = [host for host in group if host.url in kept]
        if len(staying) == len(group) and 0 < number <= len(lines):
            out.append(lines[number - 1].strip().removeprefix("\ufeff"))
        else:
            out += map(host_line, staying)
    return "".join(f"{line}\n" for line in out)


def write_hostfile(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all: readers may be waiting for the file.

    Raises:
        WriteError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
