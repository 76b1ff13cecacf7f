"""The nodes of a job that run engines, and the position of this one."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bagent.errors import UsageError
from bagent.hpc.allocation import read_allocation
from bagent.hpc.scheduler_queries import node_names

_ADDRESS = frozenset("0123456789.")


def short(name: str) -> str:
    """Return a host name without its domain, an address as it is."""
    return name if set(name) <= _ADDRESS else name.partition(".")[0]


def engine_nodes(names: Sequence[str], excluded: Iterable[str], skip: int = 0) -> list[str]:
    """Return the nodes for engines, in the scheduler's order.

    Args:
        names: the job's nodes; repeats count once.
        excluded: bad nodes, with or without their domains.
        skip: how many good nodes at the front stay free.

    Raises:
        UsageError: none remains.
    """
    bad = {short(name) for name in excluded}
    good = [name for name in dict.fromkeys(names) if short(name) not in bad][skip:]
    if not good:
        raise UsageError(
            f"no node is left for engines of {len(names)}",
            hint="raise cluster.nodes, or look at the excluded ones",
        )
    return good


def position_of(nodes: Sequence[str], mine: Iterable[str], rank: int | None) -> int:
    """Return the index of this node in ``nodes``, by its names or else its rank.

    Launchers number ranks in an order of their own, so names come first.

    Raises:
        UsageError: it is not among them.
    """
    index = {short(name): number for number, name in enumerate(nodes)}
    for name in mine:
        position = index.get(short(name))
        if position is not None:
            return position
    if rank is not None and rank < len(nodes):
        return rank
    raise UsageError(
        f"this node ({', '.join(mine)}) is not in the list of nodes",
        hint="start it on a node of the job",
    )


def this_node() -> str:
    """Return the launcher's or scheduler's name for this node, else its own."""
    named = os.environ.get("BAGENT_NODE") or read_allocation(os.environ).node
    return named or socket.gethostname()


def this_position(nodes: Sequence[str]) -> int:
    """Return the index of this process's node in ``nodes``."""
    rank = read_allocation(os.environ).rank
    return position_of(nodes, [this_node(), socket.gethostname()], rank.index if rank else None)


def read_names(path: Path) -> list[str]:
    """Read names from a file, one a line; ``#`` begins a comment.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def nodes_step(argv: list[str]) -> int:
    """Print the nodes for engines."""
    parser = argparse.ArgumentParser(prog="bagent.hpc nodes")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--exclude", default="", help="names parted by blanks")
    parser.add_argument("--exclude-file", type=Path)
    args = parser.parse_args(argv)
    excluded = args.exclude.split()
    if args.exclude_file is not None:
        excluded += read_names(args.exclude_file)
    names = node_names(read_allocation(os.environ)) or [socket.gethostname()]
    sys.stdout.write("".join(f"{n}\n" for n in engine_nodes(names, excluded, args.skip)))
    return 0
