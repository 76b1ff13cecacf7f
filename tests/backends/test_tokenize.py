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


class Told:
    """Answers what the test says to every question, and keeps what was asked."""

    def __init__(self, answer: tuple[int, bytes] | Failure = (200, b'{"count": 7}')) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(
        self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes] | Failure:
        """Take one question."""
        self.asked.append((endpoint.url + path, msgspec.json.decode(body)))
        return self.answer


def count(told: Told, request: Request, endpoint: Endpoint = OWN, times: int = 1) -> int | None:
    """What a counter finds, asked so many times."""
    counter = PromptCounter(
        EndpointProfiles(), told.ask, lambda endpoint, request: request.settings.model or ""
    )
    found = None
    for _ in range(times):
        found = asyncio.run(counter.count(endpoint, request, 5.0))
    return found


def test_a_text_is_counted_as_completions_would_read_it():
    told = Told()
    assert count(told, raw_prompt("some text")) == 7
    fields = {"model": "m", "prompt": "some text", "add_special_tokens": True}
    assert told.asked == [("http://here/tokenize", fields)]


def test_a_chat_is_counted_with_all_that_its_template_may_print():
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 3}
    settings = CallSettings(model="m", sampling={}, extra=extra, tools=[{"type": "function"}])
    told = Told()
    assert count(told, chat("be brief", "hello", settings=settings)) == 7
    assert told.asked[0][1] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ],
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
    told = Told()
    assert count(told, request_) is None
    assert told.asked == []


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
    told = Told(answer)
    assert count(told, raw_prompt("x"), times=2) is None
    assert len(told.asked) == asked


def test_a_prompt_that_the_server_refuses_to_count_for_its_length_is_too_long():
    words = (
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least"
        " 4097 input tokens, which exceeds this limit even without any output tokens."
    )
    refusal = msgspec.json.encode({"error": {"message": words, "type": "BadRequestError"}})
    assert count(Told((400, refusal)), raw_prompt("x")) == TOO_LONG
    assert count(Told((400, b'{"error": {"message": "no such field"}}')), raw_prompt("x")) is None
