"""Every scheduler that a job may name has all that batch jobs need."""

from __future__ import annotations

import subprocess
from typing import get_args

import pytest

from bagent.batch_env import SchedulerName
from bagent.hpc.parsl import PoolPlan, _provider
from bagent.hpc.schedulers import SCHEDULERS
from bagent.hpc.site import deploy_folder
from bagent.job.spec.cluster import ClusterSpec

NAMES = get_args(SchedulerName)


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_functions_that_the_script_calls_are_there(name):
    functions = ("job_id", "restart_count", "broadcast_file", "go_on")
    script = f"{(deploy_folder() / name / 'job.sh').read_text()}\ndeclare -F {' '.join(functions)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(functions)


@pytest.mark.parametrize(
    ("name", "options"),
    [("slurm", "#SBATCH --no-kill\n#SBATCH --x"), ("pbs", "#PBS -l place=scatter\n#PBS --x")],
)
def test_jobs_of_workers_have_the_directives_of_their_scheduler(name, options):
    lines = SCHEDULERS[name].worker_directives(ClusterSpec())
    plan = PoolPlan(name, "python", 1, nodes=3, account="a1", queue="q", options=(*lines, "--x"))
    provider = _provider(plan)
    assert provider.scheduler_options.strip().startswith(options)
    assert (provider.nodes_per_block, provider.walltime) == (3, "01:00:00")
