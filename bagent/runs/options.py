"""What a command line says beyond the job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """Options of ``bagent run``; each field is the option of that name.

    ``job`` is None where rows come as an OpenAI batch file and there is no job file. ``inputs``
    are paths as typed (``-`` is stdin). ``tables`` is off where another process makes them at
    the end, ``command`` is the whole command with its secrets masked, ``notes`` is the file in
    which that one notes what stands where in the input. ``overrides`` maps dotted job keys to
    values that options gave, ``sets`` are ``--set`` texts. ``env`` and ``cwd`` stand for the
    process's own.
    """

    job: Path | None
    inputs: tuple[str, ...] = ()
    output: str | None = None
    sets: tuple[str, ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    limit: int | None = None
    sample: int | None = None
    shard: str | None = None
    deadline: str = "auto"
    margin: float | None = None
    fresh: bool = False
    retry: str | None = None
    skip_failed: bool = False
    on_change: str = "refuse"
    reuse: str | None = None
    canary: bool = True
    wait_hosts: float = 0.0
    min_hosts: int = 1
    ordered: bool = False
    progress: str = "auto"
    metrics_port: str | None = None
    debug: bool = False
    tables: bool = True
    command: list[str] = field(default_factory=list)
    notes: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)
