"""Whether the client itself is the limit."""

from __future__ import annotations

import asyncio

import pytest

from bagent.bench.monitors import ClientState, ClientWatch, client_limits
from support.jumping_loop import in_event_loop


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ClientState("x", 2.0, 0.3), []),
        (ClientState("x", None, 0.3), []),
        (ClientState("x", 9.9, 0.79, 9.9), []),
        (ClientState("x", 30.0, 0.3), ["event loop 30 ms late"]),
        (ClientState("x", 2.0, 0.95), ["95 % of a core in use"]),
        (ClientState("x", 2.0, 0.3, 250.0), ["requests sent 250 ms late"]),
    ],
)
def test_the_limits_of_a_client(state: ClientState, words: list[str]) -> None:
    assert client_limits(state) == words


@in_event_loop
async def test_a_loop_that_is_held_up_is_seen_as_late() -> None:
    loop = asyncio.get_running_loop()
    spent = iter([1.0, 3.5])
    watch = ClientWatch(cpu=lambda: next(spent))
    await asyncio.sleep(0.05)
    until = loop.time() + 0.1
    while loop.time() < until:  # holds the loop up
        pass
    await asyncio.sleep(0.05)
    _, cpu = watch.stop()
    lags = watch.lags_us
    assert max(lags) > 70_000
    assert cpu == 2.5
