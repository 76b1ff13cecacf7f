"""A server that an option names, on each provider: looked at, and what its protocol lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bagent.errors import JobError, UsageError
from bagent.job.load import JobRequest, job_for_batch_file
from bagent.servers.hosted import check_model
from bagent.servers.resolve import resolve_backend
from support.cli import Completed
from support.http_servers import in_thread
from support.jobs import write_rows
from support.provider_bedrock import BedrockWire
from support.provider_calls import SECRET
from support.provider_protocols import AnthropicWire, ModelAnswer, OpenAIWire
from support.provider_server import Fault, serve_in_thread
from support.routes_server import models, routes_server

Bagent = Callable[..., Completed]
KINDS = {"openai": OpenAIWire, "anthropic": AnthropicWire, "bedrock": BedrockWire}
KEYS = {
    "OPENAI_API_KEY": SECRET,
    "ANTHROPIC_API_KEY": SECRET,
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": SECRET,
}
LACKS = {
    "openai": {"batches of chats", "/tokenize"},
    "anthropic": {"raw prompts", "lists of prompts", "embeddings", "seed"},
    "bedrock": {"raw prompts", "lists of prompts", "embeddings", "seed"},
}


def address(kind: str, url: str) -> str:
    """What a user writes for a server at ``url`` that speaks as this provider."""
    if kind == "bedrock":
        return f"bedrock://us-east-1?endpoint={url}"
    return f"{kind}+http{url.removeprefix('http')}/v1"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_hosts_proves_a_named_server_and_says_what_its_protocol_lacks(
    kind: str, job_dir: Path, bagent: Bagent
) -> None:
    with serve_in_thread(KINDS[kind](), ModelAnswer()) as server:
        command = ["hosts", "--backend", address(kind, server.url), "--model", "m-1"]
        done = bagent([*command, "--format", "json"], env=KEYS)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["state"], found["engine"], found["model"]) == ("ready", kind, "m-1")
    assert set(found["unsupported"]) >= LACKS[kind]
    assert ("Retry-After" in found["not_reported"]) == (kind == "bedrock")
    assert f"{kind}: no " in done.err
    assert "next: bagent run" in done.err
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize("named", ["vllm://HOST", "http://HOST/v1"])
def test_an_engine_is_identified_alike_however_it_is_named(
    bagent: Bagent, job_dir: Path, named: str
) -> None:
    message = {"role": "assistant", "content": "Hi"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    routes = {
        "GET /v1/models": models("m", "vllm", max_model_len=4096),
        "GET /version": {"version": "0.33.0"},
        "GET /metrics": "vllm:num_requests_running 2.0\n",
        "POST /v1/chat/completions": {"model": "m", "choices": [choice]},
    }
    with in_thread(routes_server(routes)) as (url, _):
        host = url.removeprefix("http://").removesuffix("/v1")
        done = bagent(["hosts", "--backend", named.replace("HOST", host), "--format", "json"])
    found = json.loads(done.out)
    assert (found["engine"], found["version"], found["running"]) == ("vllm", "0.33.0", 2)


def test_a_wrong_key_is_told_without_it(job_dir: Path, bagent: Bagent) -> None:
    with serve_in_thread(KINDS["anthropic"](), Fault("bad_key")) as server:
        where = address("anthropic", server.url)
        done = bagent(["hosts", "--backend", where, "--model", "m-1"], env=KEYS)
    assert done.code == 1
    assert "refuses" in done.out
    assert SECRET not in done.out + done.err


def test_lines_of_a_batch_file_name_their_models_at_a_hosted_backend(tmp_path):
    body = {"model": "m-1", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = write_rows(tmp_path / "b.jsonl", [line])
    request = JobRequest(path=path, options={"backend": "openai"}, env=KEYS, cwd=tmp_path)
    job = job_for_batch_file(request)
    assert job.backend is not None
    check_model(job, job.backend)
    with pytest.raises(JobError, match="serves many models"):
        check_model(job.model_copy(update={"prompt": "hi"}), job.backend)


@pytest.mark.parametrize(
    ("backend", "model", "words"),
    [
        ("anthropic", None, "serves many models"),
        ("openai", "m", "OPENAI_API_KEY is not set"),
        ("local", None, "runs inside bagent run"),
        ("anthropc", "m", "anthropic"),
    ],
)
def test_what_cannot_be_reached_is_said_before_anything_is_sent(
    backend: str, model: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as error:
        resolve_backend(backend, model, {})
    assert words in f"{error.value} {error.value.hint}"
