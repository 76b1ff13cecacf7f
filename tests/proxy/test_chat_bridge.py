"""OpenAI's protocol in front of Bedrock: what clients see, and what Bedrock is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from bagent.backends.base import Timeouts
from bagent.backends.bedrock.backend import BedrockConfig
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import Request
from bagent.proxy.chat_bridge import bridged
from bagent.servers.resolve import Servers
from bagent.types import Failure, Message, Reply
from support.provider_bedrock import BedrockWire
from support.provider_calls import SECRET, WEATHER, call
from support.provider_protocols import ModelAnswer
from support.provider_server import Fault, ProviderServer, serve

CALLS = (("call_a", "weather", {"town": "Bonn"}), ("call_b", "weather", {"town": "Köln"}))
LIMITS = Timeouts(connect=5, first_token=5, idle=5, total=10)
Work = Callable[[Endpoint, ProviderServer], Awaitable[Any]]


def behind(*script: ModelAnswer | Fault, work: Work) -> Any:
    """What ``work`` returns, done with the bridge's endpoint in front of Bedrock."""

    async def main() -> Any:
        async with serve(BedrockWire(), *script) as server:
            headers = {"Authorization": f"Bearer {SECRET}"}
            reached = BedrockConfig(4, region="us-east-1", endpoint_url=server.url, proxy="none")
            to = Endpoint("bedrock/us-east-1", server.url, headers=headers)
            servers = Servers([to], "bedrock", bedrock=reached)
            async with bridged(servers, lambda _: None, LIMITS) as endpoint:
                found = await work(endpoint, server)
            assert server.faults == []
            return found

    return asyncio.run(main())


async def post(endpoint: Endpoint, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and body of the answer to one chat."""
    async with (
        aiohttp.ClientSession(headers={**endpoint.headers, **headers}) as session,
        session.post(f"{endpoint.url}/chat/completions", data=body) as answer,
    ):
        return answer.status, await answer.json()


def asked(*asks: tuple[ModelAnswer | Fault, Request]) -> list[Reply | Failure]:
    """What bagent's own client of OpenAI's protocol makes of the bridge's answers."""

    async def work(endpoint: Endpoint, _: ProviderServer) -> list[Reply | Failure]:
        backend = OpenAIBackend(Transport())
        found = [await backend.send(endpoint, [request], LIMITS) for _, request in asks]
        await backend.close()
        return [exchange.results[0] for exchange in found]

    found: list[Reply | Failure] = behind(*(step for step, _ in asks), work=work)
    return found


def test_an_answer_has_its_text_its_thinking_its_end_and_its_tokens() -> None:
    say = ModelAnswer(text="hello world", thought="Let me see.")
    for found in asked((say, call()), (say, call(stream=True))):
        assert (found.text, found.reasoning) == ("hello world", "Let me see.")
        assert (found.finish_reason, found.model) == ("stop", "m-1")
        assert (found.usage.prompt, found.usage.cached, found.usage.completion) == (30, 20, 7)


def test_tool_calls_come_with_whole_arguments() -> None:
    say = ModelAnswer(text="Let me look.", calls=CALLS, stop="tool_calls")
    calls = [call(stream=stream, tools=(WEATHER,)) for stream in (False, True)]
    for found in asked(*((say, one) for one in calls)):
        assert (found.text, found.finish_reason) == ("Let me look.", "tool_calls")
        assert [(c.id, c.name, json.loads(c.arguments)) for c in found.tool_calls] == list(CALLS)


FAILURES = {
    "throttled": ("rate_limited", True, True),
    "overloaded": ("overloaded", True, True),
    "no_money": ("budget", False, False),
    "bad_key": ("auth", False, False),
    "too_long": ("context_overflow", False, False),
    "bad:nothing of the kind": ("rejected", False, False),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_failure_keeps_its_kind(stream: bool) -> None:
    found = asked(*((Fault(kind), call(stream=stream)) for kind in FAILURES))
    for one, expected in zip(found, FAILURES.values(), strict=True):
        assert (one.kind, one.passing, one.busy) == expected, one
        assert SECRET not in one.message


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    say = ModelAnswer(text="hello to all of you")
    faults = [Fault(kind, after=4, say=say) for kind in ("ends", "inner", "cut")]
    for found in asked(*((fault, call(stream=True)) for fault in faults)):
        assert found.passing
        assert found.text
        assert "hello to all of you".startswith(found.text)


def test_thinking_is_given_back_for_clients_that_do_not_know_of_it() -> None:
    async def work(endpoint: Endpoint, server: ProviderServer) -> Any:
        messages: list[Message] = [{"role": "user", "content": "The weather?"}]

        async def chat() -> Any:
            sent = {"model": "m-1", "messages": messages, "tools": [WEATHER]}
            return (await post(endpoint, json.dumps(sent)))[1]["choices"][0]["message"]

        answer = await chat()
        kept = {name: answer[name] for name in ("role", "content", "tool_calls")}
        results = [{"role": "tool", "tool_call_id": one[0], "content": "rain"} for one in CALLS]
        messages += [kept, *results]
        assert (await chat())["content"] == "wet"
        return server.bodies[1]["messages"][1]["content"]

    first = ModelAnswer(text=None, calls=CALLS, stop="tool_calls", thought="Two towns.")
    blocks = behind(first, ModelAnswer(text="wet"), work=work)
    assert blocks[0]["reasoningContent"]["reasoningText"]["signature"] == "s1g=="


@pytest.mark.parametrize(
    ("sent", "key", "status"),
    [
        (b'{"model":"m-1","messages":[{"role":"user","content":"x"}]}', "another", 401),
        (b"no json", None, 400),
        (b"[]", None, 400),
        (b'{"model":"m-1","prompt":"x"}', None, 400),
        (b'{"model":"m-1","n":2,"messages":[{"role":"user","content":"x"}]}', None, 400),
        (b'{"messages":[{"role":"user","content":"x"}]}', None, 400),
    ],
    ids=["token", "text", "list", "prompt", "n", "model"],
)
def test_what_cannot_be_asked_is_refused_in_openais_form(
    sent: bytes, key: str | None, status: int
) -> None:
    async def work(endpoint: Endpoint, server: ProviderServer) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await post(endpoint, sent, **headers), server.bodies

    (found, body), bodies = behind(ModelAnswer(), work=work)
    assert (found, bodies) == (status, [])
    assert body["error"]["message"]


def test_a_schema_that_a_model_refuses_is_asked_for_in_words() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    sent = {
        "model": "m-1",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }

    async def work(endpoint: Endpoint, server: ProviderServer) -> Any:
        return await post(endpoint, json.dumps(sent)), server.bodies

    refusal = Fault("bad:This model doesn't support the outputConfig.textFormat field.")
    (_, answer), bodies = behind(refusal, ModelAnswer(text='{"n":1}'), work=work)
    assert answer["choices"][0]["message"]["content"] == '{"n":1}'
    assert ["outputConfig" in body for body in bodies] == [True, False]
