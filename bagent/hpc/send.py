"""Handing a batch script to the scheduler."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bagent.errors import UsageError, WriteError
from bagent.files import make_private, write_private
from bagent.hpc.plan import Plan

PROGRAMS = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}


def write_script(plan: Plan, text: str) -> Path:
    """Write the script beside the run, so that it can be looked at and sent again.

    It may hold secrets of ``cluster.env``, so only its owner may read it.

    Raises:
        WriteError: it cannot be written.
    """
    path = plan.batch_folder / f"job.{plan.scheduler}.sh"
    try:
        make_private(path.parent)
        write_private(path, text)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise WriteError(f"cannot write {path}: {words}") from None
    return path


def submit_script(plan: Plan, path: Path) -> str:
    """Submit the script from the folder in which the job will run; returns the job's id.

    Raises:
        UsageError: the scheduler's program is missing or refuses; its words are passed on.
    """
    program = PROGRAMS[plan.scheduler]
    try:
        done = subprocess.run(
            [*program, str(path)],
            cwd=plan.request.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise UsageError(
            f"{program[0]} cannot be run: {(error.strerror or str(error)).lower()}",
            hint=f"submit by hand where it is: {program[0]} {path}",
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(f"{program[0]} refused: {words}", hint=f"the script is {path}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
