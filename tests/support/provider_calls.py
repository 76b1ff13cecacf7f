"""Each hosted backend with a server that speaks its provider's protocol."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import botocore.loaders
import msgspec

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.bedrock.backend import BedrockConfig
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.keys import KeySource
from bagent.backends.registry import BackendConfig, make_backend
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.types import Failure, Reply
from support.backend_calls import QUICK, failure, reply
from support.provider_bedrock import BedrockWire
from support.provider_protocols import (
    SECRET,
    AnthropicWire,
    DynamoWire,
    ModelAnswer,
    OpenAIWire,
    ResponsesWire,
    SglangWire,
    VllmWire,
    Wire,
)
from support.provider_server import Fault, ProviderServer, serve

# One reader of boto3's descriptions of services for all tests: they take most of a test's time.
botocore.loaders.create_loader = functools.cache(botocore.loaders.create_loader)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


class Provider(msgspec.Struct, frozen=True):
    """One kind of backend under test."""

    kind: str
    wire: Callable[[], Wire]
    api: str = "auto"

    def endpoint(self, url: str, key: str = SECRET) -> Endpoint:
        """An endpoint called ``here`` at the server's address."""
        if self.kind == "anthropic":
            headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            return Endpoint("here", f"{url}/v1", headers=headers)
        headers = {"Authorization": f"Bearer {key}"}
        return Endpoint("here", url if self.kind == "bedrock" else f"{url}/v1", headers=headers)

    def backend(
        self,
        url: str,
        notice: Callable[[str], None] = lambda _: None,
        keys: KeySource | None = None,
    ) -> Backend:
        """A backend with connections of its own."""
        reached = BedrockConfig(4, region="us-east-1", endpoint_url=url, proxy="none")
        config = BackendConfig(keys=keys, bedrock=reached, api=self.api)
        return make_backend(self.kind, Transport(), config, notice)


PROVIDERS = [
    Provider("openai", OpenAIWire),
    Provider("openai", ResponsesWire, "responses"),
    Provider("anthropic", AnthropicWire),
    Provider("bedrock", BedrockWire),
]
"""Hosted providers: each has a protocol of its own."""

ENGINES = [
    Provider("vllm", VllmWire),
    Provider("sglang", SglangWire),
    Provider("dynamo", DynamoWire),
]
"""Engines of one's own: OpenAI's protocol, each in its own way."""


class Talk(msgspec.Struct):
    """What came of the calls: the exchanges in order, the server, what people were told."""

    exchanges: list[Exchange]
    server: ProviderServer
    notices: list[str]

    @property
    def reply(self) -> Reply:
        """The last result, which must be a reply."""
        assert self.server.faults == []
        return reply(self.exchanges[-1])

    @property
    def failure(self) -> Failure:
        """The last result, which must be a failure."""
        assert self.server.faults == []
        return failure(self.exchanges[-1])


def call(
    *messages: dict[str, Any], stream: bool = False, max_tokens: int | None = None, **settings: Any
) -> Request:
    """A call of model ``m-1``; ``settings`` are fields of CallSettings."""
    told = list(messages) or [{"role": "user", "content": "Say hello."}]
    fields: dict[str, Any] = {"model": "m-1", "sampling": {}, "extra": {}, **settings}
    payload = encode_payload(told)
    return Request(
        CallSettings(**fields), payload, messages=told, stream=stream, max_tokens=max_tokens
    )


def ask(
    provider: Provider,
    *script: ModelAnswer | Fault,
    calls: list[Request] | None = None,
    timeouts: Timeouts = QUICK,
) -> Talk:
    """Send the calls one after the other to a server with that script."""

    async def main() -> Talk:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(serve(provider.wire(), *script))
            notices: list[str] = []
            backend = provider.backend(server.url, notices.append)
            stack.push_async_callback(backend.close)
            to = provider.endpoint(server.url)
            found = [await backend.send(to, [one], timeouts) for one in calls or [call()]]
            return Talk(found, server, notices)

    return asyncio.run(main())
