"""One real request proves an endpoint."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.openai_http import OpenAIBackend
from bagent.backends.proof import Proof, Prover
from bagent.backends.transport import Transport
from bagent.types import Failure
from support.backend_calls import endpoint
from support.fake_server import FakeServer
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
