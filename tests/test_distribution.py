"""The wheel works in an empty environment, without the source."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 600


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program and return it; its output is in the error if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_distribution_has_a_name_of_its_own_and_the_command_keeps_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "bagent-batch"
    assert list(project["scripts"]) == ["bagent"]


@pytest.mark.slow
@pytest.mark.timeout(LONGEST)
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "--directory", tmp_path / "dist", cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("bagent_batch-*.whl")
    (archive,) = (tmp_path / "dist").glob("bagent_batch-*.tar.gz")
    with tarfile.open(archive) as source:
        assert [name for name in source.getnames() if name.endswith("/jobs/sentiment/job.yaml")]
    names = zipfile.ZipFile(wheel).namelist()
    assert "bagent/guides/jobs.md" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    run(environment / "bin" / "pip", "install", "--quiet", wheel, cwd=tmp_path)
    bagent = environment / "bin" / "bagent"
    where = run(environment / "bin" / "python", "-c", "import bagent; print(bagent.__file__)",
                cwd=tmp_path)  # fmt: skip
    assert where.stdout.startswith(str(environment))

    assert "jobs" in run(bagent, "guide", cwd=tmp_path).stdout
    assert "# Job files" in run(bagent, "guide", "jobs", cwd=tmp_path).stdout
    run(bagent, "init", "genes", cwd=tmp_path)
    run(bagent, "check", "genes/job.yaml", cwd=tmp_path)
    assert "8 ok, 0 failed" in run(bagent, "run", "genes/job.yaml", cwd=tmp_path).stderr
    assert "TP53" in run(bagent, "results", "genes", cwd=tmp_path).stdout
    run(bagent, "report", "genes", cwd=tmp_path)
    assert "<html" in (tmp_path / "runs" / "genes" / "report.html").read_text()
    script = run(bagent, "submit", "genes/job.yaml", "--scheduler", "slurm", "--set",
                 "cluster={nodes: 1, engine: serve, gpus_per_node: 0, walltime: 1h}", "-A", "me",
                 cwd=tmp_path)  # fmt: skip
    assert "#SBATCH" in script.stdout

    hostfile = tmp_path / "hosts.txt"
    sim = subprocess.Popen(
        [bagent, "sim", "--port", "0", "--write-hostfile", hostfile], cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + 60
        while not hostfile.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        again = run(bagent, "run", "genes/job.yaml", "--hostfile", "hosts.txt", "--name", "fleet",
                    cwd=tmp_path)  # fmt: skip
        assert "8 ok, 0 failed" in again.stderr
    finally:
        sim.terminate()
        assert sim.wait(30) == 0
