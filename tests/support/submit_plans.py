"""Plans and scripts for tests, with paths that are the same everywhere."""

from __future__ import annotations

from pathlib import Path

from bagent.hpc.plan import BatchPlan, ResourceRequest, make_plan
from bagent.hpc.site import load_site
from bagent.job.load import JobRequest, load_job

HOME = Path("/home/ada/genes")

JOB = """\
name: review
model: meta-llama/Llama-3.1-8B-Instruct
input: genes.jsonl
prompt: "Review {{ symbol }}"
cluster:
"""

CLUSTER = """\
  nodes: 2
  walltime: 45m
  engine: vllm serve meta-llama/Llama-3.1-8B-Instruct
"""
"""Of a site that says how many GPUs a node has."""

GPUS = "  gpus_per_node: 4\n"


def plan_of(cluster: str = CLUSTER + GPUS, site: str = "generic", **options: object) -> BatchPlan:
    """The plan of the usual job with these lines under ``cluster:``."""
    account = {"cluster.account": options.pop("account", None)}
    job = load_job(JobRequest(path=Path("job.yaml"), text=JOB + cluster, options=account, cwd=HOME))
    given: dict[str, object] = {
        "job_file": HOME / "job.yaml",
        "cwd": HOME,
        "python": "/opt/bagent/bin/python",
        "scheduler": "slurm" if site == "generic" else None,
    }
    return make_plan(job, load_site(site), ResourceRequest(**(given | options)))  # type: ignore[arg-type]
