"""The parsl executor on a real SLURM: batch jobs of its own, and the nodes of one it runs in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter

import msgspec
import pytest
import yaml

from bagent.store.lock import owners
from real.serve_slurm import free_ports
from support.cli import Running, clean_env, run_bagent
from support.jobs import journal_lines, results_by_id, rows, write_rows

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons run as root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="tests/real/install_slurm.sh"),
]

RUN = ["run", "job.yaml", "--executor", "parsl", "--progress", "plain", "--wait-hosts", "60s"]
SIM = ["sim", "--decode", "60", "--output-tokens", "30"]


@pytest.fixture
def env(slurm, job_dir):
    return clean_env(job_dir / ".home", slurm.env)


@pytest.fixture
def engine(slurm):
    """A simulated engine on this machine, where the nodes can reach it."""
    (port,) = free_ports(1)
    place = ["--host", slurm.address, "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bagent", *SIM, *place], stderr=subprocess.DEVNULL
    )
    yield f"vllm://{slurm.address}:{port}"
    process.terminate()
    process.wait(10)


def write(folder, count, cluster, **keys):
    write_rows(folder / "rows.jsonl", count)
    job = {
        "name": "job",
        "input": "rows.jsonl",
        "prompt": "say {{ text }}",
        "sampling": {"max_tokens": 500},
        "limits": {"concurrency": 6},
        "results": {"parquet": False, "duckdb": False},
        "cluster": {"scheduler": "slurm", "walltime": "10m"} | cluster,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job | keys))


def assert_every_row_once(folder, count):
    found = results_by_id(folder)
    assert sorted(found) == sorted(row["id"] for row in rows(count))
    assert {row["status"] for row in found.values()} == {"ok"}
    ok = [line["id"] for line in journal_lines(folder / "runs/job") if line.get("status") == "ok"]
    assert max(Counter(ok).values()) == 1


def test_a_chunk_on_a_crashed_node_is_done_by_another_batch_job(slurm, job_dir, env, engine):
    write(job_dir, 120, {"jobs": 2, "chunks": 4}, backend=engine)
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


def test_inside_a_batch_job_chunks_are_done_on_its_nodes(slurm, job_dir, env):
    sim = shlex.join([sys.executable, "-m", "bagent", *SIM])
    place = "--host {node} --port {port} --api-key $VLLM_API_KEY"
    cluster = {"nodes": 3, "engine": ["sh", "-c", f"exec {sim} {place}"], "ports": 18700}
    write(job_dir, 60, cluster | {"chunks": 6, "min_fraction": 1, "start_timeout": "2m"})
    done = run_bagent(["submit", "job.yaml", "--go", "--", "--executor", "parsl"], job_dir, env=env)
    assert done.code == 0, done.err
    number = re.search(r"submitted job (\d+)", done.err)[1]
    end = time.monotonic() + 180
    while slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < end, slurm.logs()
        time.sleep(0.5)
    text = (job_dir / f"job.{number}.out").read_text()
    assert slurm.job(number)["JobState"] == "COMPLETED", text
    assert "6 chunks, 3 at once on 3 nodes" in text
    assert_every_row_once(job_dir, 60)
    starts = [
        start for path in (job_dir / "runs/job").glob("run-*.json") for start in _starts(path)
    ]
    assert {start["host"] for start in starts} == set(slurm.nodes)


def _starts(path):
    return msgspec.json.decode(path.read_bytes())["starts"]
