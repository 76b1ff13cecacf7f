"""``bagent proxy`` and ``bagent bench`` with one server named by ``--backend``."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cli import Running
from support.jobs import results
from support.provider_bedrock import BedrockWire
from support.provider_protocols import AnthropicWire, ModelAnswer, OpenAIWire, Wire
from support.provider_server import Fault, serve_in_thread

SECRET = "key-5up3rs3cret"
KEYS = {"OPENAI_API_KEY": SECRET, "ANTHROPIC_API_KEY": SECRET}
AWS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}
WIRES: dict[str, Callable[[], Wire]] = {"openai": OpenAIWire, "anthropic": AnthropicWire}
PATHS = {"openai": "/chat/completions", "anthropic": "/messages"}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def address(kind: str, url: str) -> str:
    if kind == "bedrock":
        return f"bedrock://us-east-1?endpoint={url}"
    return f"{kind}+http{url.removeprefix('http')}/v1"


def has_no_secret(folder: Path) -> bool:
    """Tell whether no file under a folder has the key."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return not any(SECRET.encode() in path.read_bytes() for path in files)


def asked(url: str, run: Path) -> dict[str, Any]:
    """The answer to a small request with the proxy's token and the name of its client."""
    token = (run / "token").read_text().strip()
    body = json.dumps({"model": "m-1", "max_tokens": 9, "messages": QUESTION}).encode()
    headers = {"Content-Type": "application/json", "x-api-key": f"{token}:r1"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.process("signal")
@pytest.mark.parametrize("kind", sorted(WIRES))
def test_a_proxy_in_front_of_a_hosted_model_keeps_its_key_to_itself(kind, job_dir):
    with serve_in_thread(WIRES[kind](), ModelAnswer(text="fine")) as server:
        server.key = SECRET
        server.response_headers = {
            "x-ratelimit-limit-requests": "600",
            "x-ratelimit-remaining-requests": "599",
        }
        command = ["proxy", "--backend", address(kind, server.url), "--port", "0", "-o", "run"]
        with Running(command, job_dir, KEYS) as proxy:
            proxy.wait_for_out("/v1", 60)
            url = proxy.out.split()[0]
            answer = asked(url + PATHS[kind], job_dir / "run")
            proxy.wait_for_err("allows 600 requests a minute", 60)
            proxy.send(signal.SIGTERM)
            done = proxy.finish()
    assert "fine" in json.dumps(answer)
    (row,) = results(job_dir, "run")
    assert (row["id"], row["status"]) == ("r1", "ok")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (30, 7)
    assert SECRET not in done.out + done.err
    assert has_no_secret(job_dir / "run")


@pytest.mark.slow  # boto3 and a whole proxy take seconds; the bridge itself is tested beside it
def test_bedrock_is_proxied_as_a_server_of_openais_protocol(job_dir):
    with serve_in_thread(BedrockWire(), Fault("throttled"), ModelAnswer(text="fine")) as server:
        command = ["proxy", "--backend", address("bedrock", server.url), "--port", "0", "-o", "run"]
        with Running(command, job_dir, AWS) as proxy:
            proxy.wait_for_out("/v1", 60)
            answer = asked(proxy.out.split()[0] + "/chat/completions", job_dir / "run")
            proxy.send(signal.SIGTERM)
            done = proxy.finish()
    assert answer["choices"][0]["message"]["content"] == "fine"
    assert server.paths == ["/model/m-1/converse"] * 2
    assert "Signature=" in server.headers[1]["authorization"]
    (row,) = results(job_dir, "run")
    assert (row["status"], row["attempts"]) == ("ok", 2)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (30, 7)
    assert SECRET not in done.out + done.err
    assert has_no_secret(job_dir / "run")


@pytest.mark.parametrize(
    ("kind", "wire", "path", "note"),
    [
        ("anthropic", OpenAIWire, "/chat/completions", "OpenAI-compatible route"),
        pytest.param(  # boto3 and a whole load test take seconds
            "bedrock", BedrockWire, "/model/m-1/converse-stream", "boto3", marks=pytest.mark.slow
        ),
    ],
)
def test_a_hosted_model_is_load_tested_by_a_protocol_of_its_provider(
    job_dir, bagent, kind, wire, path, note
):
    answer = ModelAnswer(text="hello to all of you", completion=5)
    with serve_in_thread(wire(), answer) as server:
        if kind != "bedrock":  # its requests are signed
            server.key = SECRET
        command = ["bench", "--backend", address(kind, server.url), "--model", "m-1", "-o", "out"]
        options = ["--concurrency", "2", "--requests", "8", "--warmup", "0", "--repeats", "1"]
        done = bagent([*command, *options], env=KEYS | AWS)
    assert done.code in (0, 3), done.err  # 3: this machine was the limit
    summary = json.loads((job_dir / "out" / "summary.json").read_text())
    assert [one["ok"] for one in summary["endpoints"]] == [8]
    assert len([sent for sent in server.paths if sent.endswith(path)]) >= 8
    assert note in done.err
    assert has_no_secret(job_dir / "out")


def test_a_backend_and_a_hostfile_exclude_each_other(bagent):
    for command in ("proxy", "bench"):
        done = bagent([command, "--backend", "openai", "--hostfile", "h.txt"], env=KEYS)
        assert done.code == 2
        assert "exclude each other" in done.err
