"""Batch schedulers, one class each.

To add one, LSF say: its name and variables in :mod:`bagent.batch_env`, a class like
:class:`~bagent.hpc.schedulers.pbs.Pbs` in a module here and in :data:`SCHEDULERS`, the shell
functions of its jobs in ``deploy/NAME/job.sh``, and a case in ``deploy/lib.sh`` for a launcher of
its own.

- :mod:`~bagent.hpc.schedulers.base`: what bagent needs of each.
- :mod:`~bagent.hpc.schedulers.slurm`, :mod:`~bagent.hpc.schedulers.pbs`: SLURM and PBS.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagent.batch_env import SchedulerName
from bagent.hpc.schedulers.base import Scheduler
from bagent.hpc.schedulers.pbs import Pbs
from bagent.hpc.schedulers.slurm import Slurm

SCHEDULERS: Mapping[SchedulerName, Scheduler] = {
    scheduler.name: scheduler for scheduler in (Slurm(), Pbs())
}
