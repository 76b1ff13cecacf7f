"""Where the workers of ``--executor parsl`` run: of the job's ``cluster:`` section, checked.

Inside a batch job they run on its nodes. Outside, where the section names a scheduler, they run in
batch jobs of their own, each of ``nodes`` nodes; else on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bagent.errors import JobError
from bagent.hpc.allocation import read_allocation
from bagent.hpc.asking import Ask, ask, node_names
from bagent.hpc.launching import set_up_script
from bagent.hpc.nodes import engine_nodes
from bagent.hpc.plan import LAUNCHERS, choose_queue, clock
from bagent.hpc.site import GENERIC, load_site, merged
from bagent.job.spec import Job
from bagent.job.spec_cluster import ClusterSpec

Where = Literal["here", "allocation", "slurm", "pbs"]


class PoolPlan(msgspec.Struct, frozen=True):
    """What starts the workers, and how many.

    ``where`` is ``here`` (this machine), ``allocation`` (the nodes of the batch job around this
    process), else the scheduler that takes ``jobs`` batch jobs of ``nodes`` nodes each. ``workers``
    are processes on each node. ``options`` are lines for the scheduler without #SBATCH or #PBS,
    ``set_up`` are shell lines at the start of each batch job. ``walltime`` is ``HH:MM:SS``.
    """

    where: Where
    python: str
    workers: int
    nodes: int = 1
    jobs: int = 1
    launcher: str | None = None
    account: str | None = None
    queue: str | None = None
    qos: str | None = None
    constraint: str | None = None
    select: str = ""
    walltime: str = "01:00:00"
    options: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    set_up: str = ""
    chunks: int | None = None

    @property
    def slots(self) -> int:
        """How many chunks are worked on at once, if all nodes are there."""
        return self.jobs * self.nodes * self.workers


class Around(msgspec.Struct, frozen=True):
    """What surrounds the command: its environment, folder and interpreter; ``ask`` as in
    :func:`bagent.hpc.asking.ask`."""

    env: Mapping[str, str]
    cwd: Path
    python: str
    ask: Ask = ask


def make_pool_plan(job: Job, workers: int, around: Around) -> PoolPlan:
    """Where the chunks of ``job`` run, ``workers`` at once on each node.

    Raises:
        JobError: the section lacks something, or no queue takes such a job.
        UsageError: there is no such site, or no node is left.
    """
    given = job.cluster or ClusterSpec()
    site = load_site(given.site or GENERIC)
    cluster = merged(site, given)
    here = read_allocation(around.env)
    scheduler = here.scheduler or cluster.scheduler
    plan = PoolPlan("here", around.python, workers, chunks=cluster.chunks)
    if scheduler is None:
        return plan
    launcher = cluster.launcher or LAUNCHERS[scheduler]
    plan = msgspec.structs.replace(plan, launcher=launcher, excluded=cluster.exclude)
    if here.scheduler is not None:
        names = engine_nodes(node_names(here, around.ask) or ["here"], cluster.exclude)
        return msgspec.structs.replace(plan, where="allocation", nodes=len(names))
    at = job.source.position(("cluster",))
    missing = [key for key in ("walltime", *site.needs) if not getattr(cluster, key)]
    if missing:
        raise JobError(
            f"not said: {', '.join(f'cluster.{key}' for key in missing)}",
            hint="--executor parsl sends batch jobs from here: write them under cluster:",
            at=at,
        )
    nodes = cluster.nodes or 1
    return msgspec.structs.replace(
        plan,
        where=scheduler,
        nodes=nodes,
        jobs=cluster.jobs or 1,
        account=cluster.account,
        queue=choose_queue(cluster, site.queues, nodes, at),
        qos=cluster.qos,
        constraint=cluster.constraint,
        select=site.select,
        walltime=clock(cluster.walltime or 0.0),
        options=_options(cluster, scheduler),
        set_up=set_up_script(around.cwd, cluster.modules, cluster.setup),
    )


def _options(cluster: ClusterSpec, scheduler: str) -> tuple[str, ...]:
    """The directives that Parsl's providers have no argument for."""
    lines = []
    if scheduler == "slurm":
        # A lost node ends its own workers and no others.
        lines = ["--no-kill"]
        if cluster.reservation:
            lines.append(f"--reservation={cluster.reservation}")
        if cluster.exclude:
            lines.append(f"--exclude={','.join(cluster.exclude)}")
    else:
        lines = ["-l place=scatter"]
        if cluster.filesystems:
            lines.append(f"-l filesystems={cluster.filesystems}")
    return (*lines, *cluster.directives)
