"""The job file and the command of a world."""

from __future__ import annotations

from typing import Any

from worlds import agents, provider, stages
from worlds.history import is_priced
from worlds.replies import MAX_TOKENS, MODEL, SCHEMA
from worlds.spec import JobSpec, World

Json = Any

_USUAL: dict[str, Json] = {"output": {"truncated": "fail"}, "results": {"allow_failures": 0}}
"""Sections of a job that say what holds without them."""


def job_file(world: World) -> dict[str, Json]:
    """Return the content of the job file of a world."""
    job = {
        "hostfile": "hosts",
        "backend": {"api_key_env": "WORLD_KEY"},
        "model": MODEL,
        "input": "rows.jsonl",
        "prompt": {"user": "<<{{ n }}v{{ v }}>> {{ text }}"},
        "sampling": {"temperature": world.job.temperature, "max_tokens": MAX_TOKENS},
        "batching": {"mode": "single"},
        "dedupe": any(row.same is not None for row in world.rows),
        "limits": {
            "retries": world.job.retries,
            "concurrency": world.job.concurrency,
            "per_endpoint": world.job.per_endpoint,
            "timeout": _timeouts(world.job),
            "hedge": world.job.hedge,
            "row": world.job.row_seconds,
            "stop_after_failures": world.job.stop_after,
            "rpm": world.job.rpm,
            "tpm": world.job.tpm,
        },
        "output": {},
        "results": {"allow_failures": world.job.allow_failures},
        **_kind_keys(world),
    }
    if world.job.hosted:
        job |= provider.backend_keys()
    if world.job.grow is not None:
        job["output"]["grow"] = world.job.grow
    if world.job.stream is not None:
        job["stream"] = world.job.stream
    if world.job.system:
        job["prompt"]["system"] = "stone " * (world.job.system // 6)
    job["output"] = {**job["output"], "truncated": world.job.truncated}
    if world.job.answers > 1:
        job["answers"] = world.job.answers
        job["sampling"]["seed"] = 1
    if is_priced(world):  # a dollar for each token of an answer
        job["prices"] = {"input": 0, "output": 1_000_000}
        if world.job.kind == "batches":
            job["prices"]["batch"] = 1
        job["limits"]["budget_usd"] = world.job.budget
    # Defaults are left out: to read a job takes a seventh of the CPU of a small world.
    limits = job["limits"].items()
    job["limits"] = {key: value for key, value in limits if value not in ("auto", "off", None)}
    return {key: value for key, value in job.items() if value not in (None, _USUAL.get(key))}


def _timeouts(job: JobSpec) -> dict[str, float]:
    """Return the time limits of a request."""
    limits = {"total": job.timeout, "first_token": job.first_token, "idle": job.idle}
    return {"connect": 5.0} | {name: limit for name, limit in limits.items() if limit is not None}


def _kind_keys(world: World) -> dict[str, Json]:
    """Return the keys of the job file for a kind of job."""
    if world.job.kind == "schema":
        return {"output": {"schema": SCHEMA, "retries": 2}}
    if world.job.kind == "agents":
        return agents.job_keys(world.job.tool_rate)
    if world.job.kind == "batches":
        return provider.job_keys(world.job.by)
    if world.job.kind == "stages":
        return stages.job_keys(world.job.topology, world.job.on_failure)
    if world.job.kind == "lists":
        prompt = {"raw": "<<{{ n }}v{{ v }}>> {{ text }}"}
        return {"prompt": prompt, "batching": {"mode": "completions", "size": 8}}
    return {}


def command_options(job: JobSpec, start: int) -> dict[str, Json]:
    """Return the options of the command of a start."""
    options = dict(job.options)
    if job.deadline is not None:
        options["deadline"] = f"{job.deadline:g}s"
    if job.shards > 1:
        options["shard"] = f"{start % job.shards + 1}/{job.shards}"
    return options
