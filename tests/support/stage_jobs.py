"""Jobs of several stages against a scripted server: what each test writes, runs and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.cli import Completed, run_bagent
from support.fake_server import FakeServer
from support.jobs import journal_files, journal_lines, write_job
from support.replies import Script, echo
from support.run_outcomes import NO_TABLES, RUN

Json = Any


def run_stages(
    folder: Path, url: str, rows: Any, stages: list[dict[str, Json]], **keys: Json
) -> Completed:
    """Write a job of ``stages`` and run it to its end, without tables unless ``keys`` say so."""
    write_stages(folder, url, rows, stages, **keys)
    done = run_bagent(RUN, folder)
    assert "Traceback" not in done.err, done.err
    return done


def run_scripted(
    folder: Path,
    rows: Any,
    stages: list[dict[str, Json]],
    script: Script | None = None,
    *,
    code: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    **keys: Json,
) -> FakeServer:
    """Run a job of ``stages`` against a server with ``script`` (echo), which has ended then.

    Args:
        folder: where the job is written.
        rows: the rows of the job, or how many.
        stages: its stages.
        script: what the server answers.
        code: the expected exit code.
        options: other options of the server.
        keys: other keys of the job.
    """
    with FakeServer(script or {"*": [echo()]}, **options) as server:
        done = run_stages(folder, server.url, rows, stages, **keys)
    assert done.code == code, done.err
    return server


def write_stages(
    folder: Path, url: str, rows: Any, stages: list[dict[str, Json]], **keys: Json
) -> None:
    """Write a job of ``stages``."""
    written = {"prompt": None, "results": NO_TABLES, "stages": stages} | keys
    write_job(folder, url, rows, **written)


def outcomes(folder: Path, stage: str | None = None) -> list[dict[str, Json]]:
    """The outcomes in the journal, in the order of writing; of one stage, or all."""
    run = folder / "runs" / "job"
    assert any(path.name.startswith("rows-") for path in journal_files(run))
    found = [line for line in journal_lines(run) if "status" in line and "stage" in line]
    return [line for line in found if stage in (None, line["stage"])]


def texts(folder: Path, stage: str) -> dict[Json, str]:
    """Text by id of one stage; fails where an id comes twice."""
    found: dict[Json, str] = {}
    for line in outcomes(folder, stage):
        assert line["id"] not in found, f"{line['id']} is there twice"
        found[line["id"]] = line.get("text")
    return found
