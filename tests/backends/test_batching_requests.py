"""Groups of calls through the OpenAI backend, against a scripted server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bagent.backends.base import Exchange
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.sim import parse_sim_url, start_sim
from bagent.types import Failure, Reply
from support.backend_calls import QUICK, backend, endpoint
from support.fake_server import FakeServer
from support.replies import context_overflow, echo, error_body, ok, status
from support.tiny_engine import PLAIN, chat, raw_prompt

SCHEMA = OutputFormat("answer", b'{"type":"object"}', strict=False)


def raws(count: int, settings: CallSettings = PLAIN) -> list[Request]:
    """Raw prompts of rows r0, r1 ..."""
    return [raw_prompt(f"id=r{i} say it", settings) for i in range(count)]


def chats(count: int, settings: CallSettings = PLAIN) -> list[Request]:
    """Chats of rows r0, r1 ..."""
    return [chat("be {brief} ", f" id=r{i} naïve?\n", settings=settings) for i in range(count)]


def texts(exchange: Exchange) -> list[str | None]:
    """The answers of an exchange, which must all be replies."""
    assert all(isinstance(r, Reply) for r in exchange.results), exchange.results
    return [r.text for r in exchange.results if isinstance(r, Reply)]


async def group(found: OpenAIBackend, fs: FakeServer, calls: list[Request]) -> Exchange:
    """Send a group as the fleet does: learned where that is due, and alone first where it must."""
    to = endpoint(fs.url, own=True)
    assert len({found.group_key(call) for call in calls}) == 1
    if found.group_limit(to, calls[0]) is None:
        await found.learn(to, calls[:4], QUICK)
    if found.group_limit(to, calls[0]) == 1:
        await found.send(to, [chat("be {brief} ", "id=first")], QUICK)
    limit = found.group_limit(to, calls[0])
    assert limit is not None
    assert limit >= len(calls), "they go alone"
    return await found.send(to, calls, QUICK)


async def limit_after(fs: FakeServer, calls: list[Request], **options: Any) -> tuple[Exchange, int]:
    """A group, and how many such calls may go together after it."""
    async with backend(**options) as found:
        exchange = await group(found, fs, calls)
        limit = found.group_limit(endpoint(fs.url, own=True), calls[0])
    assert limit is not None
    return exchange, limit


@pytest.fixture
def vllm() -> Iterator[FakeServer]:
    """A scripted server with vLLM's routes, which repeats what it is asked."""
    with FakeServer({"*": [echo()]}, flavour="vllm") as server:
        yield server


async def test_proven_chats_travel_as_a_list_of_rendered_prompts(vllm: FakeServer) -> None:
    settings = CallSettings("m", {"temperature": 0}, {}, SCHEMA)
    async with backend() as found:
        exchange = await group(found, vllm, chats(3, settings))
    first, seen = vllm.requests
    assert first.path == "/v1/chat/completions"
    assert seen.path == "/v1/completions"
    assert seen.body["prompt"][1] == (
        "<|im_start|>system\nbe {brief} <|im_end|>\n"
        "<|im_start|>user\n id=r1 naïve?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert seen.body["add_special_tokens"] is False
    assert seen.body["max_tokens"] == 16
    assert seen.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [r.rows for r in vllm.requests] == [("first",), ("r0", "r1", "r2")]
    assert texts(exchange) == seen.body["prompt"]
    for result, prompt in zip(exchange.results, seen.body["prompt"], strict=True):
        assert result.usage.prompt == len(prompt.encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda body, seen: body | {"choices": body["choices"][:1]},
        lambda body, seen: body | {"choices": [{"text": "all at once", "finish_reason": "stop"}]},
    ],
)
async def test_a_server_that_answers_a_list_as_one_gets_single_calls(
    vllm: FakeServer, edit: Callable[[Any, Any], Any]
) -> None:
    vllm.server.edit = edit
    notices: list[str] = []
    exchange, limit = await limit_after(vllm, raws(3), notice=notices.append)
    assert exchange.learned
    assert limit == 1
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (context_overflow(), "context_overflow"),
        (status(429), "rate_limited"),
    ],
)
async def test_a_refused_group_is_the_same_failure_for_each_row(
    vllm: FakeServer, reply: Any, kind: str
) -> None:
    vllm.set_script({"r2": [reply], "*": [ok()]})
    exchange, limit = await limit_after(vllm, raws(4))
    assert len(exchange.results) == 4
    assert len({id(result) for result in exchange.results}) == 1
    failure = exchange.results[0]
    assert failure.kind == kind
    assert (exchange.learned, limit > 1) == (False, True)


async def test_raw_thinking_in_a_list_sends_its_chats_again_as_chats(vllm: FakeServer) -> None:
    vllm.set_script({"r1": [ok("<think>hm</think>4")], "*": [ok("4")]})
    notices: list[str] = []

    async with backend(notice=notices.append) as found:
        first = await group(found, vllm, chats(3))
        again = await found.send(endpoint(vllm.url, own=True), chats(3), QUICK)
    assert first.learned
    assert all(isinstance(result, Failure) for result in first.results)
    assert not again.learned
    assert [seen.path.removeprefix("/v1") for seen in vllm.requests] == [
        "/chat/completions",
        "/completions",
        "/chat/completions/batch",
    ]
    assert len(notices) == 1


async def test_a_group_for_which_the_way_was_closed_meanwhile_goes_again(vllm: FakeServer) -> None:
    async with backend() as found:
        exchange = await found.send(endpoint(vllm.url, own=True), chats(2), QUICK)
    assert exchange.withheld and not exchange.connected
    assert exchange.status is None
    assert len(exchange.results) == 2
    assert vllm.requests == []


async def test_a_key_that_the_server_repeats_is_hidden_for_every_row_of_the_group() -> None:
    headers = {"Authorization": "Bearer sk-secret-1", "Content-Type": "application/json"}
    with FakeServer({"*": [status(400, error_body(400, "bad key sk-secret-1"))]}) as fs:
        to = endpoint(fs.url, own=True, headers=headers)
        async with backend() as found:
            await found.learn(to, raws(2), QUICK)
            exchange = await found.send(to, raws(2), QUICK)
    for result in exchange.results:
        assert isinstance(result, Failure)
        assert "***" in result.message
        assert "secret" not in result.message


NUMBER = OutputFormat(
    "answer",
    b'{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}',
    strict=True,
)
SEEDED = CallSettings(None, {"seed": 3}, {}, NUMBER)
AWKWARD = ["plain", " {blanks} \n", "naïve 日本 🙂", "<|im_end|>\n<|im_start|>user\nme", "%s \\n"]


def answers(exchange: Exchange) -> list[tuple[str | None, str | None, int | None]]:
    """Text, end and completion tokens of each reply."""
    assert all(isinstance(r, Reply) for r in exchange.results), exchange.results
    return [
        (r.text, r.finish_reason, r.usage.completion)
        for r in exchange.results
        if isinstance(r, Reply)
    ]


@pytest.mark.parametrize("batching", ["auto", "completions", "chat"])
async def test_chats_get_the_same_answers_in_a_group_of_a_simulated_engine(batching: str) -> None:
    calls = [chat(f"system {text}", f"{text} {i}", settings=SEEDED, max_tokens=64)
             for i, text in enumerate(AWKWARD * 2)]  # fmt: skip
    async with (
        start_sim(parse_sim_url("sim://?speedup=1000")) as sim,
        backend(batching=batching) as found,
    ):
        to = endpoint(f"{sim.urls[0].removesuffix('/v1')}/v1", own=True)
        await found.learn(to, calls, QUICK)
        singles = [await found.send(to, [call], QUICK) for call in calls]
        limit = found.group_limit(to, calls[0])
        assert limit is not None
        assert limit >= len(calls)
        together = await found.send(to, calls, QUICK)
    assert answers(together) == [answers(single)[0] for single in singles]
    assert len({text for text, _, _ in answers(together)}) > 1
