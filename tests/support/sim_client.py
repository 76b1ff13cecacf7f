"""A simulated fleet and a client to it, for the time of one coroutine."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from bagent.sim import RunningSim, parse_sim_url, start_sim


class Client:
    """Speaks to the first endpoint of ``sim``."""

    def __init__(self, sim: RunningSim, session: aiohttp.ClientSession) -> None:
        self.sim = sim
        self.session = session
        self.url = sim.urls[0]

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """Status and decoded JSON; ``body`` is JSON, or bytes sent as they are."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, **sent, **more) as response:
            text = await response.text()
            return response.status, json.loads(text)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def chat(self, content: str = "hello", **fields: Any) -> dict[str, Any]:
        """One chat that must succeed."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        status, reply = await self.post("/v1/chat/completions", body)
        assert status == 200, reply
        return reply

    async def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One completion call that must succeed."""
        status, reply = await self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, reply
        return reply

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The decoded events of a stream; the end mark is the text ``[DONE]``."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        events = [e.removeprefix("data: ") for e in text.split("\n\n") if e]
        return [e if e == "[DONE]" else json.loads(e) for e in events]


Scene = Callable[..., Awaitable[None]]


def play(options: str, scene: Scene, **arguments: Any) -> None:
    """Run a coroutine against a fleet started from ``sim://?OPTIONS``; it gets the client."""

    async def main() -> None:
        config = parse_sim_url(f"sim://?{options}")
        async with start_sim(config) as sim, aiohttp.ClientSession() as session:
            await asyncio.wait_for(scene(Client(sim, session), **arguments), 30)

    asyncio.run(main())


def on_sim(options: str) -> Callable[[Scene], Callable[..., None]]:
    """Run the decorated test by :func:`play`; its first parameter is the client."""

    def decorate(test: Scene) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            play(options, test, **arguments)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        signature = inspect.signature(test)
        fixtures = list(signature.parameters.values())[1:]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
