"""Calling many endpoints in bounded time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.fleet import health_check
from bagent.fleet.health_check import FleetHealthCheck, HealthCheckPlan, HealthResult
from support.fake_server import FakeServer
from support.http_servers import refusing_port
from support.jumping_loop import run_shifted, skip, stop_clock
from support.replies import hang, ok, status


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(health_check, "GRACE_SECONDS", 0.5)


def to(*addresses: str) -> list[Endpoint]:
    return [Endpoint(address, f"http://{address}/v1", account=address) for address in addresses]


def call(
    endpoints: Sequence[Endpoint],
    plan: HealthCheckPlan,
    watch: Callable[[FleetHealthCheck], Awaitable[None]] | None = None,
) -> list[HealthResult]:
    """Check the endpoints; with ``watch``, time passes only where it skips some."""

    async def run() -> list[HealthResult]:
        transport = Transport()
        check = FleetHealthCheck(endpoints, plan, transport)
        if watch is not None:
            stop_clock()
            watching = asyncio.ensure_future(watch(check))
        try:
            found = await check.run()
            if watch is not None:
                await watching
            assert check.ready == sum(one.ready for one in found)
            return found
        finally:
            await transport.close()

    return run_shifted(run())


async def until(done: Callable[[], bool]) -> None:
    """Wait in real time."""
    while not done():
        await asyncio.to_thread(time.sleep, 0.005)


def plan(seconds: float, wanted: int = 1, width: int = 64, **more: object) -> HealthCheckPlan:
    return HealthCheckPlan(seconds, width, wanted, **more)  # type: ignore[arg-type]


def states(called: Sequence[HealthResult]) -> list[str]:
    return [one.state for one in called]


@contextmanager
def deaf_port() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen(1024)
        yield f"127.0.0.1:{found.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that does not answer the wish for a connection: its queue of them is full."""
    with ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        yield f"127.0.0.1:{hole.getsockname()[1]}"


@contextmanager
def dead_port() -> Iterator[str]:
    """An address that refuses connections."""
    with refusing_port() as port:
        yield f"127.0.0.1:{port}"


def test_each_state_is_told_apart() -> None:
    async def others_first(check: FleetHealthCheck) -> None:
        await until(lambda: check.results.count(None) == 3)
        skip(299.8)

    with (
        FakeServer(flavour="vllm") as well,
        FakeServer(models=[]) as empty,
        FakeServer({"*": [status(503, "Loading model")]}) as starting,
        FakeServer({"*": [hang()]}) as hanging,
        FakeServer(api_key="k") as closed,
        FakeServer({"*": [status(500)]}) as ill,
        deaf_port() as deaf,
        black_hole() as hole,
        dead_port() as dead,
    ):
        servers = (well, empty, starting, hanging, closed, ill)
        endpoints = to(*(one.address for one in servers), deaf, hole, dead)
        called = call(endpoints, plan(300.0), others_first)
    assert states(called) == [
        "ready", "loading", "loading", "silent", "refuses", "broken", "silent", "dead", "dead"
    ]  # fmt: skip
    assert all(one.reason for one in called[1:]) and not called[0].reason
    assert "no connection to" in called[7].reason
    assert "Connection refused" in called[8].reason


def test_a_ready_endpoint_is_described() -> None:
    with FakeServer(flavour="vllm", version="0.31.0", max_model_len=4096) as fs:
        (one,) = call(to(fs.address), plan(60.0))
    assert one.capabilities is not None and one.load is not None and one.proof is not None
    assert (one.model, one.capabilities.engine, one.capabilities.version) == (
        "fake-model",
        "vllm",
        "0.31.0",
    )
    assert (one.capabilities.context, one.capabilities.chat_batch, one.load.waiting) == (
        4096,
        True,
        0,
    )


def test_silent_endpoints_leave_time_for_those_behind_them() -> None:
    """Eight silent ones in front, two at once, and the last one answers: all get their share."""

    async def the_silent_first(check: FleetHealthCheck) -> None:
        while None in check.results[:8]:
            skip(1.0)
            await asyncio.sleep(0)

    with deaf_port() as deaf, FakeServer() as fs:
        called = call(to(*[deaf] * 8, fs.address), plan(300.0, width=2), the_silent_first)
    assert states(called) == ["silent"] * 8 + ["ready"]


def test_no_more_are_asked_at_once_than_allowed() -> None:
    with FakeServer({"*": [ok(delay=0.02)]}) as fs:
        called = call(to(*[fs.address] * 12), plan(60.0, width=3))
        assert fs.peak_in_flight <= 3
    assert states(called) == ["ready"] * 12


@pytest.mark.usefixtures("short_pauses")
def test_waiting_asks_again_until_enough_are_ready() -> None:
    with FakeServer({"*": [status(503), status(503), ok()]}) as late, FakeServer() as well:
        called = call(to(late.address, well.address), plan(60.0, 2, repeat=True))
        assert sum(seen.method == "POST" for seen in well.probes) == 1
    assert states(called) == ["ready", "ready"]


def test_waiting_ends_once_enough_are_ready_and_those_just_asked_are_counted() -> None:
    async def no_time_passes(check: FleetHealthCheck) -> None:
        pass

    with ExitStack() as stack:
        well = [stack.enter_context(FakeServer({"*": [ok(delay=0.2)]})) for _ in range(3)]
        quick = stack.enter_context(FakeServer())
        dead = stack.enter_context(dead_port())
        endpoints = to(quick.address, *(one.address for one in well), dead)
        called = call(endpoints, plan(60.0, 1, repeat=True), no_time_passes)
    assert states(called) == ["ready"] * 4 + ["dead"]


@pytest.mark.usefixtures("short_pauses")
def test_who_was_being_asked_when_enough_were_ready_is_not_said_to_be_unasked() -> None:
    with deaf_port() as deaf, FakeServer() as fs:
        called = call(to(deaf, fs.address), plan(60.0, 1, repeat=True))
    assert states(called) == ["silent", "ready"]
    assert called[0].reason == f"no answer from {deaf} before enough others were ready"
