"""Jobs over a real SLURM: their file, their way to the end, and every row answered once."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from real.serve_slurm import SlurmCluster
from support.cli import run_bagent
from support.jobs import journal_lines, results_by_id, rows, write_job
from support.run_outcomes import NO_TABLES

T = TypeVar("T")

NEEDS_SLURM = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons run as root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="tests/real/install_slurm.sh"),
]
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
BAGENT = [sys.executable, "-m", "bagent"]
SIM = [*BAGENT, "sim", "--decode", "60", "--output-tokens", "30"]
ENGINE = f"exec {' '.join(SIM)} --host {{node}} --port {{port}} --api-key $VLLM_API_KEY"
"""A simulated engine on a node, as a line of a shell."""


def write_cluster_job(folder: Path, count: int, cluster: dict[str, Any], **keys: Any) -> None:
    """Write a job of ``count`` rows for a batch job of ten minutes."""
    usual: dict[str, Any] = {
        "backend": None,
        "model": None,
        "prompt": "say {{ text }}",
        "sampling": {"max_tokens": 500},
        "limits": {"concurrency": 6},
        "results": NO_TABLES,
        "cluster": {"scheduler": "slurm", "walltime": "10m"} | cluster,
    }
    write_job(folder, "", count, **usual | keys)


def submit(folder: Path, env: Mapping[str, str], *more: str) -> str:
    """Submit the job of the folder; return its number."""
    done = run_bagent(["submit", "job.yaml", "--go", *more], folder, env=env)
    assert done.code == 0, done.err
    number = re.search(r"submitted job (\d+)", done.err)
    assert number is not None, done.err
    return number[1]


def wait_for(slurm: SlurmCluster, number: str, done: Callable[[], T], seconds: float = 150) -> T:
    """Wait until a job has got somewhere; return what ``done`` says then."""
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, f"{slurm.job(number)}\n{slurm.logs()}"
        time.sleep(0.5)
    return value


def wait_for_end(slurm: SlurmCluster, number: str, seconds: float = 150) -> str:
    """Wait until a job is over; return its state."""

    def state() -> str:
        found = slurm.job(number)["JobState"]
        return found if found in ENDED else ""

    return wait_for(slurm, number, state, seconds)


def output(folder: Path, number: str) -> str:
    """What a job printed."""
    return (folder / f"job.{number}.out").read_text()


def done_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that are answered well, once for each time that they are in the journal."""
    lines = journal_lines(folder / "runs" / "job")
    return [line for line in lines if line.get("status") == "ok"]


def assert_every_row_once(folder: Path, count: int) -> dict[Any, dict[str, Any]]:
    """All rows are answered, and none was answered twice; return them by id."""
    found = results_by_id(folder)
    assert sorted(found) == sorted(row["id"] for row in rows(count))
    assert {row["status"] for row in found.values()} == {"ok"}
    assert max(Counter(line["id"] for line in done_rows(folder)).values()) == 1
    return found
