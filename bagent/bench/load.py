"""One worker: sends its part of each stage and writes a row for every request."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from bagent.backends.transport import Transport
from bagent.bench.config import LoadConfig
from bagent.bench.placing import Placer
from bagent.bench.prompts import Groups
from bagent.bench.records import ClientRow, RequestRow, RowFile
from bagent.bench.sender import fire
from bagent.bench.shape import StageSpec, arrivals, share
from bagent.bench.shots import ShotMaker
from bagent.bench.watch import ClientWatch

REST_SECONDS = 0.25
"""A loop that failed waits so long: else a broken endpoint would be asked thousands of times."""

CANCEL_SECONDS = 5.0
LONGEST_SECONDS = 7 * 86400.0
_FAR = 1e9
_NOW = -1.0


class Part(msgspec.Struct):
    """How one worker's part of a stage went; times in seconds since the test's start."""

    began: float
    feeding_ended: float
    ended: float
    sent: int = 0
    done: int = 0
    failed: int = 0


class Load:
    """Sends the stages of a load test, one after the other, over one pool of connections.

    Args:
        config: the test; ``worker`` of ``workers`` says which part is this one's.
        transport: how endpoints are reached; it stays open.
    """

    def __init__(self, config: LoadConfig, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._maker = ShotMaker(config)
        folder = Path(config.folder)
        self._rows = RowFile(folder / f"requests-{config.worker}.jsonl")
        self._client = RowFile(folder / f"client-{config.worker}.jsonl")
        self.stopping = asyncio.Event()
        self.part = Part(0, 0, 0)

    def close(self) -> None:
        """Write all rows out."""
        self._rows.close()
        self._client.close()

    def now(self) -> float:
        """Seconds since the start of the test."""
        return time.monotonic() - self._config.origin

    async def run(self, stage: StageSpec, start_at: float) -> Part:
        """Send this worker's part of ``stage`` from ``start_at`` on; returns how it went."""
        gc.collect()  # not while requests are timed
        await asyncio.sleep(max(0.0, start_at - self.now()))
        watch = ClientWatch()
        run = _StageRun(self, self._config, stage, start_at)
        self.part = run.part
        try:
            await run.feed()
            if self.now() >= run.end:
                run.part.feeding_ended = run.end
            await run.drain()
        finally:
            seconds, cpu = watch.stop()
            run.part.ended = self.now()
            row = ClientRow(stage.number, self._config.worker, seconds, cpu, watch.lags_us)
            self._client.write(row)
            self._rows.flush()
            self._client.flush()
        return run.part

    async def send(self, row: RequestRow, stage: StageSpec, place: int) -> None:
        """Make the request that ``row`` stands for, send it, and write the row."""
        shot = self._maker.make(stage, row.number, place, row.group)
        endpoint = self._config.targets[place].endpoint
        try:
            await fire(self._transport, endpoint, shot, row, (self._config.timeouts, self.now))
        finally:
            self._rows.write(row)


class _StageRun:
    """One stage in one worker."""

    def __init__(self, load: Load, config: LoadConfig, stage: StageSpec, start: float) -> None:
        self._load = load
        self._config = config
        self._stage = stage
        self._start = start
        self._now: Callable[[], float] = load.now
        names = [target.endpoint.name for target in config.targets]
        among = [i for i, name in enumerate(names) if stage.only in (None, name)]
        self._placer = Placer(stage.routing, among, start=config.worker)
        seed = f"{stage.seed}/{stage.load}/{stage.repeat}/{config.worker}"
        self._groups = Groups(config.groups, config.skew, seed) if config.groups else None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._fault: BaseException | None = None
        self._next = config.worker
        self._left = (
            share(stage.requests, config.worker, config.workers)
            if stage.requests is not None
            else None
        )
        self.end = start + stage.seconds if stage.seconds is not None else _FAR
        self.part = Part(start, start, start)

    async def feed(self) -> None:
        """Send until the stage's time, or its requests, are over, or the test is stopped."""
        if self._stage.warmup:
            await self._warm_up()
        elif self._stage.rate is not None:
            await self._open_loop()
        else:
            await self._closed_loop()

    async def drain(self) -> None:
        """Wait for what is in flight; what takes too long is given up as unfinished."""
        await self._until_idle(self._now() + self._stage.drain)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        if self._fault is not None:
            raise self._fault

    async def _warm_up(self) -> None:
        count = self._stage.requests or 1
        for place in list(self._placer.among):
            for _ in range(count):  # at once: a slow endpoint is not to take the time of each
                self._begin(self._one(place, self._number(), None))

    async def _closed_loop(self) -> None:
        stage, config = self._stage, self._config
        calls = stage.concurrency or 1
        size = config.list_size if stage.way in ("list", "chat-batch") else 1
        slots = share(max(1, calls // size), config.worker, config.workers)
        for _ in range(slots):
            for place in list(self._placer.among):
                self._begin(self._slot(place))
        await self._until_idle(self.end)

    async def _slot(self, place: int) -> None:
        """One request after the other, as long as the stage feeds."""
        while self._now() < self.end and not self._load.stopping.is_set():
            if self._left is not None:
                if self._left <= 0:
                    return
                self._left -= 1
            to, number = place, self._number()
            group = None
            if self._groups is not None:
                own = self._placer.groups_of(place, self._groups.count)
                if own is not None and not own:
                    return  # no group belongs to this endpoint
                group = self._groups.next(own)
            if self._stage.routing == "least-inflight":
                picked = self._placer.pick(number, group)
                to = place if picked is None else picked
            if self._placer.out(to):
                return
            if not await self._one(to, number, group):
                await asyncio.sleep(REST_SECONDS)

    async def _open_loop(self) -> None:
        parts = self._config.worker, self._config.workers
        for number, at in arrivals(self._stage, *parts):
            due = self._start + at
            wait = due - self._now()
            if wait > 0 and await self._stopped_within(wait):
                return
            group = self._groups.next() if self._groups is not None else None
            place = self._placer.pick(number, group)
            if place is None:
                return
            self._begin(self._one(place, number, group, due))

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait; whether the test was stopped meanwhile."""
        if self._load.stopping.is_set():
            return True
        if seconds < 0.05:  # a timer alone is exact and cheap
            await asyncio.sleep(seconds)
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._load.stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _one(
        self, place: int, number: int, group: int | None, due: float | None = None
    ) -> bool:
        """Send one request; whether it ended well."""
        stage, part = self._stage, self.part
        row = RequestRow(
            stage.number,
            self._config.worker,
            number,
            self._config.targets[place].endpoint.name,
            stage.way,
            _NOW if due is None else due,
            warmup=stage.warmup,
            group=group,
            in_flight=self._placer.begun(place),
        )
        part.sent += 1
        part.feeding_ended = self._now()
        try:
            await self._load.send(row, stage, place)
        finally:
            self._placer.ended(place, row.error_kind)
            part.done += row.status == "ok"
            part.failed += row.status == "failed"
        return row.status == "ok"

    def _number(self) -> int:
        number = self._next
        self._next += self._config.workers
        return number

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self._fault is None:
            self._fault = task.exception()
        if not self._tasks or self._fault is not None:
            self._idle.set()

    async def _until_idle(self, end: float = _FAR) -> None:
        """Until no request is in flight, the time is over or the test is stopped."""
        ways = [asyncio.ensure_future(self._idle.wait())] if self._tasks else []
        ways += [asyncio.ensure_future(self._load.stopping.wait())] if ways else []
        if ways:
            left = max(0.0, min(end - self._now(), LONGEST_SECONDS))
            await asyncio.wait(ways, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
