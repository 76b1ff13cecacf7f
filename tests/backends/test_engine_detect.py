"""What is found out about an endpoint, whichever routes it has."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from aiohttp import web

from bagent.backends.endpoint import Capabilities
from bagent.backends.engines.probe import CompletionProbe, ProbeResult, detect_capabilities
from bagent.backends.http.client import Transport
from bagent.backends.openai.models import fetch_models
from bagent.types import Failure
from support.backend_calls import backend, endpoint
from support.http_servers import serve_app
from support.routes_server import Routes, models, routes_server

GENERATES = dict.fromkeys(
    ("POST /tokenize", "POST /v1/completions", "POST /v1/chat/completions"), 200
)
VLLM: Routes = {
    **GENERATES,
    "GET /v1/models": models("m", "vllm", max_model_len=4096),
    "GET /version": {"version": "0.33.0"},
    "GET /metrics": 'vllm:num_requests_running{engine="0"} 1\n',
    "GET /load": {"server_load": 0},
    "POST /v1/chat/completions/batch": 200,
}
SGLANG: Routes = {
    **GENERATES,
    "GET /v1/models": models("m", "sglang", max_model_len=8192),
    "GET /server_info": {"version": "0.5.23"},
}
DYNAMO: Routes = {
    "GET /v1/models": models("m", "nvidia", context_window=0),
    "GET /metrics": "dynamo_frontend_inflight_requests 0\n",
    "GET /openapi.json": {
        "info": {"version": "1.6.0", "title": "x"},
        "paths": {"/v1/chat/completions": {"post": {}}, "/v1/completions": {"post": {}}},
    },
}
LLAMA: Routes = {
    "GET /v1/models": models("m.gguf", "llamacpp", meta={"n_ctx": 2048}),
    "GET /props": {"build_info": "b9999"},
    "GET /metrics": 501,
}


async def learn_from(url: str, seconds: float = 60.0) -> Capabilities:
    transport = Transport()
    found = await fetch_models(transport, endpoint(url, own=True), 60.0)
    assert isinstance(found, Capabilities), found
    result = await detect_capabilities(transport, endpoint(url), found, seconds)
    await transport.close()
    return result.capabilities


async def learn(routes: Routes, missing: int = 404) -> Capabilities:
    async with routes_server(routes, missing) as (url, _):
        return await learn_from(url)


def fields(found: Capabilities, names: str) -> tuple[Any, ...]:
    return tuple(getattr(found, name) for name in names.split())


CAN = "tokenize lists chat_batch metrics load"


@pytest.mark.parametrize(
    ("routes", "engine", "version", "context", "can"),
    [
        (VLLM, "vllm", "0.33.0", 4096, (True, True, True, True, True)),
        ({**VLLM, "GET /v1/models": models("m", "somebody", max_model_len=4096)},
         "vllm", "0.33.0", 4096, (True, True, True, True, True)),
        (SGLANG, "sglang", "0.5.23", 8192, (True, True, False, False, False)),
        (DYNAMO, "dynamo", "1.6.0", None, (False, True, False, True, False)),
        (LLAMA, "llama.cpp", "b9999", 2048, (False, True, None, False, None)),
    ],
    ids=["vllm", "vllm by its metrics", "sglang", "dynamo", "llama.cpp"],
)  # fmt: skip
async def test_each_engine_is_known_by_its_routes(
    routes: Routes, engine: str, version: str, context: int | None, can: tuple[bool | None, ...]
) -> None:
    found = await learn(routes)
    assert fields(found, "engine version context") == (engine, version, context)
    assert fields(found, CAN) == can
    assert found.cached_tokens is None


async def test_a_server_with_nothing_but_answers_is_unknown_and_no_failure() -> None:
    found = await learn({"POST /v1/chat/completions": 200})
    assert found == Capabilities(engine="unknown", models_route=False, metrics=False)


@pytest.mark.parametrize("bad", [500, "no JSON", {"version": 7}, {"paths": []}], ids=str)
async def test_broken_routes_leave_their_field_unknown(bad: Any) -> None:
    broken = dict.fromkeys(
        ("GET /version", "GET /server_info", "GET /props", "GET /openapi.json", "GET /metrics"), bad
    )
    found = await learn({**broken, "GET /v1/models": models("m", "x")}, missing=500)
    assert fields(found, "models version engine tokenize") == (("m",), None, "unknown", None)


async def test_routes_that_never_answer_do_not_hold_the_rest() -> None:
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/v1/models":
            await over.wait()
        return web.json_response(models("m", "vllm"))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serve_app(app) as url:
        found = await learn_from(f"{url}/v1", 0.2)
        over.set()
    assert fields(found, "models engine version metrics") == (("m",), "vllm", None, None)


CHAT = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "length"}]}
TEXT = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
VECTORS = {"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 1}}


async def prove(routes: Routes) -> tuple[ProbeResult | Failure, list[str]]:
    async with routes_server(routes) as (url, asked), backend() as client:
        return await CompletionProbe(client).prove(endpoint(url), "m", 60.0), asked


@pytest.mark.parametrize(
    ("routes", "route"),
    [
        ({"POST /v1/chat/completions": CHAT}, "chat"),
        ({"POST /v1/chat/completions": 400, "POST /v1/completions": TEXT}, "completions"),
        ({"POST /v1/embeddings": VECTORS}, "embeddings"),
    ],
)
async def test_models_that_do_not_chat_are_asked_for_what_they_do(
    routes: Routes, route: str
) -> None:
    found, _ = await prove(routes)
    assert isinstance(found, ProbeResult) and found.route == route


async def test_the_first_route_s_refusal_is_the_reason_where_none_answers() -> None:
    found, asked = await prove({"POST /v1/chat/completions": 422, "POST /v1/completions": 404})
    assert isinstance(found, Failure) and found.status == 422
    assert len(asked) == 3


async def listed(refusals, headers):
    """What a probe of a provider comes to that refuses its list so often; when it was asked."""
    times = []

    async def answer(request):
        times.append(time.monotonic())
        if len(times) <= refusals:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers=headers)
        return web.json_response({"data": [{"id": "m-1"}]})

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with serve_app(app) as url, backend() as client:
        return await client.probe(endpoint(f"{url}/v1"), 60.0), times


async def test_a_busy_provider_is_asked_for_its_models_again_and_not_before_it_says():
    found, asked = await listed(3, {"retry-after-ms": "120"})
    assert found.models == ("m-1",)
    assert len(asked) == 4
    assert all(later - before >= 0.12 for before, later in itertools.pairwise(asked))


async def test_a_provider_that_names_too_late_a_time_for_its_models_is_not_asked_again():
    found, asked = await listed(9, {"Retry-After": "90"})
    assert (found.kind, len(asked)) == ("rate_limited", 1)
