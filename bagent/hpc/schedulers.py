"""Batch schedulers, one class each.

To add one, LSF say: its name and variables in :mod:`bagent.batch_env`, a class like :class:`Pbs`
that :data:`SCHEDULERS` lists, the shell functions of its jobs in ``deploy/NAME/job.sh``, and a case
in ``deploy/lib.sh`` for a launcher of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from bagent.batch_env import SchedulerName

if TYPE_CHECKING:
    from bagent.hpc.parsl import PoolPlan
    from bagent.hpc.plan import BatchPlan
    from bagent.job.spec.cluster import ClusterSpec


Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns its stdout, empty if it failed."""

_STIME = "%a %b %d %H:%M:%S %Y"

WARN_SECONDS = 20
"""The signal before the end: later than bagent's own deadline, which so comes first."""


class Scheduler(ABC):
    """One scheduler: its programs, directives, launchers, and keys of ``cluster:``."""

    name: ClassVar[SchedulerName]
    label: ClassVar[str]
    """Its name in messages."""
    submit_command: ClassVar[tuple[str, ...]]
    """Submits the script that follows it."""
    directive: ClassVar[str]
    """The mark before each of its options in a script."""
    launcher: ClassVar[str]
    """The usual ``cluster.launcher``."""
    own_launchers: ClassVar[Mapping[str, str]] = {}
    """Launchers that work in its jobs only: the shell words before the command that is to run once
    on each node of the file ``$HERE/nodes``."""
    own_staging: ClassVar[tuple[str, ...]] = ()
    """Values of ``cluster.stage_by`` that work in its jobs only."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of ``cluster:`` that only it knows."""
    other_keys_hint: ClassVar[str] = "other wishes go under directives"
    """The hint where the job has a key that another scheduler knows."""
    other_launchers_hint: ClassVar[str]
    """The hint where the job has another scheduler's launcher or staging."""

    @abstractmethod
    def job_end(self, job_id: str, ask: Ask) -> float | None:
        """Ask when the job will be killed, in Unix seconds."""

    def expand_nodes(self, node_list: str, ask: Ask) -> list[str]:
        """Return the nodes of the compressed list of the environment."""
        return node_list.split()

    def requeue_command(self, job_id: str) -> list[str] | None:
        """Return the command that starts the job again on other nodes; None if none is needed."""
        return None

    @abstractmethod
    def directives(self, plan: BatchPlan) -> Iterator[str]:
        """Yield the options of the script of ``bagent submit``."""

    @abstractmethod
    def worker_directives(self, cluster: ClusterSpec) -> Iterator[str]:
        """Yield those options of a Parsl job that :meth:`parsl_provider` has no argument for."""

    @abstractmethod
    def parsl_provider(self, plan: PoolPlan, arguments: Mapping[str, Any]) -> Any:
        """Return Parsl's provider.

        Args:
            plan: the workers.
            arguments: what the providers of all schedulers have in common.
        """


def clock(seconds: float) -> str:
    """Return ``HH:MM:SS``, rounded down."""
    minutes, rest_seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest_seconds:02d}"


class Pbs(Scheduler):
    """PBS, which requeues jobs with lost nodes by itself."""

    name = "pbs"
    label = "PBS"
    submit_command = ("qsub",)
    directive = "#PBS"
    launcher = "hydra"
    other_keys_hint = "under PBS a reservation is a queue; other wishes go under directives"
    other_launchers_hint = "launcher: pals"

    def job_end(self, job_id: str, ask: Ask) -> float | None:
        """Ask ``qstat`` for the start and the wall time."""
        end = _json_end(ask(["qstat", "-f", "-F", "json", job_id]))
        return end or _plain_end(ask(["qstat", "-f", job_id]))

    def directives(self, plan: BatchPlan) -> Iterator[str]:
        """Yield the options of ``qsub``."""
        cluster = plan.cluster
        yield f"-N {plan.name[:15]}"
        if cluster.account:
            yield f"-A {cluster.account}"
        if plan.queue:
            yield f"-q {plan.queue}"
        select = f":{plan.site.select}" if plan.site.select else ""
        gpus = f":ngpus={plan.requested_gpus}" if plan.requested_gpus else ""
        yield f"-l select={plan.nodes}{select}{gpus}"
        yield "-l place=scatter"
        yield f"-l walltime={clock(plan.walltime)}"
        if cluster.filesystems:
            yield f"-l filesystems={cluster.filesystems}"
        yield "-r y"
        yield "-j oe"

    def worker_directives(self, cluster: ClusterSpec) -> Iterator[str]:
        """Yield the placement and the file systems."""
        yield "-l place=scatter"
        if cluster.filesystems:
            yield f"-l filesystems={cluster.filesystems}"

    def parsl_provider(self, plan: PoolPlan, arguments: Mapping[str, Any]) -> Any:
        """Return a ``PBSProProvider``."""
        from parsl.providers import PBSProProvider

        return PBSProProvider(queue=plan.queue, select_options=plan.select, **arguments)


def _json_end(text: str) -> float | None:
    try:
        jobs: Any = msgspec.json.decode(text.encode())["Jobs"]
        (job,) = jobs.values()
        return _start_and_walltime(job["stime"], job["Resource_List"]["walltime"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _plain_end(text: str) -> float | None:
    fields = {
        name.strip(): value.strip()
        for name, mark, value in (line.partition(" = ") for line in text.splitlines())
        if mark
    }
    try:
        return _start_and_walltime(fields["stime"], fields["Resource_List.walltime"])
    except (KeyError, ValueError):
        return None


def _start_and_walltime(started: str, walltime: str) -> float:
    seconds = 0
    for part in str(walltime).split(":"):
        seconds = seconds * 60 + int(part)
    return datetime.strptime(started, _STIME).timestamp() + seconds


class Slurm(Scheduler):
    """SLURM; its nodes are requested whole."""

    name = "slurm"
    label = "SLURM"
    submit_command = ("sbatch", "--parsable")
    directive = "#SBATCH"
    launcher = "srun"
    own_launchers: ClassVar = {
        # Engines of the same job may have a step of their own that also uses whole nodes.
        "srun": (
            'srun --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1'
            ' --nodelist="$HERE/nodes" --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none'
            " --mem=0 --no-kill --kill-on-bad-exit=0 --wait=0 --input=none"
        )
    }
    own_staging = ("sbcast",)
    own_keys = ("qos", "constraint", "reservation")
    other_launchers_hint = "launcher: srun"

    def job_end(self, job_id: str, ask: Ask) -> float | None:
        """Ask ``squeue``, then ``scontrol``: older SLURM sets no variable."""
        end = _local_time(ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%e"]))
        return end or _local_time(_field(ask(["scontrol", "show", "job", job_id]), "EndTime"))

    def expand_nodes(self, node_list: str, ask: Ask) -> list[str]:
        """Have ``scontrol`` expand the bracket notation."""
        return ask(["scontrol", "show", "hostnames", node_list]).split()

    def requeue_command(self, job_id: str) -> list[str]:
        """Return ``scontrol requeue``: after the loss of the first node only this helps."""
        return ["scontrol", "requeue", job_id]

    def directives(self, plan: BatchPlan) -> Iterator[str]:
        """Yield the options of ``sbatch``."""
        cluster = plan.cluster
        yield f"--job-name={plan.name}"
        named = {
            "account": cluster.account,
            "partition": plan.queue,
            "qos": cluster.qos,
            "reservation": cluster.reservation,
            "constraint": cluster.constraint,
            "exclude": ",".join(cluster.exclude),
        }
        for option, value in named.items():
            if value:
                yield f"--{option}={value}"
        yield f"--nodes={plan.nodes}"
        yield "--ntasks-per-node=1"
        yield "--exclusive"
        if plan.requested_gpus:
            yield f"--gpus-per-node={plan.requested_gpus}"
        yield f"--time={clock(plan.walltime)}"
        yield f"--signal=B:USR1@{WARN_SECONDS}"
        yield "--no-kill"
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--output={plan.name}.%j.out"

    def worker_directives(self, cluster: ClusterSpec) -> Iterator[str]:
        """Yield ``--no-kill``, reservation and excluded nodes."""
        yield "--no-kill"  # a lost node ends its own workers and no others
        if cluster.reservation:
            yield f"--reservation={cluster.reservation}"
        if cluster.exclude:
            yield f"--exclude={','.join(cluster.exclude)}"

    def parsl_provider(self, plan: PoolPlan, arguments: Mapping[str, Any]) -> Any:
        """Return a ``SlurmProvider``."""
        from parsl.providers import SlurmProvider

        return SlurmProvider(
            partition=plan.queue, qos=plan.qos, constraint=plan.constraint, **arguments
        )


def _local_time(text: str) -> float | None:
    first = text.strip().partition("\n")[0]
    try:
        return datetime.fromisoformat(first).timestamp()
    except (ValueError, OverflowError, OSError):
        return None  # N/A, Unknown, NONE


def _field(text: str, name: str) -> str:
    for word in text.split():
        key, _, value = word.partition("=")
        if key == name:
            return value
    return ""


SCHEDULERS: Mapping[SchedulerName, Scheduler] = {
    scheduler.name: scheduler for scheduler in (Slurm(), Pbs())
}
