"""The tokens of a prompt, asked for at the endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bagent.backends.base import TOO_LONG, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.backend import PromptCounter
from bagent.backends.profile import EndpointProfiles
from bagent.backends.request import CallSettings, Request
from bagent.types import Failure
from support.tiny_engine import OWN, chat, raw_prompt

ANSWER = 200, b'{"count": 7}'


def count(
    request: Request, answer: tuple[int, bytes] | Failure = ANSWER, times: int = 1
) -> tuple[int | None, list[tuple[str, Any]]]:
    """What a counter finds, asked so many times, and what it asked the endpoint."""
    asked: list[tuple[str, Any]] = []

    async def ask(
        endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes] | Failure:
        asked.append((endpoint.url + path, msgspec.json.decode(body)))
        return answer

    counter = PromptCounter(
        EndpointProfiles(), ask, lambda _, request: request.settings.model or ""
    )
    counts = [asyncio.run(counter.count(OWN, request, 5.0)) for _ in range(times)]
    return counts[-1], asked


def test_a_text_is_counted_as_completions_would_read_it():
    fields = {"model": "m", "prompt": "some text", "add_special_tokens": True}
    assert count(raw_prompt("some text")) == (7, [("http://here/tokenize", fields)])


def test_a_chat_is_counted_with_all_that_its_template_may_print():
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 3}
    settings = CallSettings(model="m", sampling={}, extra=extra, tools=[{"type": "function"}])
    request = chat("be brief", "hello", settings=settings)
    found, ((_, body),) = count(request)
    assert found == 7
    assert body == {
        "model": "m",
        "messages": request.messages,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function"}],
    }


@pytest.mark.parametrize(
    "request_",
    [
        Request(CallSettings(None, {}, {}), b"{}", body={"messages": []}),
        Request(
            CallSettings(None, {}, {}),
            b"[]",
            messages=[{"role": "user", "content": [{"type": "image_url"}]}],
        ),
        raw_prompt("x", CallSettings(None, {}, {"truncate_prompt_tokens": 100})),
    ],
    ids=["a body of the user's own", "an image", "cut by the server"],
)
def test_where_a_number_would_not_hold_none_is_asked_for(request_: Request):
    assert count(request_) == (None, [])


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ((404, b"{}"), 1), ((500, b"{}"), 2), ((200, b"<html>"), 2),
        ((200, b'{"count": true}'), 2), ((200, b'{"count": 0}'), 2),
        ((200, b'{"tokens": [1, 2]}'), 1), (Failure("timeout", "no answer", True), 2),
    ],
)  # fmt: skip
def test_an_endpoint_that_tells_no_count_is_asked_again_only_where_it_has_the_route(
    answer: tuple[int, bytes] | Failure, asked: int
):
    found, requests = count(raw_prompt("x"), answer, times=2)
    assert (found, len(requests)) == (None, asked)


def test_a_prompt_that_the_server_refuses_to_count_for_its_length_is_too_long():
    words = (
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least"
        " 4097 input tokens, which exceeds this limit even without any output tokens."
    )
    refusal = msgspec.json.encode({"error": {"message": words, "type": "BadRequestError"}})
    assert count(raw_prompt("x"), (400, refusal))[0] == TOO_LONG
    assert count(raw_prompt("x"), (400, b'{"error": {"message": "no such field"}}'))[0] is None
