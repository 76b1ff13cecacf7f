"""The parsl executor on a real SLURM: batch jobs of its own, and the nodes of one it runs in."""

from __future__ import annotations

import time

import msgspec

from bagent.store.lock import owners
from real.slurm_jobs import (
    ENGINE,
    NEEDS_SLURM,
    assert_every_row_once,
    output,
    submit,
    wait_for_end,
    write_cluster_job,
)
from support.cli import Running

pytestmark = NEEDS_SLURM

RUN = ["run", "job.yaml", "--executor", "parsl", "--progress", "plain", "--wait-hosts", "60s"]


def test_a_chunk_on_a_crashed_node_is_done_by_another_batch_job(
    slurm, job_dir, slurm_env, slurm_engine
):
    write_cluster_job(job_dir, 120, {"jobs": 2, "chunks": 4}, backend=slurm_engine)
    run_dir = job_dir / "runs" / "job"
    with Running(RUN, job_dir, slurm.env) as running:
        end = time.monotonic() + 120
        while len(owners(run_dir)) < 2 or not _rows_of_all(run_dir):
            assert time.monotonic() < end, f"{running.err}\n{slurm.logs()}"
            time.sleep(0.3)
        part, record = next(iter(owners(run_dir).items()))
        assert record.host in slurm.nodes
        slurm.crash(record.host)
        try:
            done = running.finish(240)
        finally:
            slurm.revive(record.host)
    assert done.code == 0, f"{done.err}\n{slurm.logs()}"
    assert f"chunk {part} was lost" in done.err
    assert_every_row_once(job_dir, 120)
    assert slurm.run("squeue", "--noheader").strip() == ""


def _rows_of_all(run_dir):
    """Whether every part that was begun has rows: somebody is in the middle of each."""
    parts = list((run_dir / "journal").glob("rows-*.jsonl"))
    return len(parts) >= 2 and all(path.stat().st_size for path in parts)


def test_inside_a_batch_job_chunks_are_done_on_its_nodes(slurm, job_dir, slurm_env):
    cluster = {"nodes": 3, "engine": ["sh", "-c", ENGINE], "ports": 18700, "chunks": 6}
    write_cluster_job(job_dir, 60, cluster | {"min_fraction": 1, "start_timeout": "2m"})
    number = submit(job_dir, slurm_env, "--", "--executor", "parsl")
    state, text = wait_for_end(slurm, number, 180), output(job_dir, number)
    assert state == "COMPLETED", text
    assert "6 chunks, 3 at once on 3 nodes" in text
    assert_every_row_once(job_dir, 60)
    starts = [
        start for path in (job_dir / "runs/job").glob("run-*.json") for start in _starts(path)
    ]
    assert {start["host"] for start in starts} == set(slurm.nodes)


def _starts(path):
    return msgspec.json.decode(path.read_bytes())["starts"]
