"""Hosted backends against llmock: faults of every kind, and a judge of how they are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from real.serve_llmock import Llmock
from support.cli import Completed
from support.jobs import results, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

ROWS = 200
FAULTS = [
    "--response-style=echo",
    *("--error-rate", "529=0.1", "--error-rate", "429=0.01"),
    *("--stream-fault", "truncate=0.2", "--stream-fault", "disconnect=0.1"),
]
KEY = "key-5up3rs3cret"


@pytest.mark.parametrize(("kind", "path"), [("anthropic", "anthropic"), ("openai", "v1")])
def test_every_row_is_whole_whatever_breaks_on_the_way(
    kind: str, path: str, job_dir: Path, logs: Path, bagent: Callable[..., Completed]
) -> None:
    with Llmock(FAULTS, log=logs / f"llmock-{kind}.log") as server:
        write_job(
            job_dir,
            f"{kind}+http://{server.address}/{path}",
            ROWS,
            model="claude-sonnet-4-5" if kind == "anthropic" else "gpt-4o",
            stream=True,
            limits={"concurrency": 8, "retries": 15},
        )
        env = {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}
        done = bagent(["run", "job.yaml", "--progress", "plain"], env=env, timeout=300)
        verdict = server.verdict
    assert done.code == 0, done.err
    found = results(job_dir)
    assert len(found) == ROWS
    for row in found:
        assert row["status"] == "ok"
        assert row["text"].endswith(f"id={row['id']} text number {row['id'][1:]}")
    # A stream of OpenAI's that is cut between its finish reason and the counts is whole, and
    # taken; llmock calls that accepting a cut one. Anthropic tells both in one event.
    # What it only warns of are intervals that happened to be alike.
    codes = {found["code"] for found in verdict["findings"] if found["severity"] == "error"}
    assert codes <= ({"truncated_stream_accepted"} if kind == "openai" else set()), verdict
    assert verdict["faults_injected"] > ROWS * 0.2
    for file in job_dir.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
