"""Where this process runs: the variables of schedulers and launchers under neutral names.

Read here and nowhere else, but for the limits of memory, which ``build`` reads since
it may not import this package: ``SLURM_*`` (SLURM), ``PBS_*`` (OpenPBS, PBS Pro), ``PALS_*`` (Cray
PALS), ``PMIX_*`` and ``PMI_*`` (MPICH and what stands on it), ``OMPI_*`` (Open MPI).
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
"""Names the number of parts, or the indexes of the whole array, where nobody else tells them."""

# Of each launcher: the variable with this process's number, then those with the number of all.
_RANKS = (
    ("PALS_RANKID", ("PMI_SIZE", "PALS_SIZE")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("PMI_RANK", ("PMI_SIZE",)),
    ("PMIX_RANK", ("PMIX_SIZE", "PMI_SIZE")),
)
_MARKS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PBS_", "PALS_", "PMIX_", "PMI_", "OMPI_")
_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)
_ARRAY = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]+)?", re.ASCII)


class LauncherPlace(msgspec.Struct, frozen=True):
    """One of several: ``index`` counts from 0, ``count`` is None where nobody tells it."""

    index: int
    count: int | None


END_VARIABLE = "SLURM_JOB_END_TIME"


class Allocation(msgspec.Struct, frozen=True):
    """What the environment tells about the batch job around this process.

    ``job_id`` is the scheduler's own id without a server's name; ``restarts`` counts requeues.
    ``node_list`` is SLURM's compressed list of nodes, ``node_file`` PBS's file of them. ``task``
    is the place in a job array, ``rank`` the place among the processes of one launch; None where
    there is none. ``node`` is the scheduler's name for this node. ``end`` is when the job will be
    killed, in Unix seconds.
    """

    scheduler: Scheduler | None = None
    job_id: str | None = None
    node_list: str | None = None
    node_file: Path | None = None
    node: str | None = None
    restarts: int = 0
    task: LauncherPlace | None = None
    rank: LauncherPlace | None = None
    end: float | None = None


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """What ``env`` tells; empty and malformed variables count as not set."""
    slurm, pbs = _text(env, "SLURM_JOB_ID"), _text(env, "PBS_JOBID")
    node_file = _text(env, "PBS_NODEFILE")
    scheduler: Scheduler | None = "slurm" if slurm else "pbs" if pbs else None
    return Allocation(
        scheduler=scheduler,
        job_id=slurm or (pbs.partition(".")[0] if pbs else None),
        node_list=_text(env, "SLURM_JOB_NODELIST"),
        node_file=Path(node_file) if node_file else None,
        node=_text(env, "SLURMD_NODENAME"),
        restarts=_whole(env, "SLURM_RESTART_COUNT") or 0,
        task=_task(env),
        rank=_rank(env),
        end=_end(env),
    )


def without_allocation(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` less all variables of schedulers and launchers: what another job may be given."""
    return {name: text for name, text in env.items() if not name.startswith(_MARKS)}


def auto_shard(env: Mapping[str, str]) -> tuple[int, int]:
    """The part ``(i, n)``, i from 1, that ``--shard auto`` means for this process.

    A process of a launch (``srun``, ``mpiexec``) takes the part of its rank, a task of a job array
    that of its index; where there are both, every process of every task has a part of its own.
    Alone it is the only one: part 1 of 1.

    Raises:
        UsageError: how many parts there are is not told.
    """
    here = read_allocation(env)
    part, parts = 0, 1
    for place in (_array_part(env), here.rank):
        if place is None:
            continue
        count = place.count
        if count is None and here.task is None:
            count = (_shards(env) or _Indexes(0, 0)).count
        if not count or not 0 <= place.index < count:
            reason = f"{count}, and this is number {place.index}" if count else "not told"
            raise _unknown_parts(reason)
        part, parts = part * count + place.index, parts * count
    return part + 1, parts


class _Indexes(msgspec.Struct, frozen=True):
    """The indexes of a whole job array."""

    first: int
    count: int
    step: int = 1


def _shards(env: Mapping[str, str]) -> _Indexes | None:
    """The array that :data:`SHARDS` names: ``8``, or its indexes as ``1-8`` or ``0-14:2``."""
    match = _ARRAY.fullmatch(_text(env, SHARDS) or "")
    if match is None:
        return None
    if match[2] is None:
        return _Indexes(0, int(match[1]))
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    return _Indexes(first, max(0, last - first) // max(1, step) + 1, max(1, step))


def _array_part(env: Mapping[str, str]) -> LauncherPlace | None:
    """The part of this task of a job array.

    The scheduler tells the first and the last index and how many tasks there are, not which: where
    they leave gaps, as in ``--array=1,3,7``, the tasks are those of a larger array that is known
    by :data:`SHARDS` alone.

    Raises:
        UsageError: that is not set, or has no such index.
    """
    task, array = _task(env), _shards(env)
    if task is None:
        return None
    if array is None or (task.count == array.count and not _has_gaps(env)):
        if _has_gaps(env):
            raise _unknown_parts("not told by an array with gaps")
        return task
    index = _whole(env, "SLURM_ARRAY_TASK_ID")
    if index is None:
        index = _whole(env, "PBS_ARRAY_INDEX") or 0
    number, beside = divmod(index - array.first, array.step)
    if beside or not 0 <= number < array.count:
        raise _unknown_parts(f"{array.count}, and this is number {index} of {_text(env, SHARDS)}")
    return LauncherPlace(number, array.count)


def _has_gaps(env: Mapping[str, str]) -> bool:
    count, last = _whole(env, "SLURM_ARRAY_TASK_COUNT"), _whole(env, "SLURM_ARRAY_TASK_MAX")
    if not count or last is None:
        return False
    first = _whole(env, "SLURM_ARRAY_TASK_MIN") or 0
    return (last - first) // (_whole(env, "SLURM_ARRAY_TASK_STEP") or 1) + 1 != count


def _unknown_parts(reason: str) -> UsageError:
    return UsageError(
        f"--shard auto: the number of parts is {reason}",
        hint=f"set {SHARDS}=N for all of them, {SHARDS}=FIRST-LAST for the indexes of the whole"
        " array, or write --shard I/N",
    )


def _task(env: Mapping[str, str]) -> LauncherPlace | None:
    index = _whole(env, "SLURM_ARRAY_TASK_ID")
    if index is not None:
        first = _whole(env, "SLURM_ARRAY_TASK_MIN") or 0
        step = _whole(env, "SLURM_ARRAY_TASK_STEP") or 1
        return LauncherPlace((index - first) // step, _whole(env, "SLURM_ARRAY_TASK_COUNT"))
    index = _whole(env, "PBS_ARRAY_INDEX")
    return LauncherPlace(index, None) if index is not None else None


def _rank(env: Mapping[str, str]) -> LauncherPlace | None:
    for name, sizes in _RANKS:
        index = _whole(env, name)
        if index is not None:
            count = next((n for n in (_whole(env, s) for s in sizes) if n), None)
            return _sized(LauncherPlace(index, count), env)
    # A batch script is process 0 of the job's tasks by its variables, though it is alone: only
    # in a step do they say which of several a process is.
    if _text(env, "SLURM_STEP_ID") and (index := _whole(env, "SLURM_PROCID")) is not None:
        return LauncherPlace(
            index, _whole(env, "SLURM_STEP_NUM_TASKS") or _whole(env, "SLURM_NTASKS")
        )
    return None


def _sized(place: LauncherPlace, env: Mapping[str, str]) -> LauncherPlace:
    """SLURM tells the size of a step also where its PMI library does not."""
    if place.count is None and _text(env, "SLURM_STEP_ID"):
        return LauncherPlace(place.index, _whole(env, "SLURM_STEP_NUM_TASKS"))
    return place


def _end(env: Mapping[str, str]) -> float | None:
    text = _text(env, END_VARIABLE) or ""
    return float(text) if _SECONDS.fullmatch(text) else None


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = _text(env, name) or ""
    return int(text) if _WHOLE.fullmatch(text) else None
