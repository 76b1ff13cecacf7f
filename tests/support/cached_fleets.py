"""A fleet over simulated engines with prefix caches, on a clock that jumps: exact every time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.sim import engine as sim
from bagent.sim.config import BLOCK, EngineConfig
from bagent.sim.driver import Driver, PendingCall
from bagent.sim.tokens import block_hashes, pack
from support.jumping_loop import run_jumping
from support.scripted_fleet import GOOD, SETTINGS, ScriptedBackend, Setup, always, setup

SINGLE = BatchSizeRule(stream_every=50)
SMALL = EngineConfig(max_num_seqs=16, kv_tokens=32_768, prefill=20_000.0, decode=50.0)
ANSWER = 8  # tokens


@dataclass(frozen=True)
class Case:
    """A run: the texts of its rows, its engines, and what is done for their caches.

    With ``learns`` each endpoint takes so many seconds to find out that it takes no lists.
    """

    rows: Sequence[str]
    mode: Literal["auto", "always", "never"] = "auto"
    engines: int = 4
    limit: int = 16
    hosted: bool = False
    group: BatchSizeRule = SINGLE
    config: EngineConfig = SMALL
    learns: Sequence[float] = ()
    limits: Sequence[int] = ()


class EngineBackend(ScriptedBackend):
    """Sends calls to simulated engines, one for each endpoint name, in lists of up to 64."""

    def __init__(self, names: Sequence[str], case: Case) -> None:
        super().__init__(dict.fromkeys(names, always()))
        self._learn_seconds = dict(zip(names, case.learns, strict=False))
        self.limits = dict.fromkeys(names, None if case.learns else 64)
        self._engines = {name: sim.SimEngine(case.config) for name in names}
        self._drivers = {name: Driver(engine) for name, engine in self._engines.items()}
        self.streamed = 0

    @property
    def hits(self) -> float:
        """Share of the prompt tokens that the caches knew."""
        stats = [engine.stats for engine in self._engines.values()]
        return sum(one.prefix_hits for one in stats) / sum(one.prefix_queries for one in stats)

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Find out in its time that the endpoint takes no lists."""
        if self._learn_seconds:
            await asyncio.sleep(self._learn_seconds[endpoint.name])
            self.limits[endpoint.name] = 1

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Have the engine answer all of the group."""
        sent = asyncio.get_running_loop().time()
        self.sent.append((sent, endpoint.name, len(group)))
        stream, begin = group[0].stream, group[0].began
        self.streamed += stream
        flight = PendingCall(stream=stream)
        asked = []
        for request in group:
            packed = pack(request.payload.decode())
            hashes = block_hashes(packed, BLOCK, None)
            asked.append(
                sim.SimRequest(len(packed) // 4, ANSWER, hashes, stream=stream, tag=flight)
            )
        self._drivers[endpoint.name].start(flight, asked)
        while not flight.done:
            for one in await flight.wait():
                if one.first_token_at is not None and begin is not None:
                    begin()
        return self.exchange(GOOD, len(group), sent)


class HostedBackend(EngineBackend):
    """A hosted API: any number of requests at once, each alone; what one has read is known to
    others from its first token on, and not before.

    ``read`` and ``written`` count prompt tokens from the cache and into it.
    """

    SPEED = 5_000.0  # prompt tokens a second
    TOKEN = 0.02  # seconds for each token of the answer

    def __init__(self, names: Sequence[str], case: Case) -> None:
        super().__init__(names, case)
        self._known: dict[str, set[int]] = {name: set() for name in names}
        self.read = self.written = 0

    @property
    def hits(self) -> float:
        """Share of the prompt tokens that the caches knew."""
        return self.read / (self.read + self.written)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Read the prompt, then answer."""
        request, known = group[0], self._known[endpoint.name]
        sent = asyncio.get_running_loop().time()
        self.sent.append((sent, endpoint.name, 1))
        self.streamed += request.stream
        packed = pack(request.payload.decode())
        blocks = block_hashes(packed, BLOCK, None)
        found = next((n for n, one in enumerate(blocks) if one not in known), len(blocks)) * BLOCK
        tokens = len(packed) // 4
        self.read += found
        self.written += tokens - found
        await asyncio.sleep((tokens - found) / self.SPEED)
        known.update(blocks)
        if request.stream and request.began is not None:
            request.began()
        await asyncio.sleep(self.TOKEN * ANSWER)
        return self.exchange(GOOD, 1, sent)


@dataclass
class Ran:
    """What a run came to."""

    seconds: float
    hits: float
    backend: EngineBackend


def run(case: Case) -> Ran:
    """Send all rows and tell how long it took and what the caches knew."""
    return run_jumping(_run(case))


async def _run(case: Case) -> Ran:
    loop = asyncio.get_running_loop()
    names = [f"e{number}" for number in range(case.engines)]
    backend = (HostedBackend if case.hosted else EngineBackend)(names, case)
    states = [
        EndpointState(
            Endpoint(name, f"http://{name}/v1", own=not case.hosted),
            InFlightLimit(limit, limit, growing=False),
        )
        for name, limit in zip(names, case.limits or [case.limit] * case.engines, strict=True)
    ]
    prefix = PrefixRule(case.mode)
    s = setup({}, backend=backend, states=states, group=case.group, prefix=prefix)
    began = loop.time()
    s.fleet.expect(True)
    await s.finish(_feed(s, case.rows))
    assert len(s.recorder.replies) == len(case.rows)
    return Ran(loop.time() - began, backend.hits, backend)


async def _feed(s: Setup, rows: Sequence[str]) -> None:
    for number, text in enumerate(rows):
        await s.fleet.wait_for_room()
        request = Request(SETTINGS, text.encode(), prompt=text, max_tokens=ANSWER)
        s.request(Call(s.recorder.evaluate, request, f"k{number}", number, "map", 0))
