"""Limits in the headers of answers, from the wire to whoever sends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bagent.backend_kinds import LIMITS
from bagent.backends.base import Exchange
from bagent.backends.registry import unsupported_settings
from support.provider_calls import PROVIDERS, QUICK, Provider, call
from support.provider_protocols import ModelAnswer
from support.provider_server import Fault, serve

TOLD = {
    "openai": {
        "x-ratelimit-limit-requests": "500",
        "x-ratelimit-remaining-requests": "499",
        "x-ratelimit-reset-requests": "120ms",
    },
    "anthropic": {
        "Anthropic-RateLimit-Requests-Limit": "500",
        "Anthropic-RateLimit-Requests-Remaining": "499",
        "Anthropic-RateLimit-Requests-Reset": "2099-11-14T22:13:32Z",
    },
    "bedrock": {},
}


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.kind)
def provider(request: pytest.FixtureRequest) -> Provider:
    found: Provider = request.param
    return found


def exchanges(
    provider: Provider,
    *script: ModelAnswer | Fault,
    own: bool = False,
    stream: bool = False,
) -> list[Exchange]:
    """Two calls to a server that tells limits with every answer; ``own``: called an own engine."""

    async def main() -> list[Exchange]:
        async with serve(provider.wire(), *script) as server:
            server.response_headers = TOLD[provider.kind]
            backend = provider.backend(server.url)
            to = msgspec.structs.replace(provider.endpoint(server.url), own=own)
            found = [await backend.send(to, [call(stream=stream)], QUICK) for _ in range(2)]
            await backend.close()
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_brings_the_accounts_limits(provider: Provider, stream: bool) -> None:
    found = exchanges(provider, ModelAnswer(), stream=stream)[0].limits
    if LIMITS in unsupported_settings(provider.kind).not_reported:
        assert found is None, "it tells none: the fleet finds its pace by refusals"
        return
    assert found is not None
    assert found.requests is not None
    assert (found.requests.limit, found.requests.remaining) == (500, 499)


def test_an_engine_of_ones_own_is_looked_at_only_once_it_has_refused() -> None:
    provider = PROVIDERS[0]
    assert [one.limits for one in exchanges(provider, ModelAnswer(), own=True)] == [None, None]
    after = exchanges(provider, Fault("throttled"), ModelAnswer(), own=True)
    assert [one.limits is not None for one in after] == [True, True]
