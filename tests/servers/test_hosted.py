"""The same job on each hosted provider, as a user runs it: results, keys, budgets, endings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cli import Completed
from support.jobs import results, write_job
from support.provider_bedrock import BedrockWire
from support.provider_calls import SECRET
from support.provider_protocols import (
    AnthropicWire,
    DynamoWire,
    ModelAnswer,
    OpenAIWire,
    SglangWire,
    VllmWire,
)
from support.provider_server import Fault, serve_in_thread

pytestmark = pytest.mark.slow  # each test is a run on every provider

Bagent = Callable[..., Completed]
KINDS = {"openai": OpenAIWire, "anthropic": AnthropicWire, "bedrock": BedrockWire}
ENGINES = {"vllm": VllmWire, "sglang": SglangWire, "dynamo": DynamoWire}
RUN = ["run", "job.yaml", "--progress", "plain"]


def backend(kind: str, url: str) -> dict[str, Any]:
    """The job's key ``backend`` for a server at ``url``."""
    if kind == "bedrock":
        return {"url": f"bedrock://us-east-1?endpoint={url}", "api_key_env": "MY_KEY"}
    if kind in ENGINES:
        return {"url": f"{kind}://{url.removeprefix('http://')}", "api_key_env": "MY_KEY"}
    return {"url": f"{kind}+http{url.removeprefix('http')}/v1", "api_key_env": "MY_KEY"}


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("kind", [*sorted(KINDS), *ENGINES])
def test_one_job_runs_on_every_backend_and_leaves_no_key_behind(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    wire = (KINDS | ENGINES)[kind]
    script = (Fault("overloaded"), Fault("ends"), Fault("bad_key"), ModelAnswer(text="fine"))
    with serve_in_thread(wire(), *script) as server:
        limits = {"concurrency": 1, "retries": 3}
        write_job(job_dir, "x", 5, backend=backend(kind, server.url), model="m-1", limits=limits)
        done = bagent(RUN, env={"MY_KEY": SECRET})
    assert server.faults == []
    assert done.code == 0, done.err
    assert [(row["status"], row["text"]) for row in results(job_dir)] == [("ok", "fine")] * 5
    assert "failed attempts: auth 1, connect 1, overloaded 1" in done.err
    if kind == "anthropic":
        assert bagent(["report"]).code == 0
    for file in job_dir.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize("kind", [*sorted(KINDS), *ENGINES])
def test_refusals_of_a_rate_limit_cost_a_row_none_of_its_tries(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    throttled, rows = Fault("throttled"), 4
    wire = (KINDS | ENGINES)[kind]()
    with serve_in_thread(wire, *[throttled, throttled, ModelAnswer(text="fine")] * rows) as server:
        if kind != "bedrock":
            server.response_headers = {"Retry-After": "0.3"}
        limits = {"concurrency": 1, "retries": 1}
        write_job(job_dir, "x", rows, backend=backend(kind, server.url), model="m-1", limits=limits)
        done = bagent(RUN, env={"MY_KEY": SECRET})
    assert done.code == 0, done.err
    assert [row["status"] for row in results(job_dir)] == ["ok"] * rows
    assert len(server.bodies) == 3 * rows
    assert "too many requests" in done.err


def test_a_users_own_prices_give_each_row_its_cost(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    with serve_in_thread(KINDS[kind](), ModelAnswer(prompt=30, cached=20, completion=7)) as server:
        prices = {"input": 10, "output": 100, "cached": 1}
        write_job(job_dir, "x", 2, backend=backend(kind, server.url), model="m-1", prices=prices)
        done = bagent(RUN, env={"MY_KEY": SECRET})
    assert done.code == 0, done.err
    cost = (10 * 10 + 20 * 1 + 7 * 100) / 1e6
    assert [row["cost_usd"] for row in results(job_dir)] == [pytest.approx(cost)] * 2


def test_a_budget_is_kept_and_the_same_command_goes_on(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    with serve_in_thread(KINDS[kind](), ModelAnswer(prompt=30, cached=0, completion=60)) as server:
        settings = {"prices": {"input": 10, "output": 100}, "limits": {"concurrency": 4}}
        write_job(job_dir, "x", 30, backend=backend(kind, server.url), model="m-1", **settings)
        cost = (30 * 10 + 60 * 100) / 1e6
        first = bagent([*RUN, "--budget", f"{10 * cost:.6f}"], env={"MY_KEY": SECRET})
        sent = len(server.bodies)
        second = bagent(RUN, env={"MY_KEY": SECRET})
    assert first.code == 76, first.err
    assert "budget" in first.err
    assert 5 <= sent <= 10
    assert second.code == 0, second.err
    assert len(server.bodies) == 30
    assert all(row["status"] == "ok" for row in results(job_dir))


def test_a_key_command_is_asked_again_when_a_key_expires(job_dir: Path, bagent: Bagent) -> None:
    command = job_dir / "key.sh"
    command.write_text("#!/bin/sh\ncat key.txt\nprintf key-new-1234 > key.txt\n")
    command.chmod(0o755)
    (job_dir / "key.txt").write_text("key-old-1234")
    with serve_in_thread(AnthropicWire(), ModelAnswer()) as server:
        server.key = "key-new-1234"
        url = f"anthropic+{server.url}"
        write_job(job_dir, "x", 5, backend={"url": url, "api_key_command": ["./key.sh"]})
        done = bagent(RUN)
    assert done.code == 0, done.err
    assert "key-new" not in done.err
    # Where the list of models is refused, a request for one token shows whether the server works.
    assert [body["max_tokens"] for body in server.bodies] == [1, *[64] * 5]


def test_check_tells_what_a_job_would_cost_by_its_own_prices(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    with serve_in_thread(KINDS[kind](), ModelAnswer()) as server:
        prices = {"input": 10, "output": 100}
        write_job(job_dir, "x", 2, backend=backend(kind, server.url), model="m-1", prices=prices)
        done = bagent(["check", "job.yaml"], env={"MY_KEY": SECRET})
    assert done.code == 0, done.err
    # Two answers of at most 64 tokens: 128 x 100 / 1e6.
    assert "$0.0128" in done.out + done.err
    assert not any(path.endswith(("completions", "messages", "converse")) for path in server.paths)


@pytest.mark.parametrize(
    ("name", "keys", "options", "words"),
    [
        ("anthropic", {"sampling": {"min_p": 0.1}}, [], "min_p"),
        ("bedrock", {"sampling": {"logprobs": True}}, [], "logprobs"),
        ("anthropic", {"model": "auto", "backend": "anthropic"}, [], "write model: NAME"),
        ("openai", {}, ["--budget", "5"], "prices: {input"),
    ],
)
def test_what_a_provider_cannot_do_is_refused_before_anything_is_sent(
    name: str, keys: dict[str, Any], options: list[str], words: str, job_dir: Path, bagent: Bagent
) -> None:
    with serve_in_thread(KINDS[name](), ModelAnswer()) as server:
        write_job(job_dir, "x", 2, **{"backend": backend(name, server.url), "model": "m-1"} | keys)
        env = dict.fromkeys(("MY_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"), SECRET)
        done = bagent([*RUN, *options], env=env)
    assert done.code == 2
    assert words in done.err
    assert server.bodies == []


@pytest.mark.parametrize("name", ["anthropic", "openai"])
def test_a_missing_key_is_named_before_anything_is_sent(
    name: str, job_dir: Path, bagent: Bagent
) -> None:
    write_job(job_dir, name, 1, model="m-1")
    done = bagent(RUN)
    assert done.code == 2
    assert f"{name.upper()}_API_KEY is not set" in done.err
