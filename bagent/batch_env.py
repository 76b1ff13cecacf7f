"""The names of batch schedulers, and the environment variables that each sets in its jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

SchedulerName = Literal["slurm", "pbs"]

_INTEGER = re.compile(r"[0-9]{1,9}", re.ASCII)


class SchedulerVariables(msgspec.Struct, frozen=True, kw_only=True):
    """The variables of one scheduler; None where it sets none."""

    prefixes: tuple[str, ...]
    """What the names of all its variables begin with."""
    job_id: str
    """The job's id; what follows a dot is the name of a server."""
    node_list: str | None = None
    """The nodes as a compressed list, which a program of the scheduler expands."""
    node_file: str | None = None
    """A file of the nodes, one a line."""
    node: str | None = None
    """The scheduler's name for this node."""
    restarts: str | None = None
    """How often the job was requeued."""
    end: str | None = None
    """When the job will be killed, in Unix seconds."""
    task: str | None = None
    """The index of this task of a job array; it and the next four may begin anywhere and step."""
    first_task: str | None = None
    last_task: str | None = None
    task_step: str | None = None
    task_count: str | None = None
    step: str | None = None
    """Set in the processes that the scheduler's own launcher starts, and only there."""
    step_rank: str | None = None
    step_sizes: tuple[str, ...] = ()
    """The number of such processes: the first that is set counts."""
    node_memory: str | None = None
    """The job's memory on a node, in MiB."""
    cpu_memory: str | None = None
    """The job's memory for each CPU, in MiB."""
    node_cpus: str | None = None
    """The job's CPUs on this node."""

    def memory_limits(self, env: Mapping[str, str]) -> Iterator[int]:
        """Yield the limits of the job's memory on this node, in bytes."""
        if memory := read_integer(env, self.node_memory):
            yield memory << 20
        memory, cpus = read_integer(env, self.cpu_memory), read_integer(env, self.node_cpus)
        if memory and cpus:
            yield memory * cpus << 20


SCHEDULER_VARIABLES: Mapping[SchedulerName, SchedulerVariables] = {
    "slurm": SchedulerVariables(
        prefixes=("SLURM_", "SLURMD_", "SBATCH_", "SRUN_"),
        job_id="SLURM_JOB_ID",
        node_list="SLURM_JOB_NODELIST",
        node="SLURMD_NODENAME",
        restarts="SLURM_RESTART_COUNT",
        end="SLURM_JOB_END_TIME",
        task="SLURM_ARRAY_TASK_ID",
        first_task="SLURM_ARRAY_TASK_MIN",
        last_task="SLURM_ARRAY_TASK_MAX",
        task_step="SLURM_ARRAY_TASK_STEP",
        task_count="SLURM_ARRAY_TASK_COUNT",
        step="SLURM_STEP_ID",
        step_rank="SLURM_PROCID",
        step_sizes=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        node_memory="SLURM_MEM_PER_NODE",
        cpu_memory="SLURM_MEM_PER_CPU",
        node_cpus="SLURM_CPUS_ON_NODE",
    ),
    "pbs": SchedulerVariables(  # OpenPBS, PBS Pro
        prefixes=("PBS_",),
        job_id="PBS_JOBID",
        node_file="PBS_NODEFILE",
        task="PBS_ARRAY_INDEX",
    ),
}
"""In a job of one scheduler that imitates another, the first one counts."""


def read_text(env: Mapping[str, str], name: str | None) -> str | None:
    """Return the variable ``name``; None if it is empty or not set."""
    return env.get(name, "").strip() or None if name else None


def read_integer(env: Mapping[str, str], name: str | None) -> int | None:
    """Return the variable ``name`` as a number; None if it is none."""
    value = read_text(env, name) or ""
    return int(value) if _INTEGER.fullmatch(value) else None
