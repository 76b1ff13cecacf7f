"""Queries to the scheduler's programs: a job's end and its nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from bagent.hpc.allocation import Allocation, read_allocation
from bagent.hpc.schedulers import SCHEDULERS
from bagent.hpc.schedulers.base import Ask

ANSWER_SECONDS = 10.0
"""Timeout of a scheduler's program."""


def ask(command: Sequence[str]) -> str:
    """Return the stdout of ``command``, empty if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def job_end(allocation: Allocation, ask: Ask = ask) -> float | None:
    """Return when the job will be killed in Unix seconds, None if unknown."""
    if allocation.end is not None or allocation.scheduler is None or allocation.job_id is None:
        return allocation.end
    return SCHEDULERS[allocation.scheduler].job_end(allocation.job_id, ask)


def node_names(allocation: Allocation, ask: Ask = ask) -> list[str]:
    """Return the distinct nodes of the job in the scheduler's order; none outside of a job."""
    if allocation.node_file is not None:
        try:
            lines = allocation.node_file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            lines = []
        if lines:
            return list(dict.fromkeys(lines))
    if allocation.node_list is not None and allocation.scheduler is not None:
        nodes = SCHEDULERS[allocation.scheduler].expand_nodes(allocation.node_list, ask)
        return list(dict.fromkeys(nodes))
    return []


def deadline_step(argv: list[str]) -> int:
    """Print ``@EPOCH`` for BAGENT_DEADLINE, some seconds before the job's end."""
    parser = argparse.ArgumentParser(prog="bagent.hpc deadline")
    parser.add_argument("--walltime", type=float, required=True, help="seconds, if nobody tells")
    parser.add_argument("--less", type=float, default=0.0, help="seconds before the end")
    args = parser.parse_args(argv)
    end = job_end(read_allocation(os.environ)) or time.time() + args.walltime
    sys.stdout.write(f"@{end - args.less:.0f}\n")
    return 0
