"""Fixtures that every test may use: a scripted server, a folder for a job, the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bagent.cli.main import main
from support.cli import Completed, clean_env, run_bagent
from support.fake_server import FakeServer

LONGEST = (
    "tests/runs/test_kill.py",
    "tests/runs/test_exit_codes.py",
    "tests/jobs/",
    "tests/cases/",
)
"""What takes longest, the longest first. Files go whole to one of several processes: what begins
last should be short, so that none of them is alone at the end."""

LOOKS = ("compare", "results", "query", "status", "report", "prices")
"""Commands that change nothing but files and end by themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items.sort(key=lambda item: next(
        (place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
    ))  # fmt: skip


@pytest.fixture
def fs() -> Iterator[FakeServer]:
    """A scripted server that answers every row; ``fs.set_script({...})`` changes that."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """An empty folder for a job file, its rows and its runs."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


@pytest.fixture
def bagent(job_dir: Path) -> Callable[..., Completed]:
    """``bagent(["run", "job.yaml"], ...)`` in ``job_dir``; see ``run_bagent``."""
    return partial(run_bagent, cwd=job_dir)


@pytest.fixture
def bagent_here(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., Completed]:
    """As ``bagent``, but a command that only looks runs in this process: a tenth of the time."""

    def call(args: list[str], env: dict[str, str] | None = None, **more: Any) -> Completed:
        if more or str(args[0]) not in LOOKS:
            return run_bagent(args, job_dir, env, **more)
        clean = clean_env(job_dir / ".home", env)
        with monkeypatch.context() as patch:
            patch.chdir(job_dir)
            for name in os.environ.keys() - clean.keys():
                patch.delenv(name)
            for name, value in clean.items():
                patch.setenv(name, value)
            capfdbinary.readouterr()
            code = main([str(arg) for arg in args])
            found = capfdbinary.readouterr()
        return Completed(code, found.out.decode(), found.err.decode(), 0.0)

    return call
