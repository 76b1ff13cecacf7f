"""SLURM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from bagent.hpc.schedulers.base import Ask, Scheduler, clock

if TYPE_CHECKING:
    from bagent.hpc.parsl import PoolPlan
    from bagent.hpc.plan import BatchPlan
    from bagent.job.spec.cluster import ClusterSpec

WARN_SECONDS = 20
"""The signal before the end: later than bagent's own deadline, which so comes first."""


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
