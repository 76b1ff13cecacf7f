"""PBS: OpenPBS and PBS Pro."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.hpc.schedulers.base import Ask, Scheduler, clock

if TYPE_CHECKING:
    from bagent.hpc.parsl import PoolPlan
    from bagent.hpc.plan import BatchPlan
    from bagent.job.spec.cluster import ClusterSpec

_STIME = "%a %b %d %H:%M:%S %Y"


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
