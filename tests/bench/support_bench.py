"""Simulated fleets in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bagent.sim import RunningSim, parse_sim_url, start_sim

DEAD = "127.0.0.1:9"


@contextmanager
def simulated(options: str) -> Iterator[RunningSim]:
    """A simulated fleet on a loop of its own, from the options of a ``sim://`` URL."""
    started, ended = threading.Event(), asyncio.Event()
    found: list[tuple[RunningSim, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with start_sim(parse_sim_url(f"sim://?{options}")) as sim:
            found.append((sim, asyncio.get_running_loop()))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield found[0][0]
    finally:
        found[0][1].call_soon_threadsafe(ended.set)
        thread.join(10)


def addresses(sim: RunningSim) -> list[str]:
    """The lines of a hostfile."""
    return [url.removeprefix("http://") for url in sim.urls]


Measure = Callable[..., dict[str, Any]]
