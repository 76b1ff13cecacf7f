"""Every route of a simulated endpoint, over a real socket."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct

import aiohttp
import pytest

from bagent.sim import SimConfig, start_sim
from bagent.sim.server import VERSION
from support.sim_client import on_sim

FAST = "speedup=1000"
LABELS = '{engine="0",model_name="simulated-8b"}'


@on_sim("max_model_len=4096")
async def test_small_routes(client) -> None:
    assert (await client.get("/health"))[0] == 200
    assert (await client.get("/ping"))[0] == 200
    assert json.loads((await client.get("/version"))[1]) == {"version": VERSION}
    (model,) = json.loads((await client.get("/v1/models"))[1])["data"]
    assert model["id"] == "simulated-8b"
    assert model["owned_by"] == "bagent-sim"
    assert model["max_model_len"] == 4096
    paths = json.loads((await client.get("/openapi.json"))[1])["paths"]
    assert "/v1/chat/completions/batch" in paths
    assert (await client.get("/nothing"))[0] == 404
    assert (await client.get("/tokenize"))[0] == 405


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", b'{"mess', 400, "JSON decode error"),
        ("/v1/chat/completions", {"messages": "x"}, 400, "Expected `array`"),
        ("/v1/chat/completions", {"messages": []}, 400, "non-empty"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "`other` does not exist"),
        ("/v1/completions", {"prompt": []}, 400, "non-empty"),
        ("/v1/completions", {"prompt": ["x"] * 1025}, 400, "At most 1024 prompts"),
        ("/v1/completions", {"prompt": [[1, "x"]]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "non-negative"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 20}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "stop": list("abcde")}, 400, "at most 4"),
        ("/v1/completions", {"prompt": "x", "priority": 1}, 400, "Priority scheduling"),
        ("/v1/completions", {"prompt": "x", "cache_salt": "a/b"}, 400, "cache_salt"),
        ("/v1/completions", {"prompt": "x", "stream_options": {}}, 400, "Stream options"),
        (
            "/v1/completions",
            {"prompt": "x" * 400, "max_tokens": 30},
            400,
            "This model's maximum context length is 128 tokens. However, you requested 30 output "
            "tokens and your prompt contains at least 100 input tokens",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"json": {}, "regex": "a", "choice": ["b"]}},
            400,
            "Only one structured outputs constraint",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"json": {"type": "strange"}}},
            400,
            "not a usable JSON schema",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            400,
            "tool_choice",
        ),
        ("/tokenize", {}, 400, "prompt or messages"),
    ],
)
@on_sim("max_model_len=128")
async def test_wrong_requests_are_refused_in_the_words_of_vllm(
    client, path, body, status, words
) -> None:
    got, reply = await client.post(path, body)
    assert got == status
    assert words in reply["error"]["message"]
    assert reply["error"]["code"] == status
    assert set(reply["error"]) == {"message", "type", "param", "code"}


@on_sim(FAST + "&api_key=secret")
async def test_api_key_guards_v1_only(client) -> None:
    body = {"prompt": "x"}
    assert (await client.post("/v1/completions", body))[0] == 401
    headers = {"Authorization": "Bearer secret"}
    assert (await client.post("/v1/completions", body, headers=headers))[0] == 200
    assert (await client.post("/tokenize", body))[0] == 200


@on_sim(FAST)
async def test_embeddings_are_seeded_unit_vectors(client) -> None:
    _, reply = await client.post("/v1/embeddings", {"input": ["a", "b", "a"]})
    first, second, third = (d["embedding"] for d in reply["data"])
    assert first == third != second
    assert len(first) == 64
    assert math.fsum(v * v for v in first) == pytest.approx(1)
    _, small = await client.post("/v1/embeddings", {"input": "a", "dimensions": 8})
    assert len(small["data"][0]["embedding"]) == 8
    body = {"input": "a", "encoding_format": "base64"}
    _, packed = await client.post("/v1/embeddings", body)
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack("<64f", raw) == pytest.approx(first)
    assert reply["usage"]["prompt_tokens"] == 3


def _metrics(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@on_sim(FAST)
async def test_metrics_have_the_names_and_labels_of_vllm(client) -> None:
    await client.completion(["shared start " * 40 + str(i) for i in range(4)], max_tokens=20)
    text = (await client.get("/metrics"))[1]
    values = _metrics(text)
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "prefix_cache_queries_total": 4 * 131,
        "prefix_cache_hits_total": 3 * 128,
        "prompt_tokens_total": 4 * 131,
        "time_to_first_token_seconds_count": 4,
        "e2e_request_latency_seconds_count": 4,
    }
    assert {name: values[f"vllm:{name}{LABELS}"] for name in expected} == expected
    ends = 'vllm:request_success_total{engine="0",model_name="simulated-8b",finished_reason='
    assert values[ends + '"stop"}'] + values[ends + '"length"}'] == 4
    assert "# TYPE vllm:num_requests_running gauge" in text
    assert "# TYPE vllm:prompt_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    bucket = 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="simulated-8b",le='
    buckets = [v for k, v in values.items() if k.startswith(bucket)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4
    assert any("cache_config_info" in k and 'num_gpu_blocks="16384"' in k for k in values)


@on_sim("max_num_seqs=4")
async def test_load_shows_while_it_lasts_and_a_lost_client_frees_the_engine(client) -> None:
    body = {"prompt": [f"{i}" for i in range(6)], "max_tokens": 8000, "ignore_eos": True}
    task = asyncio.create_task(client.post("/v1/completions", body))
    engine = client.sim.replicas[0].engine
    while engine.running < 4:
        await asyncio.sleep(0.001)
    values = _metrics((await client.get("/metrics"))[1])
    assert values[f"vllm:num_requests_running{LABELS}"] == 4
    assert values[f"vllm:num_requests_waiting{LABELS}"] == 2
    assert values[f"vllm:kv_cache_usage_perc{LABELS}"] > 0
    task.cancel()
    while engine.running or engine.waiting:
        await asyncio.sleep(0.001)
    assert engine.stats.aborted == 6


async def test_closing_ends_requests_in_flight_at_once() -> None:
    async with aiohttp.ClientSession() as session:
        async with start_sim(SimConfig()) as sim:
            body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
            task = asyncio.create_task(session.post(sim.urls[0] + "/v1/completions", json=body))
            while not sim.replicas[0].engine.running:
                await asyncio.sleep(0.001)
        assert sim.replicas[0].engine.stats.aborted == 1
        with pytest.raises(aiohttp.ClientError):
            await task
