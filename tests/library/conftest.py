"""Each test of the library is a program in the folder of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.jobs import write_job
from support.run_outcomes import NO_TABLES


@pytest.fixture(autouse=True)
def in_job_dir(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job_dir)


@pytest.fixture
def job(fs: Any, job_dir: Path) -> Path:
    """A job whose rows the program gives."""
    return write_job(job_dir, fs.url, input=None, results=NO_TABLES)


@pytest.fixture
def dict_job(fs: Any) -> dict[str, Any]:
    """The same as a dict."""
    return {"name": "n", "backend": fs.url, "model": "m", "prompt": "{{ text }}"}
