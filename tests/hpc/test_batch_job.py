"""The whole batch script on this machine, with stand-ins for the scheduler's programs.

``tests/real/test_slurm.py`` has requeues, cancelled jobs and lost nodes on a real SLURM.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from real.parts import free_port
from support.cli import clean_env, run_bagent
from support.jobs import results_by_id, rows, write_job
from support.run_outcomes import NO_TABLES

pytestmark = pytest.mark.slow  # minutes: run with the real parts

PROGRAMS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "mpiexec": 'while [[ $1 == -* ]]; do shift 2; done; exec "$@"',
    "scontrol": """case $1:$2 in
        show:hostnames) echo 127.0.0.1 ;;
        requeue:*) echo "scontrol $*" >>calls ;;
    esac""",
    "qsub": 'echo "qsub $*" >>calls; echo 78.server',
    "sbatch": 'echo "sbatch $*" >>calls; echo "77"',
    "squeue": "exit 1",
    "qstat": "exit 1",
}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1]"}
SIM = "bagent sim --decode 100 --output-tokens 8 --api-key $VLLM_API_KEY --port {port}"
ENGINE = f"{sys.executable} -m {SIM}"


@pytest.fixture
def env(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{words}\n")
        (folder / name).chmod(0o755)
    found = clean_env(tmp_path / "home", {"BAGENT_NODE": "127.0.0.1"})
    return found | {"PATH": f"{folder}:{found['PATH']}"}


def write(folder, count=12, **cluster):
    usual = {
        "walltime": "10m",
        "engine": ["sh", "-c", f"exec {ENGINE}"],
        "engines_per_node": 2,
        "ports": [free_port(), free_port()],
        "restarts": 0,
    }
    keys = {"backend": None, "model": None, "prompt": "say {{ text }}", "results": NO_TABLES}
    sampling = {"max_tokens": 500}
    write_job(folder, "", count, **keys, sampling=sampling, cluster=usual | cluster)


def submit(folder, env, *words):
    done = run_bagent(["submit", "job.yaml", *words], folder, env=env)
    assert done.code == 0, done.err
    (folder / "job.sh").write_text(done.out)
    return done


def run_script(folder, env):
    done = subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=90
    )
    return done.returncode, done.stdout + done.stderr


def calls(folder):
    path = folder / "calls"
    return path.read_text() if path.exists() else ""


def test_engines_start_with_a_key_of_their_own_and_every_row_is_answered(job_dir, env):
    write(job_dir, stage="rows.jsonl", stage_by="copy", stage_to=str(job_dir / "disk"))
    submit(job_dir, env, "--scheduler", "slurm", "--", "--progress", "plain")
    code, text = run_script(job_dir, env | SLURM | {"http_proxy": "http://127.0.0.1:9"})
    assert code == 0, text
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(12))
    batch = job_dir / "runs" / "job.batch" / "77.0"
    assert (batch / "ready.txt").read_text() == (batch / "hosts.txt").read_text()
    assert (job_dir / "disk" / "rows.jsonl").exists()
    assert (batch / "key").stat().st_mode & 0o077 == 0
    assert (batch / "node.sh").stat().st_mode & 0o077 == 0
    assert (batch / "key").read_text().strip() not in text
    assert "2 of 2 engines started" in text
    assert calls(job_dir) == ""


def test_the_number_of_requeues_has_an_end(job_dir, env):
    write(job_dir, requeues=1)
    submit(job_dir, env, "--scheduler", "slurm")
    more = {"SLURM_RESTART_COUNT": "1", "BAGENT_DEADLINE": "@1"}
    code, text = run_script(job_dir, env | SLURM | more)
    assert code == 75, text
    assert "went on 1 times already" in text
    assert calls(job_dir) == ""


def test_under_pbs_a_successor_goes_on(job_dir, env):
    write(job_dir)
    submit(job_dir, env, "--scheduler", "pbs")
    (job_dir / "nodes").write_text("127.0.0.1\n127.0.0.1\n")
    env |= {"PBS_JOBID": "5.server", "PBS_NODEFILE": str(job_dir / "nodes")}
    code, text = run_script(job_dir, env | {"BAGENT_DEADLINE": "@1"})
    assert code == 75, text
    script = job_dir / "runs" / "job.batch" / "5.0" / "job.sh"
    assert calls(job_dir) == f"qsub -W depend=afterany:5.server -v BAGENT_CHAIN=1 {script}\n"
    code, text = run_script(job_dir, env | {"BAGENT_CHAIN": "1"})
    assert code == 0, text
    assert len(results_by_id(job_dir)) == 12


@pytest.mark.parametrize(("scheduler", "said"), [("slurm", "sbatch --parsable"), ("pbs", "qsub")])
def test_go_submits_the_script_and_prints_only_where_it_is(job_dir, env, scheduler, said):
    write(job_dir)
    printed = submit(job_dir, env, "--scheduler", scheduler, "-A", "gene").out
    done = submit(job_dir, env, "--scheduler", scheduler, "--go", "-A", "gene")
    path = job_dir / "runs" / "job.batch" / f"job.{scheduler}.sh"
    assert (path.read_text(), done.out) == (printed, "")
    assert "gene" in printed
    assert calls(job_dir) == f"{said} {path}\n"
    assert "submitted job 7" in done.err


def test_a_refusal_of_the_scheduler_is_passed_on(job_dir, env, tmp_path):
    write(job_dir)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    done = run_bagent(["submit", "job.yaml", "--scheduler", "slurm", "--go"], job_dir, env=env)
    assert (done.code, done.out) == (2, "")
    assert "invalid account" in done.err
    sbatch.unlink()
    only = env | {"PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}"}
    done = run_bagent(["submit", "job.yaml", "--scheduler", "slurm", "--go"], job_dir, env=only)
    assert done.code == 2
    assert "submit by hand" in done.err
