"""Lag and CPU of the client, and the counters of the servers, during a load test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from bagent.backends.engines.metrics import EngineLoad, LoadReader
from bagent.backends.http.client import Transport
from bagent.bench.plan import BenchTarget
from bagent.bench.records import RowFile, ServerRow

SAMPLE_SECONDS = 0.02
"""Time between two samples of the event loop's lag."""

MAX_LAG_MS = 10.0
"""Limit of the p99 lag of event loop or schedule; beyond it times are wrong."""

MAX_CPU = 0.8
"""Limit of a worker's share of one core; beyond it the event loop is the queue."""


class ClientWatch:
    """Samples the lag of the running event loop and the CPU time of this process.

    Args:
        cpu: returns the CPU seconds of this process so far.
    """

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self._cpu = cpu
        self._loop = asyncio.get_running_loop()
        self.lags_us: list[int] = []
        self._began = self._loop.time()
        self._cpu_began = cpu()
        self._due = self._began
        self._timer: asyncio.TimerHandle | None = None
        self._plan()

    def _plan(self) -> None:
        self._due = self._loop.time() + SAMPLE_SECONDS
        self._timer = self._loop.call_at(self._due, self._sample)

    def _sample(self) -> None:
        self.lags_us.append(max(0, int(1e6 * (self._loop.time() - self._due))))
        self._plan()

    def stop(self) -> tuple[float, float]:
        """Stop; return wall seconds and CPU seconds since the beginning."""
        if self._timer is not None:
            self._timer.cancel()
        return self._loop.time() - self._began, self._cpu() - self._cpu_began


class ClientState(msgspec.Struct, frozen=True):
    """The client in one stage, over all workers."""

    load: str
    loop_lag_p99_ms: float | None
    cpu: float
    """Share of a core that the busiest worker used."""
    lag_p99_ms: float | None = None
    """Lag of the schedule; None in a closed loop."""


def client_limits(state: ClientState) -> list[str]:
    """Return why the client was the limit; empty where it was not."""
    reasons = []
    if state.loop_lag_p99_ms is not None and state.loop_lag_p99_ms > MAX_LAG_MS:
        reasons.append(f"event loop {state.loop_lag_p99_ms:.0f} ms late")
    if state.lag_p99_ms is not None and state.lag_p99_ms > MAX_LAG_MS:
        reasons.append(f"requests sent {state.lag_p99_ms:.0f} ms late")
    if state.cpu > MAX_CPU:
        reasons.append(f"{100 * state.cpu:.0f} % of a core in use")
    return reasons


READS_PER_SECOND = 50.0
"""Limit over all endpoints: reading large expositions costs the client its own time."""

MIN_INTERVAL_SECONDS = 1.0
_READ_TIMEOUT = 2.0


class ServerWatch:
    """Reads the counters of ``targets`` into a file: at both ends of a stage and in between.

    Args:
        clock: seconds since the test's start.
    """

    def __init__(
        self,
        targets: Sequence[BenchTarget],
        transport: Transport,
        file: RowFile,
        clock: Callable[[], float],
    ) -> None:
        self._targets = targets
        self._reader = LoadReader(transport)
        self._file = file
        self._clock = clock
        self._interval = max(MIN_INTERVAL_SECONDS, len(targets) / READS_PER_SECOND)

    async def read_all(self, stage: int) -> None:
        """Read every endpoint that has counters once."""
        await asyncio.gather(*(self._read(stage, target) for target in self._targets))
        self._file.flush()

    async def watch(self, stage: int) -> None:
        """Read one endpoint after the other until cancelled.

        Reading all at once would delay the requests that are timed.
        """
        reads: set[asyncio.Task[None]] = set()
        gap = self._interval / max(1, len(self._targets))
        try:
            while self._targets:
                for target in self._targets:
                    await asyncio.sleep(gap)
                    task = asyncio.ensure_future(self._read(stage, target))
                    reads.add(task)
                    task.add_done_callback(reads.discard)
                self._file.flush()
        finally:
            for task in list(reads):
                task.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, stage: int, target: BenchTarget) -> None:
        load = await self._reader.read(target.endpoint, _READ_TIMEOUT, target.model)
        if load is not None:
            self._file.write(_row(stage, target.endpoint.name, self._clock(), load))


def _row(stage: int, endpoint: str, at: float, load: EngineLoad) -> ServerRow:
    return ServerRow(
        stage,
        endpoint,
        at,
        load.running,
        load.waiting,
        load.kv_usage,
        load.preemptions,
        load.cache_hits,
        load.cache_queries,
        load.prompt_tokens,
        load.generation_tokens,
    )
