"""A fleet over simulated engines with prefix caches, on a clock that jumps: exact every time."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, Request
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.call import Call
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.prefix_affinity import PrefixRule
from bagent.sim import engine as sim
from bagent.sim.config import BLOCK, EngineConfig
from bagent.sim.driver import Driver, PendingCall
from bagent.sim.tokens import block_hashes, pack
from bagent.types import Failure, Reply
from support.jumping_loop import run_jumping
from support.scripted_fleet import Recorder

SETTINGS = CallSettings(model="m", sampling={}, extra={})
SINGLE = BatchSizeRule(stream_every=50)
SMALL = EngineConfig(max_num_seqs=16, kv_tokens=32_768, prefill=20_000.0, decode=50.0)


class EngineBackend:
    """Sends calls to simulated engines, one for each endpoint name; all answers are as long.

    With ``learns`` each endpoint takes so many seconds to find out that it takes no lists.
    """

    learns: Sequence[float] = ()

    def __init__(self, names: Sequence[str], config: EngineConfig, answer: int) -> None:
        self._learned: set[str] = set()
        self.engines = {name: sim.SimEngine(config) for name in names}
        self._drivers = {name: Driver(engine) for name, engine in self.engines.items()}
        self._answer = answer
        self.sent: list[tuple[float, str, int]] = []
        self.streamed = 0

    @property
    def hits(self) -> float:
        """Share of the prompt tokens that the caches knew."""
        stats = [engine.stats for engine in self.engines.values()]
        return sum(one.prefix_hits for one in stats) / sum(one.prefix_queries for one in stats)

    def group_key(self, request: Request) -> Hashable | None:
        """All calls are alike."""
        return "all"

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """Lists of up to 64."""
        if self.learns:
            return 1 if endpoint.name in self._learned else None
        return 64

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Not told."""
        return None

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """It takes its time."""
        if self.learns:
            await asyncio.sleep(self.learns[list(self.engines).index(endpoint.name)])
            self._learned.add(endpoint.name)

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing was learned."""

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Have the engine answer all of the group."""
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self.sent.append((sent, endpoint.name, len(group)))
        stream = group[0].stream
        self.streamed += stream
        flight = PendingCall(stream=stream)
        asked = []
        for request in group:
            packed = pack(request.payload.decode())
            tokens = len(packed) // 4
            asked.append(
                sim.SimRequest(
                    tokens,
                    self._answer,
                    block_hashes(packed, BLOCK, None),
                    stream=stream,
                    tag=flight,
                )
            )
        self._drivers[endpoint.name].start(flight, asked)
        while not flight.done:
            for one in await flight.wait():
                if one.first_token_at is not None and group[0].began is not None:
                    group[0].began()
        reply = Reply(text="yes", finish_reason="stop")
        return Exchange([reply] * len(group), sent=sent, done=loop.time(), status=200)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Always well."""
        return Capabilities()

    async def close(self) -> None:
        """Nothing to close."""


class HostedBackend(EngineBackend):
    """A hosted API: any number of requests at once, each alone; what one has read is known to
    others from its first token on, and not before.

    ``read`` and ``written`` count prompt tokens from the cache and into it.
    """

    SPEED = 5_000.0  # prompt tokens a second
    TOKEN = 0.02  # seconds for each token of the answer

    def __init__(self, names: Sequence[str], config: EngineConfig, answer: int) -> None:
        super().__init__(names, config, answer)
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
        loop, request, known = asyncio.get_running_loop(), group[0], self._known[endpoint.name]
        sent = loop.time()
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
        await asyncio.sleep(self.TOKEN * self._answer)
        reply = Reply(text="yes", finish_reason="stop")
        return Exchange([reply], sent=sent, done=loop.time(), status=200)


@dataclass
class Ran:
    """What a run came to."""

    seconds: float
    hits: float
    backend: EngineBackend


@dataclass(frozen=True)
class Case:
    """A run: the texts of its rows, its engines, and what is done for their caches."""

    rows: Sequence[str]
    mode: Literal["auto", "always", "never"] = "auto"
    engines: int = 4
    limit: int = 16
    answer: int = 8
    hosted: bool = False
    group: BatchSizeRule = SINGLE
    config: EngineConfig = SMALL
    learns: Sequence[float] = ()
    limits: Sequence[int] = ()


def run(case: Case) -> Ran:
    """Send all rows and tell how long it took and what the caches knew."""
    return run_jumping(_run(case))


async def _run(case: Case) -> Ran:
    loop = asyncio.get_running_loop()
    names = [f"e{number}" for number in range(case.engines)]
    kind = HostedBackend if case.hosted else EngineBackend
    backend = kind(names, case.config, case.answer)
    backend.learns = case.learns
    states = [
        EndpointState(
            Endpoint(name, f"http://{name}/v1", own=not case.hosted),
            InFlightLimit(limit, limit, growing=False),
        )
        for name, limit in zip(names, case.limits or [case.limit] * case.engines, strict=True)
    ]
    prefix = PrefixRule(case.mode)
    fleet = Fleet(
        states,
        backend,
        FleetConfig(concurrency=1000, group=case.group, prefix=prefix),
        on_attempts=lambda attempts: None,
        notice=lambda words: None,
        random=Random(1),
    )
    recorder = Recorder()
    began = loop.time()
    fleet.expect(True)
    for number, text in enumerate(case.rows):
        await fleet.wait_for_room()
        request = Request(SETTINGS, text.encode(), prompt=text, max_tokens=case.answer)
        call = Call(recorder.evaluate, request, f"k{number}", number, "map", 0)
        recorder.request(fleet, call)
    fleet.expect(False)
    idle = asyncio.ensure_future(fleet.wait_idle())
    ends: list[asyncio.Future[Any]] = [idle, fleet.stopped]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if fleet.stopped.done():
        raise fleet.stopped.result()
    assert len(recorder.replies) == len(case.rows)
    return Ran(loop.time() - began, backend.hits, backend)
