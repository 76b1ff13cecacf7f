"""The batch job around this process, from the variables of schedulers and launchers.

Other modules do not read these variables: ``SLURM_*`` (SLURM), ``PBS_*`` (OpenPBS, PBS Pro),
``PALS_*`` (Cray PALS), ``PMIX_*`` and ``PMI_*`` (MPICH and derivatives), ``OMPI_*`` (Open MPI).
Only :mod:`bagent.store.tables.build`, which may not import this package, reads memory limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bagent.errors import UsageError

Scheduler = Literal["slurm", "pbs"]

SHARDS = "BAGENT_SHARDS"
"""The number of shards, or the indexes of the whole array, where no scheduler variable has them."""

# For each launcher: the variable of the rank, then those of the size.
_RANKS = (
    ("PALS_RANKID", ("PMI_SIZE", "PALS_SIZE")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("PMI_RANK", ("PMI_SIZE",)),
    ("PMIX_RANK", ("PMIX_SIZE", "PMI_SIZE")),
)
_MARKS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PBS_", "PALS_", "PMIX_", "PMI_", "OMPI_")
_INTEGER = re.compile(r"[0-9]{1,9}", re.ASCII)
_ARRAY = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]+)?", re.ASCII)


class LauncherPlace(msgspec.Struct, frozen=True):
    """A position among the tasks of an array or the processes of a launch."""

    index: int  # from 0
    count: int | None  # None if unknown


END_VARIABLE = "SLURM_JOB_END_TIME"


class Allocation(msgspec.Struct, frozen=True):
    """The batch job around this process, as the environment describes it."""

    scheduler: Scheduler | None = None
    job_id: str | None = None  # without a server's name
    node_list: str | None = None  # SLURM's compressed list
    node_file: Path | None = None  # PBS's file
    node: str | None = None  # the scheduler's name for this node
    restarts: int = 0  # requeues
    task: LauncherPlace | None = None  # in a job array
    rank: LauncherPlace | None = None  # in a launch
    end: float | None = None  # Unix seconds


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Read the allocation from ``env``; empty and malformed variables count as not set."""
    slurm, pbs = _text(env, "SLURM_JOB_ID"), _text(env, "PBS_JOBID")
    node_file = _text(env, "PBS_NODEFILE")
    scheduler: Scheduler | None = "slurm" if slurm else "pbs" if pbs else None
    return Allocation(
        scheduler=scheduler,
        job_id=slurm or (pbs.partition(".")[0] if pbs else None),
        node_list=_text(env, "SLURM_JOB_NODELIST"),
        node_file=Path(node_file) if node_file else None,
        node=_text(env, "SLURMD_NODENAME"),
        restarts=_integer(env, "SLURM_RESTART_COUNT") or 0,
        task=_task(env),
        rank=_rank(env),
        end=_end(env),
    )


def without_allocation(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables of schedulers and launchers, for another job."""
    return {name: text for name, text in env.items() if not name.startswith(_MARKS)}


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
    match = _ARRAY.fullmatch(_text(env, SHARDS) or "")
    if match is None:
        return None
    if match[2] is None:
        return _Indexes(0, int(match[1]))
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    return _Indexes(first, max(0, last - first) // max(1, step) + 1, max(1, step))


def _array_position(env: Mapping[str, str]) -> LauncherPlace | None:
    """Return the position of this task of a job array.

    The scheduler reports the first and last index and the number of tasks. Where these leave gaps,
    as in ``--array=1,3,7``, the tasks belong to a larger array, which :data:`SHARDS` describes.

    Raises:
        UsageError: it is not set, or has no such index.
    """
    task, array = _task(env), _shards(env)
    if task is None:
        return None
    if array is None or (task.count == array.count and not _has_gaps(env)):
        if _has_gaps(env):
            raise _unknown_parts("not told by an array with gaps")
        return task
    index = _integer(env, "SLURM_ARRAY_TASK_ID")
    if index is None:
        index = _integer(env, "PBS_ARRAY_INDEX") or 0
    number, beside = divmod(index - array.first, array.step)
    if beside or not 0 <= number < array.count:
        raise _unknown_parts(f"{array.count}, and this is number {index} of {_text(env, SHARDS)}")
    return LauncherPlace(number, array.count)


def _has_gaps(env: Mapping[str, str]) -> bool:
    count, last = _integer(env, "SLURM_ARRAY_TASK_COUNT"), _integer(env, "SLURM_ARRAY_TASK_MAX")
    if not count or last is None:
        return False
    first = _integer(env, "SLURM_ARRAY_TASK_MIN") or 0
    return (last - first) // (_integer(env, "SLURM_ARRAY_TASK_STEP") or 1) + 1 != count


def _unknown_parts(reason: str) -> UsageError:
    return UsageError(
        f"--shard auto: the number of parts is {reason}",
        hint=f"set {SHARDS}=N for all of them, {SHARDS}=FIRST-LAST for the indexes of the whole"
        " array, or write --shard I/N",
    )


def _task(env: Mapping[str, str]) -> LauncherPlace | None:
    index = _integer(env, "SLURM_ARRAY_TASK_ID")
    if index is not None:
        first = _integer(env, "SLURM_ARRAY_TASK_MIN") or 0
        step = _integer(env, "SLURM_ARRAY_TASK_STEP") or 1
        return LauncherPlace((index - first) // step, _integer(env, "SLURM_ARRAY_TASK_COUNT"))
    index = _integer(env, "PBS_ARRAY_INDEX")
    return LauncherPlace(index, None) if index is not None else None


def _rank(env: Mapping[str, str]) -> LauncherPlace | None:
    for name, sizes in _RANKS:
        index = _integer(env, name)
        if index is not None:
            count = next((n for n in (_integer(env, s) for s in sizes) if n), None)
            return _sized(LauncherPlace(index, count), env)
    # By its variables a batch script is process 0 of the job's tasks although it is alone, so they
    # count in a step only.
    if _text(env, "SLURM_STEP_ID") and (index := _integer(env, "SLURM_PROCID")) is not None:
        return LauncherPlace(
            index, _integer(env, "SLURM_STEP_NUM_TASKS") or _integer(env, "SLURM_NTASKS")
        )
    return None


def _sized(position: LauncherPlace, env: Mapping[str, str]) -> LauncherPlace:
    """Add the size of a SLURM step where the PMI library does not set it."""
    if position.count is None and _text(env, "SLURM_STEP_ID"):
        return LauncherPlace(position.index, _integer(env, "SLURM_STEP_NUM_TASKS"))
    return position


def _end(env: Mapping[str, str]) -> float | None:
    text = _text(env, END_VARIABLE) or ""
    return float(text) if _SECONDS.fullmatch(text) else None


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = _text(env, name) or ""
    return int(text) if _INTEGER.fullmatch(text) else None
