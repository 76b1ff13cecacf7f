"""A proxy in front of scripted servers, and requests to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limiter import InFlightLimit
from bagent.proxy.serve import Proxy, ProxyConfig, start_proxy
from bagent.store.readers import Wanted, iter_results

Work = Callable[[Proxy, aiohttp.ClientSession], Awaitable[Any]]


def through(urls: list[str], work: Work, run: Path, **config: Any) -> Any:
    """What ``work`` returns, done against a proxy in front of ``urls``."""
    own = config.pop("own", False)
    headers = config.pop("headers", {"Authorization": "Bearer own"})

    async def main() -> Any:
        states = [
            EndpointState(Endpoint(f"e{i}", url, headers, own=own), InFlightLimit(8, 8))
            for i, url in enumerate(urls)
        ]
        settings = ProxyConfig(**{"port": 0, **config})
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(
                start_proxy(states, settings, run, lambda _: None)
            )
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return await work(proxy, session)

    return asyncio.run(main())


def chat(row: str = "r1", **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": f"id={row}"}], **more}


async def ask(proxy: Proxy, session: aiohttp.ClientSession, **more: Any) -> tuple[int, Any]:
    """Status and body of the answer to a chat request."""
    headers = more.pop("headers", {})
    url = f"{proxy.url}/chat/completions"
    async with session.post(url, json=chat(**more), headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


def rows_of(run: Path) -> list[Any]:
    """What the proxy metered."""
    return list(iter_results(run, Wanted(), report=lambda _: None))
