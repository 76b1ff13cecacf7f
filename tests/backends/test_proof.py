"""One real request proves an endpoint."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from aiohttp import web

from bagent.backends.openai_http import OpenAIBackend
from bagent.backends.proof import Proof, Prover
from bagent.backends.transport import Transport
from bagent.types import Failure
from support.backend_calls import backend, endpoint
from support.fake_server import FakeServer
from support.http_servers import serve_app
from support.replies import hang, ok, status
from support.routes_server import Routes, routes_server

CHAT = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "length"}]}
TEXT = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
VECTORS = {"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 1}}


async def _prove(url: str, model: str | None = "m", seconds: float = 5.0) -> Proof | Failure:
    backend = OpenAIBackend(Transport())
    try:
        return await Prover(backend).prove(endpoint(url), model, seconds)
    finally:
        await backend.close()


def prove(routes: Routes) -> tuple[Proof | Failure, list[str]]:
    async def run() -> tuple[Proof | Failure, list[str]]:
        async with routes_server(routes) as (url, asked):
            return await _prove(url), asked

    return asyncio.run(run())


def test_it_is_one_chat_call_of_one_token() -> None:
    with FakeServer(flavour="vllm") as fs:
        found = asyncio.run(_prove(fs.url, "fake-model"))
        (seen,) = fs.requests
    assert isinstance(found, Proof)
    assert found.route == "chat" and 0 < found.ms < 5000
    assert seen.body["model"] == "fake-model"
    assert seen.body["max_tokens"] == 1


def test_an_answer_without_text_is_an_answer() -> None:
    with FakeServer({"*": [ok(None, "length")]}) as fs:
        assert isinstance(asyncio.run(_prove(fs.url)), Proof)


def test_a_parameter_under_another_name_is_learned() -> None:
    with FakeServer(refuse={"max_tokens": "max_completion_tokens"}, allow_faults=True) as fs:
        assert isinstance(asyncio.run(_prove(fs.url)), Proof)


@pytest.mark.parametrize(
    ("routes", "route"),
    [
        ({"POST /v1/chat/completions": CHAT}, "chat"),
        ({"POST /v1/chat/completions": 400, "POST /v1/completions": TEXT}, "completions"),
        ({"POST /v1/completions": TEXT}, "completions"),
        ({"POST /v1/embeddings": VECTORS}, "embeddings"),
    ],
)
def test_models_that_do_not_chat_are_asked_for_what_they_do(routes: Routes, route: str) -> None:
    found, _ = prove(routes)
    assert isinstance(found, Proof) and found.route == route


def test_the_first_route_s_refusal_is_the_reason_where_none_answers() -> None:
    found, asked = prove({"POST /v1/chat/completions": 422, "POST /v1/completions": 404})
    assert isinstance(found, Failure) and found.status == 422
    assert len(asked) == 3


def test_a_server_that_is_full_is_asked_once() -> None:
    with FakeServer({"*": [status(503)]}) as fs:
        found = asyncio.run(_prove(fs.url))
        assert len(fs.requests) == 1
    assert isinstance(found, Failure) and found.status == 503


def test_a_silent_server_is_given_up_in_time() -> None:
    with FakeServer({"*": [hang()]}) as fs:
        found = asyncio.run(_prove(fs.url, seconds=0.3))
    assert isinstance(found, Failure) and found.kind == "timeout"


def listed(refusals, own, headers=None):
    """What a probe of a provider comes to that refuses its list so often; when it was asked."""
    times = []

    async def answer(request):
        times.append(time.monotonic())
        if len(times) <= refusals:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers=headers)
        return web.json_response({"data": [{"id": "m-1"}]})

    async def main():
        app = web.Application()
        app.router.add_get("/v1/models", answer)
        async with serve_app(app) as url, backend() as client:
            return await client.probe(endpoint(f"{url}/v1", own=own), 5.0)

    return asyncio.run(main()), times


def test_a_busy_provider_is_asked_for_its_models_again_and_not_before_it_says():
    found, asked = listed(3, own=False, headers={"retry-after-ms": "120"})
    assert found.models == ("m-1",)
    assert len(asked) == 4
    assert all(later - before >= 0.12 for before, later in itertools.pairwise(asked))


def test_a_provider_that_names_too_late_a_time_for_its_models_is_not_asked_again():
    found, asked = listed(9, own=False, headers={"Retry-After": "30"})
    assert (found.kind, len(asked)) == ("rate_limited", 1)


def test_an_engine_of_ones_own_that_refuses_its_models_is_asked_once():
    found, asked = listed(1, own=True)
    assert (found.kind, len(asked)) == ("rate_limited", 1)
