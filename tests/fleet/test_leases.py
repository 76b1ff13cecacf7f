"""Endpoints lent one request at a time: those that hang or die, that join and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import pytest

from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.errors import StoppedEarly
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.leases import Closed, EndpointLease, EndpointLeaser
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.state import FleetConfig, FleetState
from bagent.types import EndpointSample, Failure
from support.jumping_loop import run_jumping
from support.scripted_fleet import REFUSED, ScriptedBackend

SILENT = Failure("timeout", "no whole answer", passing=True)


def state(name: str, limit: int = 8) -> EndpointState:
    return EndpointState(Endpoint(name, f"http://{name}/v1", own=True), InFlightLimit(limit, limit))


class Lent:
    """Endpoints that are lent and do what the test says, and clients that ask them."""

    def __init__(self, names: Iterable[str], limit: int) -> None:
        self.hung: set[str] = set()
        self.dead: set[str] = set()
        self.samples: list[EndpointSample] = []
        self.notices: list[str] = []
        self.asked: list[tuple[str, float]] = []
        self.proofs: list[float] = []
        states = [state(name, limit) for name in names]
        clock = asyncio.get_running_loop().time
        self.core = FleetState(states, FleetConfig(concurrency=1000), clock)
        self.lessor = EndpointLeaser(
            self.core,
            ScriptedBackend({}, {name: partial(self._probe, name) for name in names}),
            self._prove,
            on_sample=self.samples.append,
            notice=self.notices.append,
        )

    def _probe(self, name: str, number: int) -> Capabilities | Failure:
        return SILENT if name in self.dead else Capabilities()

    async def _prove(self, endpoint: Endpoint, request: Request | None) -> Failure | None:
        self.proofs.append(asyncio.get_running_loop().time())
        await asyncio.sleep(30.0 if endpoint.name in self.hung else 0.5)
        return SILENT if endpoint.name in self.hung else None

    async def tick(self) -> None:
        """Look at the endpoints every second."""
        while True:
            await asyncio.sleep(1.0)
            self.lessor.tick()

    def named(self, name: str) -> EndpointState:
        return next(state for state in self.lessor.states if state.name == name)

    async def ask(self, seconds: float = 1.0, begins: float | None = None) -> list[str]:
        """One client: which endpoints had its request; the last one answered, or broke it."""
        had: list[str] = []
        while True:
            lease = await self.lessor.acquire(frozenset(had))
            lease.task = asyncio.current_task()
            lease.uncancellable = bool(had)
            name = lease.state.name
            had.append(name)
            self.asked.append((name, asyncio.get_running_loop().time()))
            try:
                await self._answer(lease, seconds, begins)
            except asyncio.CancelledError:
                if not lease.cancel_reason or lease.task is None or lease.task.uncancel():
                    raise
                self.lessor.on_failure(lease, None)
                if lease.streaming:
                    return [*had, "broken"]
                continue
            self.lessor.on_success(lease)
            return had

    async def _answer(self, lease: EndpointLease, seconds: float, begins: float | None) -> None:
        if begins is not None:
            await asyncio.sleep(begins)
            self.lessor.on_chunk(lease)
        await asyncio.sleep(seconds)
        while lease.state.name in self.hung | self.dead:
            await asyncio.sleep(1.0)

    async def others(self, seconds: float) -> list[list[str]]:
        """Clients that come one after the other for so long."""
        loop = asyncio.get_running_loop()
        end, found = loop.time() + seconds, []
        while loop.time() < end:
            found.append(await self.ask())
        return found


def run(names: Iterable[str], work: Callable[[Lent], Awaitable[None]], limit: int = 8) -> Lent:
    """``work`` with endpoints of these names, ticking."""

    async def main() -> Lent:
        lent = Lent(names, limit)
        ticks = asyncio.create_task(lent.tick())
        await work(lent)
        ticks.cancel()
        lent.lessor.close()
        stopped = lent.lessor.stopped
        assert not stopped.done() or isinstance(stopped.result(), StoppedEarly)
        return lent

    return run_jumping(main())


def test_requests_leave_a_hanging_endpoint_that_returns_after_a_probe_and_one_call():
    async def work(lent: Lent) -> None:
        lent.hung.add("a")
        first = [asyncio.create_task(lent.ask()) for _ in range(2)]
        await asyncio.sleep(2.0)
        assert [name for name, _ in lent.asked] == ["a", "b"]
        began = asyncio.get_running_loop().time()
        found = await lent.others(200.0)
        assert await first[0] == ["a", "b"]
        moved = next(at for name, at in lent.asked[2:] if at > began + 60 and name == "b")
        assert moved <= began + 100
        assert all(had == ["b"] for had in found)
        assert lent.named("a").unresponsive
        lent.hung.clear()
        await asyncio.sleep(70.0)
        assert not lent.named("a").unresponsive
        assert lent.named("a").room == 1  # on trial
        await asyncio.gather(*(lent.ask() for _ in range(4)))
        assert lent.named("a").health == "ok"

    lent = run("ab", work)
    assert sum("a takes requests but has answered none" in line for line in lent.notices) == 1
    assert lent.notices[-1] == "a answers again"
    assert "unresponsive" in [sample.reason for sample in lent.samples if sample.endpoint == "a"]


def test_a_request_that_takes_its_time_stays_where_the_engine_works():
    async def work(lent: Lent) -> None:
        long = asyncio.create_task(lent.ask(400.0))
        await asyncio.sleep(0)
        await lent.others(300.0)
        assert await long == ["a"]

    lent = run("ab", work)
    assert lent.proofs and min(lent.proofs) > 1060.0  # a minute after it began
    assert lent.core.in_flight == 0


def test_streams_stay_with_a_hanging_endpoint_and_end_with_a_dead_one():
    async def work(lent: Lent) -> None:
        lent.hung.add("a")
        stream = asyncio.create_task(lent.ask(1.0, begins=0.5))
        whole = [asyncio.create_task(lent.ask()) for _ in range(2)]
        await asyncio.sleep(2.0)
        await lent.others(200.0)
        assert {tuple(await one) for one in whole} == {("b",), ("a", "b")}
        assert not stream.done()
        lent.dead.add("a")
        assert await stream == ["a", "broken"]

    run("ab", work)


def test_a_client_alone_is_answered_though_its_endpoint_died_without_a_word():
    async def work(lent: Lent) -> None:
        lent.dead.add("a")
        began = asyncio.get_running_loop().time()
        assert await lent.ask() == ["a", "b"]
        assert asyncio.get_running_loop().time() - began < 80
        assert not lent.named("a").up
        lent.dead.clear()
        await asyncio.sleep(60.0)
        assert lent.named("a").up

    lent = run("ab", work)
    assert lent.notices == ["a does not answer: no whole answer", "a answers again"]


def test_who_reads_a_stream_slowly_makes_no_endpoint_look_slow_or_stalled():
    async def work(lent: Lent) -> None:
        reading = asyncio.create_task(lent.ask(500.0, begins=0.1))
        await asyncio.sleep(0)
        await lent.others(300.0)
        assert await reading == ["a"]
        assert max(lent.core.latencies) < 2.0

    lent = run("ab", work)
    assert (lent.notices, lent.proofs) == ([], [])


def test_requests_wait_while_all_endpoints_are_gone_and_go_on_when_one_is_back():
    async def work(lent: Lent) -> None:
        lent.dead |= {"a", "b"}
        lease = await lent.lessor.acquire(frozenset())
        other = await lent.lessor.acquire(frozenset())
        for one in (lease, other):
            lent.lessor.on_failure(one, REFUSED)
        asked = asyncio.create_task(lent.ask())
        await asyncio.sleep(500.0)
        assert not asked.done()
        lent.dead.discard("b")
        assert await asked == ["b"]

    run("ab", work)


def test_who_waits_when_no_more_is_lent_is_told_so():
    async def work(lent: Lent) -> None:
        held = asyncio.create_task(lent.ask())
        waits = asyncio.create_task(lent.ask())
        await asyncio.sleep(0)
        lent.lessor.close()
        with pytest.raises(Closed):
            await waits
        with pytest.raises(Closed):
            await lent.ask()
        assert await held == ["a"]

    run("a", work, limit=1)


def test_who_gives_up_while_it_waits_takes_no_room():
    async def work(lent: Lent) -> None:
        held = asyncio.create_task(lent.ask())
        await asyncio.sleep(0)
        waits = asyncio.create_task(lent.lessor.acquire(frozenset()))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert await held == await lent.ask() == ["a"]

    run("a", work, limit=1)
