"""Where the workers of the parsl executor run, by the job's section and the place it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.errors import JobError, UsageError
from bagent.hpc.parsl import BatchSettings, make_pool_plan
from bagent.job.load import JobRequest, load_job
from support.submit_plans import JOB

CWD = Path("/home/ada/genes")
IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


def plan(cluster="", env=None, workers=1):
    text = JOB + (cluster or "  nodes: 1\n")
    job = load_job(JobRequest(path=Path("job.yaml"), text=text, cwd=CWD))
    around = BatchSettings(env or {}, CWD, "/opt/bin/python", lambda words: "n1\nn2\nn3\n")
    return make_pool_plan(job, workers, around)


def test_inside_a_batch_job_workers_run_on_its_nodes_by_its_launcher():
    found = plan("  scheduler: pbs\n", IN_SLURM, workers=2)
    assert (found.where, found.nodes, found.launcher, found.slots) == ("allocation", 3, "srun", 6)


def test_bad_nodes_of_the_batch_job_get_no_workers():
    found = plan("  exclude: [n2]\n  launcher: ssh\n", IN_SLURM)
    assert (found.nodes, found.launcher, found.excluded) == (2, "ssh", ("n2",))
    with pytest.raises(UsageError, match="no node is left"):
        plan("  exclude: [n1, n2, n3]\n", IN_SLURM)


def test_outside_workers_run_in_slurm_jobs_with_what_the_section_says():
    found = plan(
        "  scheduler: slurm\n  nodes: 4\n  jobs: 3\n  walltime: 90m\n  account: a1\n  queue: long\n"
        "  qos: low\n  reservation: r1\n  exclude: [n9]\n  modules: [py]\n  setup: [umask 077]\n"
        '  directives: ["--mail-type=END"]\n',
        workers=2,
    )
    assert (found.where, found.slots, found.walltime) == ("slurm", 24, "01:30:00")
    assert (found.account, found.queue, found.qos) == ("a1", "long", "low")
    assert found.options == ("--no-kill", "--reservation=r1", "--exclude=n9", "--mail-type=END")
    assert found.set_up == f"cd {CWD}\nmodule load py\numask 077\n"


def test_outside_a_site_says_what_its_jobs_need():
    found = plan("  site: aurora\n  nodes: 300\n  walltime: 6h\n  account: a1\n")
    assert (found.where, found.launcher, found.queue) == ("pbs", "pals", "prod")
    assert found.options[:2] == ("-l place=scatter", "-l filesystems=home:flare")


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("  scheduler: slurm\n", "cluster.walltime"),
        ("  site: polaris\n  walltime: 1h\n", "cluster.account"),
        ("  site: polaris\n  walltime: 90h\n  account: a\n", "no queue takes 1 nodes for 90 h"),
    ],
)
def test_what_a_batch_job_lacks_is_said_before_it_is_sent(cluster, words):
    with pytest.raises(JobError, match=words):
        plan(cluster)
