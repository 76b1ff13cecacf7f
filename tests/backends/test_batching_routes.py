"""Which calls may share a request, how many, and what refusals of such requests teach."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bagent.backends.batching.routes import MAX_CHATS
from bagent.backends.batching.wire import MAX_PROMPTS
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.types import Failure
from support.tiny_engine import OWN, PLAIN, Setting, TinyEngine, chat, raw_prompt

RAW = raw_prompt("2+2=")
ROW = chat("be brief", "what is 2+2?")
HOSTED = Endpoint("api", "https://api/v1")
TOOL = {"type": "function", "function": {"name": "f"}}


def with_fields(**fields: Any) -> CallSettings:
    """Settings with further parameters."""
    return CallSettings(model="m", sampling=fields, extra={})


def ready(mode: str = "auto", engine: str | None = "vllm") -> Setting:
    """An engine that is known, with the template for :data:`ROW` learned and confirmed."""
    setting = Setting(TinyEngine(engine=engine), mode)
    asyncio.run(setting.learn(ROW))
    if setting.profiles.of(OWN).awaits_sample:
        setting.confirm(ROW)
    return setting


def refusal(status: int, words: str = "no", kind: str = "rejected", **fields: Any) -> Failure:
    """What a refused group came to."""
    return Failure(kind, words, status=status, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        RAW,
        chat("be brief", "what is 2+2?", "4", "and 3+3?"),
        chat("be brief", "what is 2+2?", max_tokens=17),
        chat("be brief", "what is 2+2?", seed=1),
        chat("be brief", "what is 2+2?", settings=with_fields(temperature=0)),
    ],
)
def test_calls_that_differ_in_their_settings_do_not_go_together(other: Request) -> None:
    key = Setting().groups.key
    assert key(other) is not None
    assert key(ROW) != key(other)


@pytest.mark.parametrize(
    "request_",
    [
        chat("a", "b", stream=True),
        raw_prompt("a", max_tokens=None),
        Request(PLAIN, b"{}", body={"messages": []}),
        chat("a", "b", settings=with_fields(n=2)),
        chat("a", "b", settings=CallSettings("m", {}, {}, tools=[TOOL])),
        chat("a", "b", settings=with_fields(reasoning_effort="low")),
        chat("a", "b", settings=CallSettings("m", {}, {"nvext": {}})),
        raw_prompt("a", settings=with_fields(best_of=2)),
        raw_prompt("a", settings=CallSettings("m", {}, {"max_tokens": 5})),
    ],
)
def test_calls_that_no_group_can_carry_go_alone(request_: Request) -> None:
    assert Setting().groups.key(request_) is None


def test_what_a_probe_found_missing_is_not_tried() -> None:
    setting = ready("chat")
    setting.profiles.of(OWN).update(Capabilities(engine="vllm", lists=False, chat_batch=False))
    assert setting.limit(ROW) == 1
    assert setting.notices == []
    setting = ready()
    setting.profiles.of(OWN).update(Capabilities(engine="vllm", lists=False))
    assert setting.limit(RAW) == 1
    assert setting.limit(ROW) == MAX_CHATS


@pytest.mark.parametrize("status", [404, 501])
def test_a_route_that_is_not_there_is_not_asked_again(status: int) -> None:
    setting = ready("chat")
    setting.groups.confirmed(OWN, "chats")
    assert setting.groups.refused(OWN, "chats", refusal(status))
    assert setting.limit(ROW) == 1
    assert len(setting.notices) == 1


@pytest.mark.parametrize(
    "words",
    [
        "body.prompt: Input should be a valid string",
        "'prompt' must not be an array",
        "json: cannot unmarshal array into Go struct field CompletionRequest.prompt",
    ],
)
def test_an_endpoint_that_says_it_takes_no_lists_gets_none_from_then_on(words: str) -> None:
    setting = ready()
    assert setting.groups.refused(OWN, "prompts", refusal(400, words))
    assert setting.limit(RAW) == 1
    assert setting.limit(ROW) == MAX_CHATS
    assert len(setting.notices) == 1
    assert words in setting.notices[0]


def test_one_bad_row_in_the_first_group_is_no_reason_yet_but_a_second_refusal_is() -> None:
    setting = ready()
    assert not setting.groups.refused(OWN, "prompts", refusal(400, "HTTP 400: bad token"))
    assert setting.limit(RAW) == MAX_PROMPTS
    assert setting.groups.refused(OWN, "prompts", refusal(400, "HTTP 400: bad token"))
    assert setting.limit(RAW) == 1


@pytest.mark.parametrize(
    "failure",
    [
        refusal(400, "prompt of 9000 tokens, a string too long", "context_overflow"),
        refusal(401, "prompt string", "auth"),
        refusal(413, "too large"),
        refusal(503, "queue full", "overloaded", busy=True, passing=True),
        msgspec.structs.replace(refusal(0, "gone", "connect"), status=None),
    ],
)
def test_failures_that_single_calls_meet_too_teach_nothing(failure: Failure) -> None:
    setting = ready()
    for _ in range(3):
        assert not setting.groups.refused(OWN, "prompts", failure)
    assert setting.limit(RAW) == MAX_PROMPTS


def test_an_endpoint_that_took_a_group_is_trusted_with_more() -> None:
    setting = ready()
    setting.groups.confirmed(OWN, "prompts")
    for failure in (refusal(400, "bad"), refusal(500, "oops", "overloaded")):
        for _ in range(3):
            assert not setting.groups.refused(OWN, "prompts", failure)
    assert setting.limit(RAW) == MAX_PROMPTS


def test_an_endpoint_that_came_back_is_learned_anew() -> None:
    setting = ready()
    setting.groups.refused(OWN, "chats", refusal(404))
    setting.profiles.forget(OWN)
    assert setting.limit(ROW) is None
    assert setting.limit(RAW) == MAX_PROMPTS
    assert not setting.profiles.of(OWN).awaits_sample


def ab(settings: CallSettings) -> Request:
    return chat("a", "b", settings=settings)


LOGPROBS, STOP_IDS = with_fields(logprobs=True), with_fields(stop_token_ids=[2])
FORM = CallSettings("m", {}, {}, OutputFormat("answer", b"{}", strict=True))


@pytest.mark.parametrize(
    ("mode", "engine", "request_", "limit"),
    [
        ("single", "vllm", RAW, 1),
        ("single", "vllm", ROW, 1),
        ("auto", "vllm", RAW, MAX_PROMPTS),
        ("auto", None, RAW, MAX_PROMPTS),
        ("chat", "vllm", RAW, 1),
        ("chat", "vllm", ROW, MAX_CHATS),
        ("auto", "sglang", ROW, 1),
        ("chat", "sglang", ROW, MAX_CHATS),
        ("auto", "llamacpp", RAW, 1),
        ("auto", "llama.cpp", ROW, 1),
        # what only the chat route takes
        ("auto", "vllm", ab(LOGPROBS), MAX_CHATS),
        # what a batch of chats would ignore
        ("auto", "vllm", ab(STOP_IDS), MAX_PROMPTS),
        ("chat", "vllm", ab(STOP_IDS), 1),
        # a schema travels in every way
        ("auto", "vllm", ab(FORM), MAX_PROMPTS),
        ("chat", "vllm", ab(FORM), MAX_CHATS),
    ],
)
def test_how_many_calls_go_together_by_mode_engine_and_call(
    mode: str, engine: str | None, request_: Request, limit: int
) -> None:
    setting = ready(mode, engine)
    assert setting.limit(request_) == limit
    assert setting.limit(request_, HOSTED) == 1
    if limit == MAX_CHATS and engine == "vllm":
        assert setting.groups.way(OWN, request_) == "chats"
    if mode == "chat":
        assert setting.engine.asked == []
