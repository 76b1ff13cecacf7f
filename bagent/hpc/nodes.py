"""Which nodes of the job get engines, and which of them this one is."""

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
    """A host name without its domain; an address stays whole."""
    return name if set(name) <= _ADDRESS else name.partition(".")[0]


def engine_nodes(names: Sequence[str], excluded: Iterable[str], skip: int = 0) -> list[str]:
    """The nodes for engines, in the scheduler's order.

    Args:
        names: the job's nodes; repeats count once.
        excluded: bad nodes, with or without their domains.
        skip: so many good ones at the front are kept free.

    Raises:
        UsageError: none is left.
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
    """Where this node stands in ``nodes``: by one of its own names, else by its rank.

    Names come first: launchers start ranks in an order of their own.

    Raises:
        UsageError: neither tells.
    """
    index = {short(name): number for number, name in enumerate(nodes)}
    for name in mine:
        found = index.get(short(name))
        if found is not None:
            return found
    if rank is not None and rank < len(nodes):
        return rank
    raise UsageError(f"this node ({', '.join(mine)}) is not in the list of nodes")


def this_node() -> str:
    """The name of this node: what the launcher or the scheduler calls it, else its own."""
    named = os.environ.get("BAGENT_NODE") or read_allocation(os.environ).node
    return named or socket.gethostname()


def this_position(nodes: Sequence[str]) -> int:
    """Where the node of this process stands in ``nodes``; see :func:`position_of`."""
    rank = read_allocation(os.environ).rank
    return position_of(nodes, [this_node(), socket.gethostname()], rank.index if rank else None)


def read_names(path: Path) -> list[str]:
    """The names in a file, one a line, ``#`` begins a comment.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise UsageError(f"{path}: cannot be read: {words}") from None
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def nodes_step(argv: list[str]) -> int:
    """Print the nodes for engines, one a line."""
    parser = argparse.ArgumentParser(prog="bagent.hpc nodes")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--exclude", default="", help="names parted by blanks")
    parser.add_argument("--exclude-file", type=Path)
    given = parser.parse_args(argv)
    excluded = given.exclude.split()
    if given.exclude_file is not None:
        excluded += read_names(given.exclude_file)
    names = node_names(read_allocation(os.environ)) or [socket.gethostname()]
    sys.stdout.write("".join(f"{n}\n" for n in engine_nodes(names, excluded, given.skip)))
    return 0
