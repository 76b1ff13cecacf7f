"""The load that engines tell in their Prometheus text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.metrics import MISSING_SECONDS, EngineLoad, LoadReader, parse_load
from bagent.backends.http.client import Transport
from support.backend_calls import endpoint, raw_server

DATA = Path(__file__).parent / "data"
VLLM = (DATA / "vllm_metrics.txt").read_bytes()
DYNAMO = (DATA / "dynamo_metrics.txt").read_bytes()


def load(text: str | bytes, model: str | None = None) -> EngineLoad:
    """What ``text`` tells; it must tell something."""
    raw = text.encode() if isinstance(text, str) else text
    found = parse_load(raw, 5.0, model)
    assert found is not None
    return found


SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0",priority=""} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="0",priority="1"} 3.0
sglang:num_running_reqs{model_name="m",tp_rank="0",priority="None"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 6.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:num_retracted_reqs{model_name="m",tp_rank="0",pid="77"} 9.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 4.0
sglang:cache_hit_rate{model_name="m"} 0.0075
sglang:cached_tokens_total{model_name="m",cache_source="device"} 1.0e+06
sglang:cached_tokens_total{model_name="m",cache_source="host"} 2.0e+06
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, EngineLoad(at=5.0, engine="vllm", running=4, waiting=8, deferred=0, preemptions=0,
                          kv_usage=0.0002441443503471419, cache_hits=512, cache_queries=765,
                          prompt_tokens=765, generation_tokens=471)),
        (DYNAMO, EngineLoad(at=5.0, engine="dynamo", running=6, waiting=6, capacity=6,
                            kv_usage=4 / 16384, cache_hits=0, cache_queries=765,
                            prompt_tokens=765, generation_tokens=541)),
        (SGLANG, EngineLoad(at=5.0, engine="sglang", running=5, waiting=6, preemptions=4,
                            kv_usage=0.28, cache_hits=3_000_000, cache_queries=8_128_902,
                            prompt_tokens=8_128_902, generation_tokens=7_557_572)),
    ],
    ids=["vLLM with four places", "Dynamo with two workers", "SGLang with priorities"],
)  # fmt: skip
def test_the_load_of_an_engine_is_read(text: str | bytes, expected: EngineLoad) -> None:
    assert load(text, "tiny" if text != SGLANG else None) == expected


TWO_MODELS = r"""
vllm:num_requests_running{model_name="a"} 1
vllm:num_requests_running{model_name="b \"x\" \\ }y"} 20
vllm:num_requests_waiting{model_name="a"} 2
"""


@pytest.mark.parametrize(
    ("model", "running", "waiting"),
    [("a", 1, 2), ('b "x" \\ }y', 20, None), (None, 21, 2), ("alias", None, None)],
)
def test_of_several_models_only_the_one_asked_for_counts(model, running, waiting) -> None:
    found = load(TWO_MODELS, model)
    assert (found.running, found.waiting) == (running, waiting)


def test_lines_that_are_no_samples_are_passed_over() -> None:
    text = b"""\xff\xfe\x00 garbage {{{ }} ==
vllm:num_requests_running{model_name="m"
vllm:num_requests_running{model_name="m"} NaN
vllm:num_requests_running{model_name="m"} many
vllm:num_requests_running{ model_name = "m" , } 1.2e1 1700000000000\r
vllm:num_requests_running_created{model_name="m"} 99
vllm:num_requests_waiting 4 # {trace="x"} 1
"""
    assert (load(text).running, load(text).waiting) == (12, 4)


@asynccontextmanager
async def served(*answers: tuple[str, bytes]) -> AsyncIterator[tuple[Endpoint, list[str]]]:
    """Serve each GET the next of ``answers``, the last one for ever; yields what was asked too."""
    left, asked = list(answers), list[str]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        status, body = left.pop(0) if len(left) > 1 else left[0]
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async with raw_server(handle) as port:
        yield endpoint(f"http://127.0.0.1:{port}/m/v1"), asked


async def test_the_route_lies_beside_v1_and_a_redirect_to_its_slash_is_followed() -> None:
    redirect = "307 Temporary Redirect\r\nLocation: /m/metrics/", b""
    async with served(redirect, ("200 OK", VLLM)) as (to, asked):
        found = await LoadReader(Transport(), clock=lambda: 7.0).read(to, 5.0)
    assert (found.at, found.running, found.waiting) == (7.0, 4, 8)
    assert asked == ["/m/metrics", "/m/metrics/"]


@pytest.mark.parametrize("answer", [("404 Not Found", b""), ("200 OK", b"<html></html>")])
async def test_an_endpoint_without_metrics_is_asked_again_only_after_long(
    answer: tuple[str, bytes],
) -> None:
    now = [1000.0]
    reader = LoadReader(Transport(), clock=lambda: now[0])
    async with served(answer, ("200 OK", VLLM)) as (to, asked):
        for _ in range(5):
            assert await reader.read(to, 5.0) is None
        assert len(asked) == 1
        now[0] += MISSING_SECONDS
        assert reader.due(to)
        assert await reader.read(to, 5.0, "tiny") is not None


async def test_an_endpoint_that_fails_once_is_asked_again_at_once(unused_port: int) -> None:
    reader = LoadReader(Transport())
    nobody = endpoint(f"http://127.0.0.1:{unused_port}/v1")
    assert await reader.read(nobody, 5.0) is None
    assert reader.due(nobody)
    async with served(("503 Service Unavailable", b""), ("200 OK", VLLM)) as (to, _):
        assert await reader.read(to, 5.0) is None
        assert await reader.read(to, 5.0) is not None


SERIES = {
    "engines are summed, the fullest cache counts": (
        """vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 1
vllm:num_preemptions_total{engine="1",model_name="m"} 2
""",
        {"running": 7, "waiting": None, "kv_usage": 0.75, "preemptions": 3},
    ),
    "counters without _total": (
        """vllm:num_preemptions 1
vllm:prefix_cache_hits 2
vllm:prefix_cache_queries 3
vllm:prompt_tokens 4
vllm:generation_tokens 5
""",
        {"preemptions": 1, "cache_hits": 2, "cache_queries": 3, "prompt_tokens": 4,
         "generation_tokens": 5},
    ),
    "names of older vLLM": (
        """vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_hits_total{model_name="m"} 10
vllm:gpu_prefix_cache_queries_total{model_name="m"} 40
""",
        {"kv_usage": 0.5, "cache_hits": 10, "cache_queries": 40, "running": None},
    ),
    "requests that wait for something else than room": (
        """vllm:num_requests_waiting{engine="0"} 9
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 7
""",
        {"waiting": 9, "deferred": 7},
    ),
    "tensor-parallel ranks tell one number, data-parallel ranks add": (
        "".join(
            f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}"}} 4\n'
            for dp in (0, 1)
            for tp in (0, 1, 2)
        ),
        {"running": 8},
    ),
    "llama.cpp": (
        """llamacpp:requests_processing 8
llamacpp:requests_deferred 3
llamacpp:prompt_tokens_total 100
llamacpp:tokens_predicted_total 50
""",
        {"running": 8, "waiting": 3, "prompt_tokens": 100, "generation_tokens": 50,
         "engine": "llamacpp"},
    ),
    "the only model under any name": (
        'vllm:num_requests_running{model_name="served"} 3', {"running": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERIES)
def test_series_of_engines_are_read(name: str) -> None:
    text, fields = SERIES[name]
    found = load(text, "alias")
    assert {field: getattr(found, field) for field in fields} == fields
