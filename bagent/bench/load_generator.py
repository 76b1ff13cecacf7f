"""One worker of a load test: sends its share of each stage and writes a row per request."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.http.client import Transport
from bagent.bench.client import send_request
from bagent.bench.monitors import ClientWatch
from bagent.bench.plan import LoadConfig
from bagent.bench.records import ClientRow, RequestRow, RowFile
from bagent.bench.routing import EndpointPicker
from bagent.bench.schedule import LoadStage, arrival_times, replay_times, worker_share
from bagent.bench.workload import PromptGroups, RequestFactory, ScheduleSlot
from bagent.types import Reply

if TYPE_CHECKING:
    from bagent.bench.routing import RunRouter

FAILURE_PAUSE_SECONDS = 0.25
"""Pause of a closed loop after a failure, so that a broken endpoint is not flooded."""

CANCEL_SECONDS = 5.0
LONGEST_SECONDS = 7 * 86400.0
LATE_BURST = 32
"""Late requests that are sent before the event loop reads answers again."""

LATEST_SECONDS = 1.0
"""How long after the end of its stage a request may still be sent."""

_NEVER = 1e9
_NOW = -1.0


class WorkerShare(msgspec.Struct):
    """One worker's share of a stage; times in seconds since the test's start."""

    began: float
    feeding_ended: float
    ended: float
    sent: int = 0
    done: int = 0
    failed: int = 0


class LoadGenerator:
    """Sends the stages of a load test, one after the other, over one connection pool.

    Args:
        config: the test; ``worker`` of ``workers`` is the share of this one.
        transport: how endpoints are reached; it stays open.
    """

    def __init__(self, config: LoadConfig, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._maker = RequestFactory(config)
        folder = Path(config.folder)
        self._rows = RowFile(folder / f"requests-{config.worker}.jsonl")
        self._client = RowFile(folder / f"client-{config.worker}.jsonl")
        self.stopping = asyncio.Event()
        self.share = WorkerShare(0, 0, 0)

    def close(self) -> None:
        """Write all rows."""
        self._rows.close()
        self._client.close()

    def now(self) -> float:
        """Return the seconds since the start of the test."""
        return time.monotonic() - self._config.origin

    async def run(self, stage: LoadStage, start_at: float) -> WorkerShare:
        """Send this worker's share of ``stage`` from ``start_at`` on."""
        gc.collect()  # so that it does not run while requests are timed
        await asyncio.sleep(max(0.0, start_at - self.now()))
        watch = ClientWatch()
        run = _StageRun(self, self._config, stage, start_at)
        self.share = run.share
        try:
            await run.feed()
            if self.now() >= run.end:
                run.share.feeding_ended = run.end
            await run.drain()
        finally:
            seconds, cpu = watch.stop()
            run.share.ended = self.now()
            row = ClientRow(stage.number, self._config.worker, seconds, cpu, watch.lags_us)
            self._client.write(row)
            self._rows.flush()
            self._client.flush()
        return run.share

    def write_row(self, row: RequestRow) -> None:
        """Write the row of a request that was never sent."""
        self._rows.write(row)

    async def send(
        self, row: RequestRow, stage: LoadStage, slot: ScheduleSlot, target: int
    ) -> Reply | None:
        """Send the request for ``slot`` and write its ``row``; return a good answer, or None."""
        request = self._maker.make(stage, slot, target)
        endpoint = self._config.targets[target].endpoint
        timeouts = self._config.timeouts
        try:
            reply = await send_request(self._transport, endpoint, request, row, timeouts, self.now)
        finally:
            self._rows.write(row)
        if reply is not None and slot.turn < stage.turns:
            slot.history.append((self._maker.user_text(stage, slot, target), reply.text or ""))
        return reply


class _StageRun:
    """One stage in one worker; endpoints are indexes into the config's targets."""

    def __init__(
        self, generator: LoadGenerator, config: LoadConfig, stage: LoadStage, start: float
    ) -> None:
        self._generator = generator
        self._config = config
        self._stage = stage
        self._start = start
        self._now: Callable[[], float] = generator.now
        names = [target.endpoint.name for target in config.targets]
        active = [i for i, name in enumerate(names) if stage.only in (None, name)]
        self._picker = EndpointPicker(stage.routing, active, config.worker, self._router(active))
        self._queue: deque[asyncio.Future[None]] = deque()
        seed = f"{stage.seed}/{stage.load}/{stage.repeat}/{config.worker}"
        self._groups = PromptGroups(config.groups, config.skew, seed) if config.groups else None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._error: BaseException | None = None
        self._next = config.worker
        self._remaining = (
            worker_share(stage.requests, config.worker, config.workers)
            if stage.requests is not None
            else None
        )
        self.end = start + stage.seconds if stage.seconds is not None else _NEVER
        self.share = WorkerShare(start, start, start)

    def _router(self, active: Sequence[int]) -> RunRouter | None:
        """Return what chooses endpoints as a run does, for the routing ``as-run``."""
        if self._stage.routing != "as-run":
            return None
        from bagent.bench.routing import RunRouter

        targets, workers = self._config.targets, self._config.workers
        endpoints = {index: targets[index].endpoint for index in active}
        return RunRouter(
            endpoints, self._concurrency() if self._stage.rate is None else None, workers
        )

    def _concurrency(self) -> int:
        """Return how many requests of a closed loop this worker has in flight at each endpoint."""
        stage, config = self._stage, self._config
        size = config.list_size if stage.way in ("list", "chat-batch") else 1
        return worker_share(max(1, (stage.concurrency or 1) // size), config.worker, config.workers)

    async def feed(self) -> None:
        """Send until the stage's time or requests are over, or the test is stopped."""
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
        if self._error is not None:
            raise self._error

    async def _warm_up(self) -> None:
        count = self._stage.requests or 1
        for index in list(self._picker.active):
            for _ in range(count):  # together: a slow endpoint takes its time only once
                self._begin(self._send(index, ScheduleSlot(self._number())))

    async def _closed_loop(self) -> None:
        for _ in range(self._concurrency()):
            for index in list(self._picker.active):
                self._begin(self._send_in_turn(index))
        await self._until_idle(self.end)

    async def _send_in_turn(self, index: int) -> None:
        """Send one request after the other while the stage lasts."""
        while self._now() < self.end and not self._generator.stopping.is_set():
            if self._remaining is not None:
                if self._remaining <= 0:
                    return
                self._remaining -= 1
            target: int | None = index
            slot = ScheduleSlot(self._number())
            if self._groups is not None:
                single_turn = self._stage.turns == 1  # conversations keep their endpoint
                groups = self._picker.groups_of(index, self._groups.count) if single_turn else None
                if groups is not None and not groups:
                    return  # no group belongs to this endpoint
                slot.group = self._groups.next(groups)
            if self._picker.chooses:
                target = await self._wait_for_endpoint(slot)
                if self._now() >= self.end:
                    return
            if target is None or self._picker.is_removed(target):
                return
            if not await self._converse(target, slot):
                await asyncio.sleep(FAILURE_PAUSE_SECONDS)

    async def _open_loop(self) -> None:
        config, stage = self._config, self._stage
        worker, workers = config.worker, config.workers
        times = (
            arrival_times(stage, worker, workers)
            if stage.speed is None
            else replay_times(stage, config.trace, worker, workers)
        )
        late = 0
        for number, at in times:
            due = self._start + at
            wait = due - self._now()
            late = late + 1 if wait <= 0 else 0
            if wait > 0 or late % LATE_BURST == 0:
                if await self._stopped_within(max(0.0, wait)):
                    return
                if self._now() > self.end + LATEST_SECONDS:
                    return
            group = self._groups.next() if self._groups is not None else None
            slot = ScheduleSlot(number, group, due)
            index = None if self._queue else self._pick(slot)
            if index is not None:
                self._begin(self._converse(index, slot))
            elif self._picker.full:
                self._begin(self._send_later(slot))
            else:
                return

    def _pick(self, slot: ScheduleSlot, previous: int | None = None) -> int | None:
        single_turn = self._stage.turns == 1
        return self._picker.pick(slot.number, slot.group if single_turn else None, previous)

    async def _wait_for_endpoint(
        self, slot: ScheduleSlot, previous: int | None = None
    ) -> int | None:
        """Return the endpoint for ``slot`` once there is room; None where none is left."""
        index = None if self._queue else self._pick(slot, previous)
        enqueue = self._queue.append
        while index is None and self._picker.full:
            waiter = asyncio.get_running_loop().create_future()
            enqueue(waiter)
            try:
                await waiter
            finally:
                if waiter in self._queue:
                    self._queue.remove(waiter)
            index = self._pick(slot, previous)
            enqueue = self._queue.appendleft
        self._wake()  # there may be room for more than one
        return index

    def _wake(self) -> None:
        """Let the request that waits longest look for room."""
        if self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def _send_later(self, slot: ScheduleSlot) -> None:
        """Send ``slot`` once an endpoint has room; its delay counts."""
        try:
            index = await self._wait_for_endpoint(slot)
        except asyncio.CancelledError:
            row = self._row("", slot)
            row.sent = row.done = self._now()
            row.error = "no endpoint had room before the load ended"
            self._generator.write_row(row)
            raise
        if index is not None:
            await self._converse(index, slot)

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait; return whether the test was stopped meanwhile."""
        if self._generator.stopping.is_set():
            return True
        if seconds < 0.05:  # a timer alone is exact and cheap
            await asyncio.sleep(seconds)
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._generator.stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _converse(self, index: int, slot: ScheduleSlot) -> bool:
        """Send one request, or the turns of a conversation; return whether the last one ended well.

        A turn that is due after the stage's time is not sent.
        """
        think = self._stage.think
        while await self._send(index, slot):
            if slot.turn >= self._stage.turns:
                return True
            slot.turn += 1
            slot.due = self._now() + think
            if slot.due >= self.end or await self._stopped_within(think):
                return True
            target = await self._wait_for_endpoint(slot, index)
            if target is None:
                return False
            index = target
        return False

    async def _send(self, index: int, slot: ScheduleSlot) -> bool:
        """Send one request; return whether it ended well."""
        stage, share = self._stage, self.share
        row = self._row(self._config.targets[index].endpoint.name, slot)
        row.in_flight = self._picker.started(index)
        share.sent += 1
        self._extend_feeding(self._now())
        try:
            await self._generator.send(row, stage, slot, index)
        finally:
            self._extend_feeding(math.nextafter(row.sent, math.inf))  # includes the last request
            self._picker.ended(index, row.error_kind)
            self._wake()
            share.done += row.status == "ok"
            share.failed += row.status == "failed"
        return row.status == "ok"

    def _extend_feeding(self, at: float) -> None:
        self.share.feeding_ended = max(self.share.feeding_ended, min(at, self.end))

    def _row(self, endpoint: str, slot: ScheduleSlot) -> RequestRow:
        return RequestRow(
            self._stage.number,
            self._config.worker,
            slot.number,
            endpoint,
            self._stage.way,
            _NOW if slot.due is None else slot.due,
            warmup=self._stage.warmup,
            turn=slot.turn,
            group=slot.group,
        )

    def _number(self) -> int:
        number = self._next
        self._next += self._config.workers
        return number

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = (
            None if task.cancelled() else task.exception()
        )  # retrieved, otherwise asyncio logs it
        self._error = self._error or error
        if not self._tasks or self._error is not None:
            self._idle.set()

    async def _until_idle(self, end: float = _NEVER) -> None:
        """Wait until no request is in flight, the time is over or the test is stopped."""
        events = [asyncio.ensure_future(self._idle.wait())] if self._tasks else []
        events += [asyncio.ensure_future(self._generator.stopping.wait())] if events else []
        if events:
            timeout = max(0.0, min(end - self._now(), LONGEST_SECONDS))
            await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
