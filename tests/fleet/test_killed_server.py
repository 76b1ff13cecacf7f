"""A server that is killed closes all of its connections at once and then refuses new ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from aiohttp import web

from bagent.backends.endpoint import Endpoint
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.retry import RetryPolicy
from bagent.types import Attempt
from support.backend_calls import backend
from support.routes_server import models
from support.scripted_fleet import Recorder
from support.tiny_engine import raw_prompt

LIMIT = 64


@dataclass
class Killed:
    """Answers ``well`` requests, so that connections are kept open; holds the next until the rows
    in flight are ``LIMIT``, and is killed then. With ``begun`` their answers have begun."""

    well: int
    begun: bool = False
    rows: int = 0
    died: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self) -> str:
        """Start it; returns its address."""
        self._server = web.Server(self._handle, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._listening = site
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Close what is left of it."""
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response(models("m", "vllm"))
        prompts = (await request.json())["prompt"]
        count = len(prompts) if isinstance(prompts, list) else 1
        body = {"choices": [{"index": i, "text": "yes"} for i in range(count)]}
        self.well -= count
        if self.well >= 0:
            return web.json_response(body)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        if self.begun:
            await answer.prepare(request)
            await answer.write(b'{"choices": [')
        self.rows += count
        if self.rows == LIMIT:
            self._kill()
        await self.died.wait()
        return answer

    def _kill(self) -> None:
        assert self._listening._server is not None
        self._listening._server.close()
        for connection in self._server.connections:
            assert connection.transport is not None
            connection.transport.abort()
        self.died.set()


async def _run(killed: Killed, group: BatchSizeRule, rows: int) -> tuple[Recorder, list[Attempt]]:
    well = Killed(10**9)
    urls = {"dead": await killed.serve(), "well": await well.serve()}
    states = [
        EndpointState(
            Endpoint(name, url, own=True), InFlightLimit(LIMIT, LIMIT), Account(None, None, 9.0)
        )
        for name, url in urls.items()
    ]
    attempts: list[Attempt] = []
    recorder = Recorder()
    options: dict[str, Any] = {"batching": "single" if group.single else "completions"}
    async with backend(**options) as found:
        fleet = Fleet(
            states,
            found,
            FleetConfig(concurrency=1000, group=group, retry=RetryPolicy(retries=0)),
            on_attempt=attempts.append,
            notice=lambda line: None,
            random=Random(1),
        )
        for row in range(rows):
            await fleet.wait_for_room()
            request = raw_prompt(f"row {row}")
            call = Call(recorder.evaluate, request, f"k{row}", row, "map", 0)
            recorder.request(fleet, call)
        await asyncio.wait_for(fleet.wait_idle(), 60)
        fleet.abandon_waiting()
    await killed.stop()
    await well.stop()
    return recorder, attempts


@pytest.mark.parametrize(
    ("group", "begun"),
    [(BatchSizeRule(), True), (BatchSizeRule(size=16, single=False), False)],
    ids=["singles inside answers", "lists before answers"],
)
def test_a_killed_server_fails_no_more_than_it_had_in_flight(group, begun):
    recorder, attempts = asyncio.run(_run(Killed(4 * LIMIT, begun), group, 800))
    assert len(recorder.replies) == 800, recorder.failures
    failed = [one for one in attempts if one.error_kind is not None]
    assert {one.endpoint for one in failed} == {"dead"}
    assert LIMIT <= len(failed) <= LIMIT + 1
