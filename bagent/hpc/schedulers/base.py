"""What bagent needs of a batch scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from bagent.batch_env import SchedulerName

if TYPE_CHECKING:
    from bagent.hpc.parsl import PoolPlan
    from bagent.hpc.plan import BatchPlan
    from bagent.job.spec.cluster import ClusterSpec

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns its stdout, empty if it failed."""


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
