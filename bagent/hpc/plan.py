"""The plan of a batch job: the job's ``cluster:`` section, a site's habits and options, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bagent.errors import JobError, Position
from bagent.hpc.plan_checks import check_gpus, check_staging, requests_gpus
from bagent.hpc.site import Queue, Site, merged
from bagent.job.spec import Job
from bagent.job.spec_cluster import ClusterSpec, Scheduler

FIRST_PORT = 8000
RESTARTS = 2
REQUEUES = 5
MIN_FRACTION = 0.9
START_SECONDS = 1800.0
LAUNCHERS = {"slurm": "srun", "pbs": "hydra"}
_ONLY_SLURM = ("qos", "constraint", "reservation")


class Request(msgspec.Struct, frozen=True):
    """What was typed: options of ``bagent submit``, and where.

    ``run_options`` are passed to ``bagent run`` as they are; ``python`` is the interpreter that
    has bagent, on the nodes too; ``cwd`` the folder in which the job will run.
    """

    job_file: Path
    cwd: Path
    python: str
    scheduler: Scheduler | None = None
    run_options: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """Everything a batch script needs; nothing is left open."""

    job: Job
    site: Site
    cluster: ClusterSpec
    request: Request
    scheduler: Scheduler
    launcher: str
    queue: str | None
    nodes: int
    walltime: float
    ports: tuple[int, ...]

    @property
    def requested_gpus(self) -> int:
        """GPUs of each node that the script requests; 0: none, or the directives do."""
        if not self.site.requests_gpus or requests_gpus(self.cluster):
            return 0
        return self.cluster.gpus_per_node or 0

    @property
    def name(self) -> str:
        """The run's name, in letters that schedulers take."""
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in self.run)
        return kept[:200] if kept[:1].isalpha() else f"j{kept}"[:200]

    @property
    def run(self) -> str:
        """The run's name."""
        return self.job.name

    @property
    def run_folder(self) -> Path:
        """The run directory."""
        folder = self.job.results.dir.path if self.job.results.dir else self.request.cwd / "runs"
        return folder / self.run

    @property
    def batch_folder(self) -> Path:
        """Where each batch job of this run keeps its files: beside the run directory."""
        return self.run_folder.with_name(f"{self.run}.batch")


def make_plan(job: Job, site: Site, request: Request) -> Plan:
    """Bring job, site and options together.

    Raises:
        JobError: something is missing, with the whole list of what is; or does not fit together.
    """
    given = job.cluster or ClusterSpec()
    cluster = merged(site, given)
    at = job.source.position(("cluster",))
    scheduler = request.scheduler or cluster.scheduler
    _refuse_missing(cluster, site, scheduler, at)
    assert scheduler is not None
    assert cluster.walltime is not None
    nodes = cluster.nodes or 1
    _check_fit(cluster, scheduler, nodes, at)
    check_staging(cluster, at)
    check_gpus(cluster, site, at)
    return Plan(
        job=job,
        site=site,
        cluster=cluster,
        request=request,
        scheduler=scheduler,
        launcher=cluster.launcher or LAUNCHERS[scheduler],
        queue=choose_queue(cluster, site.queues, nodes, at),
        nodes=nodes,
        walltime=cluster.walltime,
        ports=_ports(cluster, at),
    )


def _refuse_missing(
    cluster: ClusterSpec, site: Site, scheduler: Scheduler | None, at: Position
) -> None:
    needed = ["walltime", "engine", *site.needs]
    missing = [key for key in dict.fromkeys(needed) if not getattr(cluster, key)]
    if scheduler is None:
        missing.insert(0, "scheduler")
    if missing:
        raise JobError(
            f"not said: {', '.join(f'cluster.{key}' for key in missing)}",
            hint="write them under cluster: in the job file; --scheduler and -A are options too",
            at=at,
        )


def _check_fit(cluster: ClusterSpec, scheduler: str, nodes: int, at: Position) -> None:
    if scheduler == "pbs":
        wrong = [key for key in _ONLY_SLURM if getattr(cluster, key)]
        if wrong:
            raise JobError(
                f"cluster.{wrong[0]} is SLURM's",
                hint="under PBS a reservation is a queue; other wishes go under directives",
                at=at,
            )
        if cluster.launcher == "srun" or cluster.stage_by == "sbcast":
            raise JobError("srun and sbcast are SLURM's", hint="launcher: pals", at=at)
    if cluster.stage_by == "mpi" and cluster.launcher == "ssh":
        raise JobError("stage_by: mpi needs an MPI launcher, and ssh is none", at=at)
    working = nodes - (1 if cluster.reserve_node else 0)
    span = cluster.nodes_per_engine or 1
    if working < span:
        raise JobError(
            f"{working} nodes for engines, and one engine spans {span}",
            hint="raise cluster.nodes",
            at=at,
        )


def choose_queue(
    cluster: ClusterSpec, queues: Sequence[Queue], nodes: int, at: Position
) -> str | None:
    """The named queue if it takes the job, else the first known one that does.

    Raises:
        JobError: none does; ``at`` is the place that is named.
    """
    walltime = cluster.walltime or 0.0
    known = [q for q in queues if cluster.queue in (None, q.name)]
    if not known:
        return cluster.queue
    for queue in known:
        if queue.takes(nodes, walltime):
            return queue.name
    raise JobError(
        f"no queue takes {nodes} nodes for {walltime / 3600:g} h",
        hint="; ".join(queue.limits for queue in known),
        at=at,
    )


def _ports(cluster: ClusterSpec, at: Position) -> tuple[int, ...]:
    """One port for each engine of a node: a single one is the first."""
    engines = cluster.engines_per_node or 1
    ports = cluster.ports or (FIRST_PORT,)
    if len(ports) == 1:
        ports = tuple(range(ports[0], ports[0] + engines))
    if len(set(ports)) < engines or ports[-1] > 65535:
        raise JobError(
            f"{len(set(ports))} ports for {engines} engines of a node",
            hint="give the first port alone, or as many as there are engines",
            at=at,
        )
    return ports[:engines]


def clock(seconds: float) -> str:
    """``HH:MM:SS``, rounded down: schedulers take nothing finer."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
