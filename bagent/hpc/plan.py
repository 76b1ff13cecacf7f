"""The plan of a batch job, from the job's ``cluster:`` section, a site profile and options."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bagent.batch_env import SchedulerName
from bagent.errors import JobError, Position
from bagent.hpc.schedulers import SCHEDULERS
from bagent.hpc.site import ClusterSite, Queue, merged
from bagent.job.spec.cluster import ClusterSpec
from bagent.job.spec.job import Job

_STAGED = "{stage}"
_GPU_WORD = re.compile(r"(?i)gpu|gres|tres")
_GPU_ENGINE = re.compile(r"(?i)(?:.*/)?(?:vllm|sglang|trtllm-serve|tensorrt_llm|dynamo)\b.*")
_SIZE_OPTIONS = (
    {"--tensor-parallel-size", "-tp", "--tp", "--tp-size"},
    {"--pipeline-parallel-size", "-pp", "--pp", "--pp-size"},
)


def check_staging(cluster: ClusterSpec, at: Position) -> None:
    """Check that the files that an engine reads are staged.

    Raises:
        JobError: ``stage`` and ``stage_by`` contradict each other, or nothing is staged.
    """
    if cluster.stage and cluster.stage_by == "none":
        raise JobError(
            "cluster.stage names files, and cluster.stage_by: none copies none of them",
            hint="write stage_by: copy, or leave one of the two out",
            at=at,
        )
    if any(_STAGED in word for word in cluster.engine) and not cluster.stage:
        if cluster.node_setup:
            return  # its lines may fill the folder
        raise JobError(
            f"cluster.engine reads {_STAGED}, and cluster.stage names nothing to put there",
            hint="write stage: [PATH] under cluster:",
            at=at,
        )


def check_gpus(cluster: ClusterSpec, site: ClusterSite, at: Position) -> None:
    """Check that engines get the GPUs that they need.

    Raises:
        JobError: the number of GPUs is missing, cannot be divided, or does not fit.
    """
    gpus, engines = cluster.gpus_per_node, cluster.engines_per_node or 1
    if gpus is None:
        if not requests_gpus(cluster) and any(map(_GPU_ENGINE.fullmatch, engine_command(cluster))):
            raise JobError(
                "the job lacks cluster.gpus_per_node, so the engines would get no GPUs",
                hint="write gpus_per_node: 4 (0 for engines on CPUs) under cluster:",
                at=at,
            )
        return
    if gpus % engines:
        raise JobError(
            f"{gpus} GPUs cannot be shared evenly by {engines} engines of a node",
            hint="change cluster.engines_per_node or cluster.gpus_per_node",
            at=at,
        )
    span, share = cluster.nodes_per_engine or 1, gpus // engines
    if site.engine_gpus and gpus and span == 1 and share not in site.engine_gpus:
        sizes = ", ".join(map(str, site.engine_gpus))
        fitting = [gpus // size for size in site.engine_gpus if gpus % size == 0]
        counts = " or ".join(map(str, sorted(set(fitting))))
        raise JobError(
            f"an engine would get {share} GPUs of a node, and works with {sizes} here",
            hint=f"write engines_per_node: {counts} under cluster:, or another gpus_per_node",
            at=at,
        )
    used = _used_gpus(engine_command(cluster))
    if gpus and used > share * span:
        raise JobError(
            f"cluster.engine uses {used} GPUs, and gets {share * span}",
            hint="change cluster.gpus_per_node, engines_per_node or nodes_per_engine",
            at=at,
        )


def requests_gpus(cluster: ClusterSpec) -> bool:
    """Return whether the job's own directives request GPUs."""
    return any(map(_GPU_WORD.search, cluster.directives))


def engine_command(cluster: ClusterSpec) -> list[str]:
    """Return the engine's command; a single text is split as a shell would."""
    command = cluster.engine
    return shlex.split(command[0]) if len(command) == 1 else list(command)


def _used_gpus(command: Sequence[str]) -> int:
    """Return the GPUs over which the engine's options spread its model."""
    return math.prod(_size(command, options) for options in _SIZE_OPTIONS)


def _size(command: Sequence[str], options: set[str]) -> int:
    for index, argument in enumerate(command):
        name, _, value = argument.partition("=")
        value = value or (command[index + 1] if index + 1 < len(command) else "")
        if name in options and value.isdecimal():
            return int(value)
    return 1


FIRST_PORT = 8000
RESTARTS = 2
REQUEUES = 5
MIN_FRACTION = 0.9
START_SECONDS = 1800.0


class ResourceRequest(msgspec.Struct, frozen=True):
    """The command line of ``bagent submit``."""

    job_file: Path
    cwd: Path  # the folder in which the job will run
    python: str  # the interpreter that has bagent, on the nodes too
    scheduler: SchedulerName | None = None
    run_options: tuple[str, ...] = ()  # for ``bagent run``


class BatchPlan(msgspec.Struct, frozen=True):
    """Everything that a batch script needs."""

    job: Job
    site: ClusterSite
    cluster: ClusterSpec
    request: ResourceRequest
    scheduler: SchedulerName
    launcher: str
    queue: str | None
    nodes: int
    walltime: float
    ports: tuple[int, ...]

    @property
    def requested_gpus(self) -> int:
        """GPUs that the script requests on each node; 0 if none, or if the directives do."""
        if not self.site.requests_gpus or requests_gpus(self.cluster):
            return 0
        return self.cluster.gpus_per_node or 0

    @property
    def name(self) -> str:
        """The run's name in characters that schedulers accept."""
        name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in self.run)
        return name[:200] if name[:1].isalpha() else f"j{name}"[:200]

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
        """The folder of this run's batch jobs, beside the run directory."""
        return self.run_folder.with_name(f"{self.run}.batch")


def make_plan(job: Job, site: ClusterSite, request: ResourceRequest) -> BatchPlan:
    """Return the plan from job, site and options.

    Raises:
        JobError: keys are missing, all of which are listed, or contradict each other.
    """
    cluster = merged(site, job.cluster or ClusterSpec())
    at = job.source.position(("cluster",))
    scheduler = request.scheduler or cluster.scheduler
    _refuse_missing(cluster, site, scheduler, at)
    assert scheduler is not None
    assert cluster.walltime is not None
    nodes = cluster.nodes or 1
    _check_scheduler(cluster, scheduler, at)
    _check_fit(cluster, nodes, at)
    check_staging(cluster, at)
    check_gpus(cluster, site, at)
    return BatchPlan(
        job=job,
        site=site,
        cluster=cluster,
        request=request,
        scheduler=scheduler,
        launcher=cluster.launcher or SCHEDULERS[scheduler].launcher,
        queue=choose_queue(cluster, site.queues, nodes, at),
        nodes=nodes,
        walltime=cluster.walltime,
        ports=_ports(cluster, at),
    )


_OPTIONS = {"scheduler": "--scheduler NAME", "account": "-A ACCOUNT"}
"""Options that stand for keys of ``cluster``."""


def _refuse_missing(
    cluster: ClusterSpec, site: ClusterSite, scheduler: SchedulerName | None, at: Position
) -> None:
    needed = ["walltime", "engine", *site.needs]
    missing = [key for key in dict.fromkeys(needed) if not getattr(cluster, key)]
    if scheduler is None:
        missing.insert(0, "scheduler")
    if missing:
        named = [option for key, option in _OPTIONS.items() if key in missing]
        options = f"; or {' and '.join(named)}" if named else ""
        raise JobError(
            f"the job lacks {', '.join(f'cluster.{key}' for key in missing)}",
            hint=f"write {'it' if len(missing) == 1 else 'them'} under cluster: in the job file,"
            f" see bagent guide clusters{options}",
            at=at,
        )


def _check_scheduler(cluster: ClusterSpec, name: SchedulerName, at: Position) -> None:
    """Refuse what only other schedulers have."""
    scheduler = SCHEDULERS[name]
    for other in SCHEDULERS.values():
        if other is scheduler:
            continue
        for key in other.own_keys:
            if getattr(cluster, key) and key not in scheduler.own_keys:
                raise JobError(
                    f"cluster.{key} is {other.label}'s", hint=scheduler.other_keys_hint, at=at
                )
        if cluster.launcher in other.own_launchers or cluster.stage_by in other.own_staging:
            tools = " and ".join((*other.own_launchers, *other.own_staging))
            raise JobError(
                f"{tools} are {other.label}'s", hint=scheduler.other_launchers_hint, at=at
            )


def _check_fit(cluster: ClusterSpec, nodes: int, at: Position) -> None:
    if cluster.stage_by == "mpi" and cluster.launcher == "ssh":
        raise JobError(
            "stage_by: mpi needs an MPI launcher, and ssh is none",
            at=at,
            hint="write launcher: mpiexec or srun under cluster:, or stage_by: copy",
        )
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
    """Return the named queue, or else the first, that accepts the job.

    Raises:
        JobError: none does.
    """
    walltime = cluster.walltime or 0.0
    candidates = [queue for queue in queues if cluster.queue in (None, queue.name)]
    if not candidates:
        return cluster.queue
    for queue in candidates:
        if queue.accepts(nodes, walltime):
            return queue.name
    raise JobError(
        f"no queue takes {nodes} nodes for {walltime / 3600:g} h",
        hint="; ".join(queue.limits for queue in candidates),
        at=at,
    )


def _ports(cluster: ClusterSpec, at: Position) -> tuple[int, ...]:
    """Return one port for each engine of a node; a single configured port is the first."""
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
