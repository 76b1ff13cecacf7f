"""Queries to the scheduler's programs: a job's end and its nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from bagent.hpc.allocation import Allocation, read_allocation

ANSWER_SECONDS = 10.0
"""Timeout of a scheduler's program."""

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns its stdout, empty if it failed."""

_STIME = "%a %b %d %H:%M:%S %Y"


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
    """Return when the job will be killed in Unix seconds, None if unknown.

    Older SLURM sets no variable, so ``squeue`` and ``scontrol`` are asked. With ``qstat`` it is the
    start plus the wall time.
    """
    if allocation.end is not None or allocation.job_id is None:
        return allocation.end
    job = allocation.job_id
    if allocation.scheduler == "slurm":
        end = _local_time(ask(["squeue", "--noheader", f"--jobs={job}", "--format=%e"]))
        return end or _local_time(_field(ask(["scontrol", "show", "job", job]), "EndTime"))
    return _pbs_end(ask(["qstat", "-f", "-F", "json", job])) or _plain_pbs_end(
        ask(["qstat", "-f", job])
    )


def node_names(allocation: Allocation, ask: Ask = ask) -> list[str]:
    """Return the distinct nodes of the job in the scheduler's order; none outside of a job."""
    if allocation.node_file is not None:
        try:
            lines = allocation.node_file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            lines = []
        if lines:
            return list(dict.fromkeys(lines))
    if allocation.node_list is not None:
        # SLURM itself expands its bracket notation.
        return list(
            dict.fromkeys(ask(["scontrol", "show", "hostnames", allocation.node_list]).split())
        )
    return []


def _local_time(text: str) -> float | None:
    first = text.strip().partition("\n")[0]
    try:
        return datetime.fromisoformat(first).timestamp()
    except (ValueError, OverflowError, OSError):
        return None  # N/A, Unknown, NONE


def _field(text: str, name: str) -> str:
    for word in text.split():
        key, _, value = word.partition("=")
        if key == name:
            return value
    return ""


def _pbs_end(text: str) -> float | None:
    try:
        jobs: Any = msgspec.json.decode(text.encode())["Jobs"]
        (job,) = jobs.values()
        return _start_and_walltime(job["stime"], job["Resource_List"]["walltime"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _plain_pbs_end(text: str) -> float | None:
    fields = {
        name.strip(): value.strip()
        for name, mark, value in (line.partition(" = ") for line in text.splitlines())
        if mark
    }
    try:
        return _start_and_walltime(fields["stime"], fields["Resource_List.walltime"])
    except (KeyError, ValueError):
        return None


def _start_and_walltime(started: str, walltime: str) -> float:
    seconds = 0
    for part in str(walltime).split(":"):
        seconds = seconds * 60 + int(part)
    return datetime.strptime(started, _STIME).timestamp() + seconds


def deadline_step(argv: list[str]) -> int:
    """Print ``@EPOCH`` for BAGENT_DEADLINE, some seconds before the job's end."""
    parser = argparse.ArgumentParser(prog="bagent.hpc deadline")
    parser.add_argument("--walltime", type=float, required=True, help="seconds, if nobody tells")
    parser.add_argument("--less", type=float, default=0.0, help="seconds before the end")
    args = parser.parse_args(argv)
    end = job_end(read_allocation(os.environ)) or time.time() + args.walltime
    sys.stdout.write(f"@{end - args.less:.0f}\n")
    return 0
