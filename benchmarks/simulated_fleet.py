"""A fleet as ``bagent run`` makes it over SIMULATED engines, on a clock that jumps.

Limits, groups, balance, looks at the engines' load and health are those of a run; what is left out
is reading, HTTP and writing. Times are the engines' own, so they are exact on any machine, however
busy it is.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bagent.backends.base import Exchange
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.engines.metrics import EngineLoad
from bagent.backends.request import CallSettings, Request
from bagent.fleet.call import Call
from bagent.job.load import JobRequest, load_job
from bagent.runs.load_polling import watch_loads
from bagent.servers.fleet_factory import make_fleet
from bagent.servers.resolve import Servers
from bagent.sim.config import BLOCK, EngineConfig
from bagent.sim.driver import Driver, PendingCall
from bagent.sim.engine import SimEngine
from bagent.sim.engine import SimRequest as Generation
from bagent.sim.tokens import block_hashes, pack
from bagent.types import Failure, Reply, Usage

GONE = Failure("connect", "connection refused", passing=True)
CUT = Failure("connect", "the connection was closed", passing=True)
SETTINGS = CallSettings(model="simulated", sampling={}, extra={})


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and nothing will ever happen")
            self.now += max(timeout, 0.0)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting for them."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@dataclass
class Row:
    """A prompt's text (or its tokens, where no cache matters), and the answer's tokens."""

    tokens: int
    answer: int
    text: str | None = None


@dataclass
class Node:
    """One engine; it may be gone for a while."""

    config: EngineConfig
    engine: SimEngine = field(init=False)
    driver: Driver = field(init=False)
    up: bool = True
    flights: dict[PendingCall, asyncio.Future] = field(default_factory=dict)

    def start(self) -> None:
        self.engine = SimEngine(self.config)
        self.driver = Driver(self.engine)
        self.up = True

    def die(self) -> None:
        """All that it has is lost, and so is its cache."""
        self.up = False
        self.driver.close()
        for waiter in self.flights.values():
            if not waiter.done():
                waiter.set_result(None)

    async def generate(self, rows: list[Row]) -> bool:
        """Whether the answers came: False where it is gone, or died meanwhile."""
        if not self.up:
            return False
        flight, died = PendingCall(stream=False), asyncio.get_running_loop().create_future()
        self.flights[flight] = died
        requests = []
        for row in rows:
            packed = b"" if row.text is None else pack(row.text)
            blocks = block_hashes(packed, BLOCK, None)
            requests.append(Generation(row.tokens, row.answer, blocks, tag=flight))
        self.driver.start(flight, requests)

        async def ended() -> None:
            while not flight.done:
                await flight.wait()

        work = asyncio.ensure_future(ended())
        await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
        del self.flights[flight]
        if died.done():
            work.cancel()
            return False
        return True


class NodesBackend:
    """The backend of a run, as far as the fleet sees it."""

    def __init__(self, nodes: dict[str, Node], rows: list[Row], most: int) -> None:
        self._nodes, self._rows, self._most = nodes, rows, most
        self.requests = 0

    def group_key(self, request: Request) -> str:
        return "all"

    def group_limit(self, endpoint: Endpoint, request: Request) -> int:
        return self._most

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Not told."""
        return None

    async def learn(self, endpoint, samples, timeouts) -> None:
        """Nothing to learn."""

    def forget(self, endpoint) -> None:
        """Nothing was learned."""

    async def send(self, endpoint, group, timeouts) -> Exchange:
        loop, node = asyncio.get_running_loop(), self._nodes[endpoint.name]
        sent_at, was_up = loop.time(), node.up
        self.requests += 1
        rows = [self._rows[int(request.payload)] for request in group]
        if await node.generate(rows):
            results = [
                Reply("yes", "stop", usage=Usage(prompt=row.tokens, completion=row.answer))
                for row in rows
            ]
            return Exchange(results, sent=sent_at, done=loop.time(), status=200)
        failure = CUT if was_up else GONE
        return Exchange([failure] * len(rows), sent=sent_at, done=loop.time(), connected=was_up)

    async def probe(self, endpoint, seconds) -> Capabilities | Failure:
        await asyncio.sleep(0.001)
        return Capabilities() if self._nodes[endpoint.name].up else GONE

    async def close(self) -> None:
        """Nothing to close."""


class NodesReader:
    """What a look at ``/metrics`` tells."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes

    def due(self, endpoint: Endpoint) -> bool:
        return True

    async def read(self, endpoint, seconds, model=None) -> EngineLoad | None:
        node = self._nodes[endpoint.name]
        if not node.up:
            return None
        engine = node.engine
        return EngineLoad(
            at=asyncio.get_running_loop().time(),
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.kv.usage,
            preemptions=engine.stats.preemptions,
        )


class Ends:
    """Counts the rows that ended."""

    def __init__(self) -> None:
        self.good = self.bad = 0

    def count(self, future) -> None:
        if future.cancelled():
            return
        if isinstance(future.result().result, Reply):
            self.good += 1
        else:
            self.bad += 1


def accept(call, reply, delivery) -> None:
    """Any reply is good."""


@dataclass
class Plan:
    """A fleet's engines, what happens to them (seconds, engine, up or down), and the job's keys."""

    nodes: list[EngineConfig]
    rows: list[Row]
    events: list[tuple[float, int, bool]] = field(default_factory=list)
    job: dict = field(default_factory=dict)
    lists: bool = True


def play(events: list[tuple[float, int, bool]], nodes: list[Node]) -> None:
    loop = asyncio.get_running_loop()
    for at, number, up in events:
        node = nodes[number]
        loop.call_at(at, node.start if up else node.die)


async def _bagent(plan: Plan) -> tuple[float, int]:
    loop = asyncio.get_running_loop()
    names = [f"node{number:03}:8000" for number in range(len(plan.nodes))]
    nodes = {name: Node(config) for name, config in zip(names, plan.nodes, strict=True)}
    for node in nodes.values():
        node.start()
    play(plan.events, list(nodes.values()))
    backend = NodesBackend(nodes, plan.rows, 1 << 20 if plan.lists else 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        text = {"backend": "vllm://host", "input": "-", "prompt": {"raw": "{{ x }}"}, **plan.job}
        path.write_text(json.dumps(text))
        job = load_job(JobRequest(path, env={}))
    endpoints = [Endpoint(name, f"http://{name}/v1", account=name, own=True) for name in names]
    fleet, _ = make_fleet(
        job,
        Servers(endpoints, "vllm"),
        backend,
        handles=60_000,
        on_attempts=lambda attempts: None,
        on_sample=lambda sample: None,
        notice=lambda message: None,
    )
    watching = loop.create_task(watch_loads(fleet, NodesReader(nodes), None))

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.25)
            fleet.tick(len(plan.rows) - ends.good)

    ends = Ends()
    ticking = loop.create_task(tick())
    fleet.expect(True)
    for number in range(len(plan.rows)):
        await fleet.wait_for_room()
        request = Request(SETTINGS, b"%d" % number, prompt="", max_tokens=400)
        call = Call(accept, request, f"k{number}", number, "map", 0)
        fleet.request(call).add_done_callback(ends.count)
    fleet.expect(False)
    idle = loop.create_task(fleet.wait_idle())
    await asyncio.wait({idle, fleet.stopped}, return_when=asyncio.FIRST_COMPLETED)
    if fleet.stopped.done():
        raise fleet.stopped.result()
    seconds = loop.time()
    for task in (watching, ticking):
        task.cancel()
    await fleet.drain(0.0)
    if ends.good != len(plan.rows):
        raise SystemExit(f"{ends.good} of {len(plan.rows)} rows answered, {ends.bad} failed")
    return seconds, backend.requests


def bagent(plan: Plan) -> tuple[float, int]:
    """Seconds to the last answer, and requests sent."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(_bagent(plan))


async def _modulo(plan: Plan) -> tuple[float, int]:
    loop = asyncio.get_running_loop()
    nodes = [Node(config) for config in plan.nodes]
    for node in nodes:
        node.start()
    play(plan.events, nodes)
    count, requests = len(nodes), 0
    todo = {i: plan.rows[i::count] for i in range(count)}
    while todo:
        requests += len(todo)
        places = list(todo)
        done = await asyncio.gather(*(nodes[i].generate(todo[i]) for i in places))
        lost = [row for i, good in zip(places, done, strict=True) if not good for row in todo[i]]
        alive = [i for i, good in zip(places, done, strict=True) if good]
        alive = alive or [i for i, node in enumerate(nodes) if node.up]
        todo = {i: lost[k :: len(alive)] for k, i in enumerate(alive)}
        todo = {i: rows for i, rows in todo.items() if rows}
    return loop.time(), requests


def modulo(plan: Plan) -> tuple[float, int]:
    """Row i to endpoint i % n, one list each; what died with an endpoint goes to the others once
    all have ended."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(_modulo(plan))


def rows_of(count: int, seed: int) -> list[Row]:
    """Prompts of 50 to 2,000 tokens, answers of 50 on average (geometric, 400 at most)."""
    random = Random(seed)
    rows = []
    for _ in range(count):
        answer = min(400, 1 + int(random.expovariate(1 / 50)))
        rows.append(Row(int(50 * 40 ** random.random()), answer))
    return rows
