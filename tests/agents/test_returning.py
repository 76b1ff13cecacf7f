"""Conversations that come back from their tools are put forward where the engine can do that."""

from __future__ import annotations

from support.agent_jobs import agent_job, calls
from support.fake_server import FakeServer
from support.jobs import parquet
from support.replies import ok


def test_returning_agents_have_priority_and_cached_tokens_are_recorded_by_turn(job_dir, bagent):
    usage = {"prompt_tokens": 90, "completion_tokens": 5}
    cached = {**usage, "prompt_tokens_details": {"cached_tokens": 64}}
    add, more = ("add", '{"a":1,"b":2}'), ("add", '{"a":3,"b":4}')
    script = [calls(add, usage=usage), calls(more, usage=cached), ok("done", usage=cached)]
    with FakeServer({"*": script}, flavour="vllm") as fs:
        agent_job(job_dir, fs.url)
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
        told = [seen.body.get("priority") for seen in fs.requests]
    assert told == [None, -1, -2]
    attempts = parquet(job_dir / "runs/job", "attempts")
    found = {(one["turn"], one["cached_tokens"]) for one in attempts}
    assert found == {(1, None), (2, 64), (3, 64)}
