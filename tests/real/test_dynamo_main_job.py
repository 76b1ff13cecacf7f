"""The main job against Dynamo's real frontend and router, with mocked engines behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.serve_dynamo import DynamoMocker
from support.cli import run_bagent
from support.jobs import results_by_id, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_rows_go_through_the_router_and_come_back_counted(
    dynamo_tiny: DynamoMocker, job_dir: Path
) -> None:
    job = write_job(
        job_dir,
        dynamo_tiny.backend,
        60,
        model="auto",
        prompt={"raw": "id={{ id }} {{ text }}"},
        sampling={"temperature": 0, "max_tokens": 8},
        batching={"mode": "single"},  # of a list it counts the tokens of all prompts together
    )
    # the mocker stops at max_tokens and never by itself
    done = run_bagent(["run", job], job_dir)
    rows = results_by_id(job_dir)
    assert len(rows) == 60, done.err
    assert {row["model"] for row in rows.values()} == {"tiny"}
    assert {row["status"] for row in rows.values()} == {"truncated"}
    assert all(row["completion_tokens"] == 8 for row in rows.values())
