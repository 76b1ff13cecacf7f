"""Stamps of which the differences are right."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.clocks import SteadyUnix
from support.backend_calls import endpoint, request
from support.routes_server import routes_server

NOON = 1_795_867_200.0  # 2026-11-28 12:00 UTC
HOUR = 3600.0
ANSWER = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_wall_clock_that_is_set_changes_no_difference_of_stamps(jump):
    now = [NOON, 50.0]
    clock = SteadyUnix(lambda: now[0], lambda: now[1])
    assert clock() == NOON
    now[:] = [NOON + jump, 52.5]
    assert clock() == NOON + 2.5


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_wall_clock_that_is_set_during_a_request_shows_in_no_time_of_it(jump):
    wall = (NOON + jump * step for step in count())
    ticks = (float(step) for step in count())
    clock = SteadyUnix(lambda: next(wall), lambda: next(ticks))

    async def main():
        async with routes_server({"POST /v1/chat/completions": ANSWER}) as (url, _):
            result = OpenAIBackend(Transport(), clock=clock)
            exchange = await result.send(endpoint(url), [request()], Timeouts())
            await result.close()
            return exchange

    exchange = asyncio.run(main())
    assert exchange.first_byte is not None
    assert NOON < exchange.sent < exchange.first_byte <= exchange.done < NOON + 60
