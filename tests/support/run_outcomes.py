"""What the tests of this folder share: one way to run a job and to look at its end."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cli import Completed, clean_env, run_bagent, run_here
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import Script, ok

Json = Any

RUN = ["run", "job.yaml", "--progress", "plain"]
NO_TABLES = {"duckdb": False, "parquet": False}
"""``results:`` of runs whose tables nobody reads: it saves the child process that makes them."""

CUT = ok("half", finish_reason="length", usage={"prompt_tokens": 5, "completion_tokens": 64})
"""An answer that ended at its limit of tokens."""


def run_rows(folder: Path, *options: str, **how: Any) -> tuple[Completed, dict[Json, Json]]:
    """Run ``job.yaml`` with its rows on stdout; the end, and the result rows by id.

    Fails where an id comes twice, where stdout holds anything but rows, or on a traceback.

    Args:
        options: further options of ``bagent run``.
        how: further arguments of ``run_here``; with ``env`` those of ``run_bagent``.
    """
    run = run_bagent if "env" in how or "timeout" in how else run_here
    done = run([*RUN, "-o", "-", *options], folder, **how)
    assert "Traceback" not in done.err, done.err
    found: dict[Json, Json] = {}
    for row in done.lines():
        assert row["id"] not in found, f"row {row['id']} is there twice"
        found[row["id"]] = row
    return done, found


def run_script(
    fs: FakeServer, folder: Path, script: Script, **keys: Json
) -> tuple[Completed, dict[Json, Json]]:
    """Run one row for each list of replies, all at once; returns what ``run_rows`` does.

    Args:
        keys: keys of the job file.
    """
    fs.set_script(script)
    rows = [{"id": name, "text": "x"} for name in script]
    usual: dict[str, Json] = {"results": NO_TABLES, "limits": {"retries": 2, "concurrency": 50}}
    write_job(folder, fs.url, rows, **usual | keys)
    return run_rows(folder)


def shell(command: str, folder: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Run a command line in ``folder`` as a batch script would; stdin is empty."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=clean_env(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def error_of(done: Completed) -> str:
    """The one line of an error that was found before anything was sent; fails on anything else."""
    assert done.code == 2, (done.code, done.err)
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("bagent: error: ")
    return lines[0].removeprefix("bagent: error: ")


def statuses(found: dict[Json, Json]) -> dict[Json, str]:
    """Status by row id."""
    return {name: row["status"] for name, row in found.items()}


def last_line(done: Completed) -> str:
    """The command in the last line of a summary."""
    label, command = done.err.splitlines()[-1].split(maxsplit=1)
    assert label == "next"
    return command


def type_next(bagent: Callable[..., Completed], done: Completed) -> Completed:
    """Type the command in the last line of a summary."""
    words = shlex.split(last_line(done))
    assert words[0] == "bagent"
    return bagent(words[1:])
