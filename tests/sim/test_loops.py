"""The simulated engine answers on every event loop that a run may use."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from bagent.sim import parse_sim_url, start_sim


async def answered(calls: int) -> list[int]:
    async with (
        start_sim(parse_sim_url("sim://?speedup=20")) as sim,
        aiohttp.ClientSession() as session,
    ):

        async def call(number: int) -> int:
            body = {"messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 20}
            async with session.post(f"{sim.urls[0]}/v1/chat/completions", json=body) as reply:
                return reply.status

        return await asyncio.gather(*(call(number) for number in range(calls)))


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_many_calls_at_once_are_all_answered(runner):
    run = asyncio.run if runner == "asyncio" else pytest.importorskip("uvloop").run
    assert set(run(answered(80))) == {200}
