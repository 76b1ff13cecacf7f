"""How much memory the tables of a run may take on this machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

LEAST_MB = 150
"""What DuckDB may take in any case, in MB."""

_SHARE = 0.35
"""Of what is free: two DuckDBs are at work, and their limit does not count all that they take."""

_UNLIMITED = 1 << 60


def most_memory_mb(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """The most that a DuckDB may be allowed: a third of what machine, cgroup and SLURM have left.

    Args:
        env: environment variables.
        root: where ``proc`` and ``sys`` are.
    """
    free = min([_UNLIMITED, *_limits(env, root)])
    if free == _UNLIMITED:
        return LEAST_MB * 4
    return max(LEAST_MB, int(free * _SHARE) // 1_000_000)


def _limits(env: Mapping[str, str], root: Path) -> Iterator[int]:
    """Every limit that is known, in bytes."""
    for line in _lines(root / "proc" / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    yield from _cgroup_limits(root)
    with suppress(KeyError, ValueError):
        yield int(env["SLURM_MEM_PER_NODE"]) << 20
    with suppress(KeyError, ValueError):
        yield int(env["SLURM_MEM_PER_CPU"]) * int(env["SLURM_CPUS_ON_NODE"]) << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft


def _cgroup_limits(root: Path) -> Iterator[int]:
    """What each cgroup above this process has left; those of version 2 and of version 1."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = Path("sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = Path("sys/fs/cgroup/memory")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / base / path.lstrip("/")
        # In a container the path may be the host's, of which only the root is seen.
        for one in (folder, *folder.parents):
            if one.is_relative_to(root / base):
                yield from _left(one / limit, one / used)


def _left(limit: Path, used: Path) -> Iterator[int]:
    with suppress(ValueError, IndexError):
        most, taken = int(_lines(limit)[0]), int(_lines(used)[0])
        for line in _lines(limit.with_name("memory.stat")):
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                taken -= int(value)  # cached files, which give way
                break
        yield max(0, most - max(0, taken))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
