"""The batch job around this process: its ids, its end, its nodes, and processes on each of them.

They come from the variables of schedulers and launchers, and from the scheduler's programs. Other
modules do not read these variables: those of schedulers, which :mod:`bagent.batch_env` names,
``PALS_*`` (Cray PALS), ``PMIX_*`` and ``PMI_*`` (MPICH and derivatives), ``OMPI_*`` (Open MPI).
Only the build of the tables reads limits of memory from them. A process is launched on every node
as in ``deploy/lib.sh``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bagent.batch_env import (
    SCHEDULER_VARIABLES,
    SchedulerName,
    SchedulerVariables,
    read_integer,
    read_text,
)
from bagent.errors import UsageError
from bagent.hpc.schedulers import SCHEDULERS, Ask

T = TypeVar("T")

SHARDS = "BAGENT_SHARDS"
"""The number of shards, or the indexes of the whole array, where no scheduler variable has them."""

# For each launcher: the variable of the rank, then those of the size.
_RANKS = (
    ("PALS_RANKID", ("PMI_SIZE", "PALS_SIZE")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("PMI_RANK", ("PMI_SIZE",)),
    ("PMIX_RANK", ("PMIX_SIZE", "PMI_SIZE")),
)
_PREFIXES = (
    *(prefix for variables in SCHEDULER_VARIABLES.values() for prefix in variables.prefixes),
    *("PALS_", "PMIX_", "PMI_", "OMPI_"),
)
_ARRAY = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]+)?", re.ASCII)

ANSWER_SECONDS = 10.0
"""Timeout of a scheduler's program."""

_ADDRESS = frozenset("0123456789.")


class LauncherPlace(msgspec.Struct, frozen=True):
    """A position among the tasks of an array or the processes of a launch."""

    index: int  # from 0
    count: int | None  # None if unknown


class Allocation(msgspec.Struct, frozen=True):
    """The batch job around this process, as the environment describes it."""

    scheduler: SchedulerName | None = None
    job_id: str | None = None  # without a server's name
    node_list: str | None = None  # compressed, for a program of the scheduler
    node_file: Path | None = None
    node: str | None = None  # the scheduler's name for this node
    restarts: int = 0  # requeues
    task: LauncherPlace | None = None  # in a job array
    rank: LauncherPlace | None = None  # in a launch
    end: float | None = None  # Unix seconds


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Read the allocation from ``env``; empty and malformed variables count as not set."""
    scheduler, job_id = _job(env)
    node_file = _first(lambda names: read_text(env, names.node_file))
    array = _array_task(env)
    return Allocation(
        scheduler=scheduler,
        job_id=job_id,
        node_list=_first(lambda names: read_text(env, names.node_list)),
        node_file=Path(node_file) if node_file else None,
        node=_first(lambda names: read_text(env, names.node)),
        restarts=_first(lambda names: read_integer(env, names.restarts)) or 0,
        task=array.position if array else None,
        rank=_rank(env),
        end=_first(lambda names: _seconds(read_text(env, names.end))),
    )


def end_variable(env: Mapping[str, str]) -> str | None:
    """Return the name of the variable that has the end of the job, if one is set."""
    return _first(lambda names: names.end if read_text(env, names.end) else None)


def without_allocation(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables of schedulers and launchers, for another job."""
    return {name: value for name, value in env.items() if not name.startswith(_PREFIXES)}


def auto_shard(env: Mapping[str, str]) -> tuple[int, int]:
    """Return the shard ``(i, n)``, i from 1, of ``--shard auto`` for this process.

    Each task of a job array, and each process of a launch (``srun``, ``mpiexec``) within it, gets
    a shard of its own. Outside of both there is one.

    Raises:
        UsageError: the number of shards is unknown.
    """
    allocation = read_allocation(env)
    shard, shards = 0, 1
    for position in (_array_position(env), allocation.rank):
        if position is None:
            continue
        count = position.count
        if count is None and allocation.task is None:
            count = (_shards(env) or _Indexes(0, 0)).count
        if not count or not 0 <= position.index < count:
            reason = f"{count}, and this is number {position.index}" if count else "not told"
            raise _unknown_parts(reason)
        shard, shards = shard * count + position.index, shards * count
    return shard + 1, shards


class _Indexes(msgspec.Struct, frozen=True):
    """The indexes of a whole job array."""

    first: int
    count: int
    step: int = 1


def _shards(env: Mapping[str, str]) -> _Indexes | None:
    """Return the array of :data:`SHARDS`: ``8``, or indexes such as ``1-8`` or ``0-14:2``."""
    match = _ARRAY.fullmatch(read_text(env, SHARDS) or "")
    if match is None:
        return None
    if match[2] is None:
        return _Indexes(0, int(match[1]))
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    return _Indexes(first, max(0, last - first) // max(1, step) + 1, max(1, step))


class _ArrayTask(msgspec.Struct, frozen=True):
    """This task of a job array, and what the scheduler reports of all of them."""

    index: int
    first: int
    last: int | None
    step: int
    count: int | None

    @property
    def position(self) -> LauncherPlace:
        """The position among the tasks of an array without gaps."""
        return LauncherPlace((self.index - self.first) // self.step, self.count)

    @property
    def has_gaps(self) -> bool:
        """Whether there are fewer tasks than indexes, as in ``--array=1,3,7``."""
        if not self.count or self.last is None:
            return False
        return (self.last - self.first) // self.step + 1 != self.count


def _array_position(env: Mapping[str, str]) -> LauncherPlace | None:
    """Return the position of this task of a job array.

    The tasks of an array with gaps belong to a larger array, which :data:`SHARDS` describes.

    Raises:
        UsageError: it is not set, or has no such index.
    """
    task, array = _array_task(env), _shards(env)
    if task is None:
        return None
    if array is None or (task.count == array.count and not task.has_gaps):
        if task.has_gaps:
            raise _unknown_parts("not told by an array with gaps")
        return task.position
    number, beside = divmod(task.index - array.first, array.step)
    if beside or not 0 <= number < array.count:
        reason = f"{array.count}, and this is number {task.index} of {read_text(env, SHARDS)}"
        raise _unknown_parts(reason)
    return LauncherPlace(number, array.count)


def _unknown_parts(reason: str) -> UsageError:
    return UsageError(
        f"--shard auto: the number of parts is {reason}",
        hint=f"set {SHARDS}=N for all of them, {SHARDS}=FIRST-LAST for the indexes of the whole"
        " array, or write --shard I/N",
    )


def _first(read: Callable[[SchedulerVariables], T | None]) -> T | None:
    """Return what the first scheduler reports whose variable is set."""
    values = map(read, SCHEDULER_VARIABLES.values())
    return next((value for value in values if value is not None), None)


def _job(env: Mapping[str, str]) -> tuple[SchedulerName | None, str | None]:
    for scheduler, names in SCHEDULER_VARIABLES.items():
        if job_id := read_text(env, names.job_id):
            return scheduler, job_id.partition(".")[0]
    return None, None


def _array_task(env: Mapping[str, str]) -> _ArrayTask | None:
    def read(names: SchedulerVariables) -> _ArrayTask | None:
        index = read_integer(env, names.task)
        if index is None:
            return None
        return _ArrayTask(
            index,
            first=read_integer(env, names.first_task) or 0,
            last=read_integer(env, names.last_task),
            step=read_integer(env, names.task_step) or 1,
            count=read_integer(env, names.task_count),
        )

    return _first(read)


def _rank(env: Mapping[str, str]) -> LauncherPlace | None:
    step = _first(lambda names: _step(env, names))
    for name, sizes in _RANKS:
        index = read_integer(env, name)
        if index is not None:
            count = _first_integer(env, sizes)
            if count is None and step is not None:  # not every PMI library sets the size
                count = step.count
            return LauncherPlace(index, count)
    return step


def _step(env: Mapping[str, str], names: SchedulerVariables) -> LauncherPlace | None:
    """Return the rank in a step.

    By its variables a batch script is process 0 of the job's tasks although it is alone, so they
    count in a step only.
    """
    index = read_integer(env, names.step_rank)
    if index is None or read_text(env, names.step) is None:
        return None
    return LauncherPlace(index, _first_integer(env, names.step_sizes))


def _first_integer(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Return the first of the variables that is a number and not 0."""
    return next(filter(None, (read_integer(env, name) for name in names)), None)


def _seconds(value: str | None) -> float | None:
    return float(value) if value and _SECONDS.fullmatch(value) else None


def ask(command: Sequence[str]) -> str:
    """Return the stdout of ``command``, empty if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def job_end(allocation: Allocation, ask: Ask = ask) -> float | None:
    """Return when the job will be killed in Unix seconds, None if unknown."""
    if allocation.end is not None or allocation.scheduler is None or allocation.job_id is None:
        return allocation.end
    return SCHEDULERS[allocation.scheduler].job_end(allocation.job_id, ask)


def node_names(allocation: Allocation, ask: Ask = ask) -> list[str]:
    """Return the distinct nodes of the job in the scheduler's order; none outside of a job."""
    if allocation.node_file is not None:
        try:
            lines = allocation.node_file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            lines = []
        if lines:
            return list(dict.fromkeys(lines))
    if allocation.node_list is not None and allocation.scheduler is not None:
        nodes = SCHEDULERS[allocation.scheduler].expand_nodes(allocation.node_list, ask)
        return list(dict.fromkeys(nodes))
    return []


def deadline_step(argv: list[str]) -> int:
    """Print ``@EPOCH`` for BAGENT_DEADLINE, some seconds before the job's end."""
    parser = argparse.ArgumentParser(prog="bagent.hpc deadline")
    parser.add_argument("--walltime", type=float, required=True, help="seconds, if nobody tells")
    parser.add_argument("--less", type=float, default=0.0, help="seconds before the end")
    args = parser.parse_args(argv)
    end = job_end(read_allocation(os.environ)) or time.time() + args.walltime
    sys.stdout.write(f"@{end - args.less:.0f}\n")
    return 0


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


_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")
"""Variables that are exported to the nodes: not every launcher does so."""

LAUNCHERS = {
    **{
        name: command
        for scheduler in SCHEDULERS.values()
        for name, command in scheduler.own_launchers.items()
    },
    "pals": (
        'mpiexec --np "$NODES" --ppn 1 --hostfile "$HERE/nodes" --cpu-bind none'
        " --no-abort-on-failure"
    ),
    "hydra": 'mpiexec -n "$NODES" -ppn 1 -f "$HERE/nodes" -bind-to none',
    "openmpi": ('mpiexec -n "$NODES" --map-by ppr:1:node --bind-to none --hostfile "$HERE/nodes"'),
    "ssh": '"$PYTHON" -m bagent.hpc ssh --nodes "$HERE/nodes" --',
}
"""For each ``cluster.launcher``: the shell words before a command."""


def on_every_node(command: str, launcher: str, python: str, excluded: Sequence[str] = ()) -> str:
    """Return a script that runs ``command`` once on each node of the batch job around it.

    ``$SCRIPTS`` must be a folder that all nodes share. The nodes are determined in the job.

    Args:
        command: a shell command.
        launcher: as ``cluster.launcher`` names it.
        python: the interpreter on the nodes.
        excluded: nodes to leave out.
    """
    exports = "\n".join(
        f"if [[ -n ${{{name}:-}} ]]; then printf 'export {name}=%q\\n' \"${name}\"; fi"
        for name in _EXPORTED
    )
    return f"""set -euo pipefail
PYTHON={shlex.quote(python)}
HERE=$(mktemp -d "$SCRIPTS/nodes.XXXXXXXX")
"$PYTHON" -m bagent.hpc nodes --exclude {shlex.quote(" ".join(excluded))} >"$HERE/nodes"
NODES=$(grep -c . "$HERE/nodes")
export NODES
{{
echo '#!/bin/bash'
printf 'cd %q\\n' "$PWD"
{exports}
cat <<'END_OF_COMMAND'
exec {command}
END_OF_COMMAND
}} >"$HERE/node.sh"
{LAUNCHERS[launcher]} bash "$HERE/node.sh"
"""


def set_up_script(cwd: Path, modules: Sequence[str], lines: Sequence[str]) -> str:
    """Return the start of a batch job: change the folder, load modules, run setup lines."""
    loads = [f"module load {shlex.quote(name)}" for name in modules]
    return "\n".join([f"cd {shlex.quote(str(cwd))}", *loads, *lines, ""])


SSH = (
    "ssh",
    "-tt",  # with a terminal the command ends when this process does
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=accept-new",
)


async def on_nodes(nodes: Sequence[str], arguments: Sequence[str], ssh: Sequence[str] = SSH) -> int:
    """Run a command on every node; return the first exit code that is not 0.

    TERM, INT and HUP are forwarded as TERM.
    """
    running: set[asyncio.subprocess.Process] = set()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def run(node: str) -> int:
        command = f"BAGENT_NODE={shlex.quote(node)} {shlex.join(arguments)}"
        if stopping.is_set():
            return 128 + signal.SIGTERM
        process = await asyncio.create_subprocess_exec(
            *ssh, node, command, stdin=asyncio.subprocess.DEVNULL
        )
        running.add(process)
        code = await process.wait()
        running.discard(process)
        if code:
            sys.stderr.write(f"{node}: exit code {code}\n")
        return code

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    codes = await asyncio.gather(*map(run, nodes))
    return next((code for code in codes if code), 0)


def ssh_step(argv: list[str]) -> int:
    """Run the command after ``--`` on every node of a file."""
    parser = argparse.ArgumentParser(prog="bagent.hpc ssh")
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    return abs(asyncio.run(on_nodes(read_names(args.nodes), args.command)))
