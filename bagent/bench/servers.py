"""Reads the endpoints' own counters while a load goes on: they say why one is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bagent.backends.engine_metrics import EngineLoad, LoadReader
from bagent.backends.transport import Transport
from bagent.bench.config import Target
from bagent.bench.records import RowFile, ServerRow

READS_A_SECOND = 50.0
"""Over all endpoints: expositions are large, and reading them costs the client its own time."""

SHORTEST_SECONDS = 1.0
_PATIENCE = 2.0


class ServerWatch:
    """Reads the counters of ``targets`` into a file: at both ends of a stage and in between.

    Args:
        clock: seconds since the test's start.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        transport: Transport,
        file: RowFile,
        clock: Callable[[], float],
    ) -> None:
        self._targets = targets
        self._reader = LoadReader(transport)
        self._file = file
        self._clock = clock
        self._interval = max(SHORTEST_SECONDS, len(targets) / READS_A_SECOND)

    async def read_all(self, stage: int) -> None:
        """One reading of every endpoint that has counters."""
        await asyncio.gather(*(self._read(stage, target) for target in self._targets))
        self._file.flush()

    async def watch(self, stage: int) -> None:
        """Read on and on until cancelled, one endpoint after the other: all at once would hold
        up the very requests that are timed."""
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

    async def _read(self, stage: int, target: Target) -> None:
        load = await self._reader.read(target.endpoint, _PATIENCE, target.model)
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
