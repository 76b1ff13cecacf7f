"""Workers of ``--executor parsl``, as the job's ``cluster:`` section configures them.

Inside a batch job they run on its nodes. Outside, if the section names a scheduler, they run in
batch jobs of their own, each of ``nodes`` nodes; else on this machine.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from bagent.batch_env import SchedulerName
from bagent.errors import JobError, MissingPackage, NeedsPerson
from bagent.hpc.allocation import (
    ask,
    engine_nodes,
    node_names,
    on_every_node,
    read_allocation,
    set_up_script,
)
from bagent.hpc.plan import choose_queue
from bagent.hpc.schedulers import SCHEDULERS, Ask, clock
from bagent.hpc.site import GENERIC, load_site, merged
from bagent.job.spec.cluster import ClusterSpec
from bagent.job.spec.job import Job

Where = Literal["here", "allocation"] | SchedulerName


class PoolPlan(msgspec.Struct, frozen=True):
    """How workers are started, and how many.

    ``where`` is ``here`` (this machine), ``allocation`` (the nodes of the batch job around this
    process), or the scheduler of ``jobs`` batch jobs of ``nodes`` nodes each.
    """

    where: Where
    python: str
    workers: int  # processes on each node
    nodes: int = 1
    jobs: int = 1
    launcher: str | None = None
    account: str | None = None
    queue: str | None = None
    qos: str | None = None
    constraint: str | None = None
    select: str = ""
    walltime: str = "01:00:00"
    options: tuple[str, ...] = ()  # directives without their mark
    excluded: tuple[str, ...] = ()
    set_up: str = ""  # shell lines at the start of each batch job
    chunks: int | None = None

    @property
    def scheduler(self) -> SchedulerName | None:
        """The scheduler of the workers' own batch jobs; None if they have none."""
        return None if self.where == "here" or self.where == "allocation" else self.where

    @property
    def slots(self) -> int:
        """How many chunks run at once if all nodes are there."""
        return self.jobs * self.nodes * self.workers


class BatchSettings(msgspec.Struct, frozen=True):
    """The command's environment, folder and interpreter, and how the scheduler is queried."""

    env: Mapping[str, str]
    cwd: Path
    python: str
    ask: Ask = ask


def make_pool_plan(job: Job, workers: int, settings: BatchSettings) -> PoolPlan:
    """Return the plan of the workers for ``job``, with ``workers`` on each node.

    Raises:
        JobError: the section lacks something, or no queue takes such a job.
        UsageError: there is no such site, or no node is left.
    """
    section = job.cluster or ClusterSpec()
    site = load_site(section.site or GENERIC)
    cluster = merged(site, section)
    allocation = read_allocation(settings.env)
    scheduler = allocation.scheduler or cluster.scheduler
    plan = PoolPlan("here", settings.python, workers, chunks=cluster.chunks)
    if scheduler is None:
        return plan
    launcher = cluster.launcher or SCHEDULERS[scheduler].launcher
    plan = msgspec.structs.replace(plan, launcher=launcher, excluded=cluster.exclude)
    if allocation.scheduler is not None:
        names = engine_nodes(node_names(allocation, settings.ask) or ["here"], cluster.exclude)
        return msgspec.structs.replace(plan, where="allocation", nodes=len(names))
    at = job.source.position(("cluster",))
    missing = [key for key in ("walltime", *site.needs) if not getattr(cluster, key)]
    if missing:
        raise JobError(
            f"the job lacks {', '.join(f'cluster.{key}' for key in missing)}",
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
        options=(*SCHEDULERS[scheduler].worker_directives(cluster), *cluster.directives),
        set_up=set_up_script(settings.cwd, cluster.modules, cluster.setup),
    )


LABEL = "bagent"

HEARTBEAT_SECONDS = 2
LOST_SECONDS = 30
"""A node without a heartbeat for so long is lost: half the time after which the owner file of its
chunk is stale, so that it costs no extra time."""

POLL_MS = 100
"""How often Parsl's processes poll for work: chunks take minutes, and polling costs CPU."""

_POOL = "parsl.executors.high_throughput.process_worker_pool"


def check_parsl() -> None:
    """Check that Parsl is installed, without importing it.

    Raises:
        MissingPackage: it is not.
    """
    if find_spec("parsl") is None:
        raise MissingPackage(
            "--executor parsl needs Parsl, which is not installed",
            hint="pip install 'parsl>=2026.10'",
        )


class Pool:
    """Workers that run tasks; created by :func:`open_pool`.

    Attributes:
        folder: for Parsl's logs and scripts, and other files of this start.
    """

    def __init__(self, kernel: Any, app: Callable[..., Future[Any]], provider: Any) -> None:
        self.folder = Path(kernel.run_dir).absolute()
        self._kernel = kernel
        self._app = app
        self._provider = provider

    def submit(self, *arguments: Any) -> Future[Any]:
        """Have a worker call the function of this pool with ``arguments``.

        The future fails with an exception of :func:`is_lost` if the worker or its node is lost, and
        with any other if there will be no workers.
        """
        return self._app(*arguments)

    @property
    def jobs_begun(self) -> int:
        """How many batch jobs or launches were started."""
        return len(self._provider.resources)


def is_lost(error: BaseException) -> bool:
    """Return whether a task failed because its worker or node was lost."""
    from parsl.executors.high_throughput.errors import ManagerLost, WorkerLost

    return isinstance(error, (ManagerLost, WorkerLost))


@contextlib.contextmanager
def open_pool(plan: PoolPlan, function: Callable[..., Any], folder: Path) -> Iterator[Pool]:
    """Start workers, and end them with the block.

    Args:
        plan: what to start.
        function: what the workers call; they must be able to import it.
        folder: for Parsl's logs, on a disk that the workers' nodes share.

    Raises:
        NeedsPerson: Parsl could not be started.
    """
    from parsl.app.app import python_app
    from parsl.config import Config
    from parsl.dataflow.dflow import DataFlowKernel
    from parsl.errors import ParslError

    provider = _provider(plan)
    closing = folder.absolute() / f".closing-{time.time_ns()}"
    try:
        kernel = DataFlowKernel(
            Config(
                executors=[_executor(plan, provider, closing)],
                # The caller, which knows what a lost chunk has done, submits it again.
                retries=0,
                run_dir=str(folder),
                strategy="simple",
                strategy_period=1,
                usage_tracking=0,
            )
        )
    except (ParslError, OSError) as error:
        raise NeedsPerson(f"Parsl could not start: {error}", hint=f"see {folder}") from error
    try:
        yield Pool(kernel, python_app(function, data_flow_kernel=kernel), provider)
    finally:
        with contextlib.suppress(OSError):
            closing.touch()
        try:
            kernel.cleanup()
        finally:
            with contextlib.suppress(OSError):
                closing.unlink()


def _executor(plan: PoolPlan, provider: Any, closing: Path) -> Any:
    from parsl.executors import HighThroughputExecutor
    from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

    python = plan.python
    launch = DEFAULT_LAUNCH_CMD.replace("process_worker_pool.py", f"{python} -m {_POOL}")
    executor = HighThroughputExecutor(
        label=LABEL,
        provider=provider,
        # By path and module, independent of PATH.
        launch_cmd=launch,
        interchange_launch_cmd=[sys.executable, "-m", "bagent.hpc.interchange", str(closing)],
        address="127.0.0.1",
        max_workers_per_node=plan.workers,
        cores_per_worker=1e-6,  # only the number above counts
        poll_period=POLL_MS,
        heartbeat_period=HEARTBEAT_SECONDS,
        heartbeat_threshold=LOST_SECONDS,
        encrypted=True,
    )
    if plan.where != "here":
        # Listen everywhere, and let workers find the address that reaches this machine. Parsl's
        # own list of addresses would query a server on the internet, so an address is set above.
        executor.address = None
        executor.all_addresses = _addresses()
    return executor


def _addresses() -> set[str]:
    """Return the IPv4 addresses of this machine."""
    import socket

    import psutil

    addresses = {
        address.address
        for card in psutil.net_if_addrs().values()
        for address in card
        if address.family == socket.AF_INET
    }
    return addresses or {"127.0.0.1"}


def _provider(plan: PoolPlan) -> Any:
    blocks = {"init_blocks": plan.jobs, "min_blocks": 0, "max_blocks": plan.jobs}
    if plan.where == "here":
        from parsl.providers import LocalProvider

        return LocalProvider(**blocks)
    launcher = _launcher(plan)
    if plan.scheduler is None:
        from parsl.providers import LocalProvider

        return LocalProvider(nodes_per_block=plan.nodes, launcher=launcher, **blocks)
    scheduler = SCHEDULERS[plan.scheduler]
    arguments = blocks | {
        "nodes_per_block": plan.nodes,
        "launcher": launcher,
        "account": plan.account,
        "walltime": plan.walltime,
        "worker_init": plan.set_up,
        "scheduler_options": "\n".join(f"{scheduler.directive} {line}" for line in plan.options),
    }
    return scheduler.parsl_provider(plan, arguments)


def _launcher(plan: PoolPlan) -> Any:
    """Return a launcher that starts workers as ``bagent submit`` starts engines.

    Parsl's own support neither overlapping steps nor excluded nodes.
    """
    from parsl.launchers.base import Launcher

    class SiteLauncher(Launcher):  # type: ignore[misc]
        def __call__(self, command: str, per_node: int, nodes: int, script_dir: str = "") -> str:
            scripts = Path(script_dir).absolute()
            script = on_every_node(command, plan.launcher or "", plan.python, plan.excluded)
            return f"SCRIPTS={scripts}\n{script}"

    return SiteLauncher()
