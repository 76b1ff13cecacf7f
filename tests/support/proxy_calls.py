"""A proxy in front of scripted servers, and requests to it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.proxy.server import Proxy, ProxyConfig, start_proxy
from bagent.store.results import ResultQuery, iter_results
from support.cli import Running
from support.fake_server import FakeServer

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
    return list(iter_results(run, ResultQuery(), report=lambda _: None))


def running_proxy(
    stack: ExitStack, folder: Path, fs: FakeServer, *options: str, **env: str
) -> Running:
    """``bagent proxy`` in front of a server, once it serves; its address is in ``out``."""
    (folder / "hosts").write_text(f"{fs.address}\n")
    args = ["proxy", "--hostfile", "hosts", "--port", "0", *options, "-o", "run"]
    proxy = stack.enter_context(Running(args, folder, env))
    proxy.wait_for_out("\n")
    proxy.wait_for_err("next: export")
    return proxy


def post_chat(url: str, row: str = "r1", **more: Any) -> int | None:
    """The status of the answer to one chat, None where the connection broke."""
    body = json.dumps(chat(row, **more)).encode()
    try:
        with urllib.request.urlopen(f"{url}/chat/completions", body, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
