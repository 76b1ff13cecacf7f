"""One worker: sends its part of each stage and writes a row for every request."""

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
from bagent.bench.prompts import PromptGroups
from bagent.bench.records import ClientRow, RequestRow, RowFile
from bagent.bench.routing import EndpointPicker
from bagent.bench.schedule import LoadStage, arrivals, replayed, share
from bagent.bench.workload import RequestFactory, ScheduleSlot
from bagent.types import Reply

if TYPE_CHECKING:
    from bagent.bench.routing import RunRouter

REST_SECONDS = 0.25
"""A loop that failed waits so long: else a broken endpoint would be asked thousands of times."""

CANCEL_SECONDS = 5.0
LONGEST_SECONDS = 7 * 86400.0
IN_A_ROW = 32
"""Requests that are late are sent so many at a time: what has come is read in between."""

LATEST_SECONDS = 1.0
"""What a client could not send so long after the end of its stage is not sent any more."""

_FAR = 1e9
_NOW = -1.0


class WorkerShare(msgspec.Struct):
    """How one worker's part of a stage went; times in seconds since the test's start."""

    began: float
    feeding_ended: float
    ended: float
    sent: int = 0
    done: int = 0
    failed: int = 0


class LoadGenerator:
    """Sends the stages of a load test, one after the other, over one pool of connections.

    Args:
        config: the test; ``worker`` of ``workers`` says which part is this one's.
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
        self.part = WorkerShare(0, 0, 0)

    def close(self) -> None:
        """Write all rows out."""
        self._rows.close()
        self._client.close()

    def now(self) -> float:
        """Seconds since the start of the test."""
        return time.monotonic() - self._config.origin

    async def run(self, stage: LoadStage, start_at: float) -> WorkerShare:
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

    def note(self, row: RequestRow) -> None:
        """Write the row of a request that was never sent."""
        self._rows.write(row)

    async def send(
        self, row: RequestRow, stage: LoadStage, spot: ScheduleSlot, place: int
    ) -> Reply | None:
        """Make the request for ``spot``, send it, and write its ``row``; a good answer, or None."""
        shot = self._maker.make(stage, spot, place)
        endpoint = self._config.targets[place].endpoint
        limits = self._config.timeouts, self.now
        try:
            reply = await send_request(self._transport, endpoint, shot, row, limits)
        finally:
            self._rows.write(row)
        if reply is not None and spot.turn < stage.turns:
            spot.said.append((self._maker.asked(stage, spot, place), reply.text or ""))
        return reply


class _StageRun:
    """One stage in one worker."""

    def __init__(
        self, load: LoadGenerator, config: LoadConfig, stage: LoadStage, start: float
    ) -> None:
        self._load = load
        self._config = config
        self._stage = stage
        self._start = start
        self._now: Callable[[], float] = load.now
        names = [target.endpoint.name for target in config.targets]
        among = [i for i, name in enumerate(names) if stage.only in (None, name)]
        self._placer = EndpointPicker(stage.routing, among, config.worker, self._router(among))
        self._queue: deque[asyncio.Future[None]] = deque()
        seed = f"{stage.seed}/{stage.load}/{stage.repeat}/{config.worker}"
        self._groups = PromptGroups(config.groups, config.skew, seed) if config.groups else None
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
        self.part = WorkerShare(start, start, start)

    def _router(self, among: Sequence[int]) -> RunRouter | None:
        """What chooses endpoints as a run does, where that is asked for."""
        if self._stage.routing != "as-run":
            return None
        from bagent.bench.routing import RunRouter

        targets, workers = self._config.targets, self._config.workers
        endpoints = {place: targets[place].endpoint for place in among}
        return RunRouter(endpoints, self._slots() if self._stage.rate is None else None, workers)

    def _slots(self) -> int:
        """Requests that a closed loop of this worker has in flight at each endpoint."""
        stage, config = self._stage, self._config
        size = config.list_size if stage.way in ("list", "chat-batch") else 1
        return share(max(1, (stage.concurrency or 1) // size), config.worker, config.workers)

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
                self._begin(self._one(place, ScheduleSlot(self._number())))

    async def _closed_loop(self) -> None:
        for _ in range(self._slots()):
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
            to: int | None = place
            spot = ScheduleSlot(self._number())
            if self._groups is not None:
                alone = self._stage.turns == 1  # else an endpoint gets conversations, not groups
                own = self._placer.groups_of(place, self._groups.count) if alone else None
                if own is not None and not own:
                    return  # no group belongs to this endpoint
                spot.group = self._groups.next(own)
            if self._placer.chooses:
                to = await self._place(spot)
                if self._now() >= self.end:
                    return
            if to is None or self._placer.out(to):
                return
            if not await self._talk(to, spot):
                await asyncio.sleep(REST_SECONDS)

    async def _open_loop(self) -> None:
        parts, stage = (self._config.worker, self._config.workers), self._stage
        trace = self._config.trace if stage.speed is not None else None
        times = arrivals(stage, *parts) if trace is None else replayed(stage, trace, *parts)
        late = 0
        for number, at in times:
            due = self._start + at
            wait = due - self._now()
            late = late + 1 if wait <= 0 else 0
            if wait > 0 or late % IN_A_ROW == 0:
                if await self._stopped_within(max(0.0, wait)):
                    return
                if self._now() > self.end + LATEST_SECONDS:
                    return
            group = self._groups.next() if self._groups is not None else None
            spot = ScheduleSlot(number, group, due)
            place = None if self._queue else self._pick(spot)
            if place is not None:
                self._begin(self._talk(place, spot))
            elif self._placer.full:
                self._begin(self._later(spot))
            else:
                return

    def _pick(self, spot: ScheduleSlot, home: int | None = None) -> int | None:
        alone = self._stage.turns == 1
        return self._placer.pick(spot.number, spot.group if alone else None, home)

    async def _place(self, spot: ScheduleSlot, home: int | None = None) -> int | None:
        """Where ``spot`` goes, once there is room; None where all endpoints are out."""
        place = None if self._queue else self._pick(spot, home)
        take_place = self._queue.append
        while place is None and self._placer.full:
            turn = asyncio.get_running_loop().create_future()
            take_place(turn)
            try:
                await turn
            finally:
                if turn in self._queue:
                    self._queue.remove(turn)
            place = self._pick(spot, home)
            take_place = self._queue.appendleft
        self._wake()  # there may be room for more than one
        return place

    def _wake(self) -> None:
        """Let the request that waits longest look for room."""
        if self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)

    async def _later(self, spot: ScheduleSlot) -> None:
        """Send ``spot`` once an endpoint has room: late, and its lateness counts."""
        try:
            place = await self._place(spot)
        except asyncio.CancelledError:
            row = self._row("", spot)
            row.sent = row.done = self._now()
            row.error = "no endpoint had room before the load ended"
            self._load.note(row)
            raise
        if place is not None:
            await self._talk(place, spot)

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

    async def _talk(self, place: int, spot: ScheduleSlot) -> bool:
        """Send one request, or the turns of a conversation; whether the last ended well.

        A turn that is due after the stage's time is not sent.
        """
        think = self._stage.think
        while await self._one(place, spot):
            if spot.turn >= self._stage.turns:
                return True
            spot.turn += 1
            spot.due = self._now() + think
            if spot.due >= self.end or await self._stopped_within(think):
                return True
            to = await self._place(spot, place)
            if to is None:
                return False
            place = to
        return False

    async def _one(self, place: int, spot: ScheduleSlot) -> bool:
        """Send one request; whether it ended well."""
        stage, part = self._stage, self.part
        row = self._row(self._config.targets[place].endpoint.name, spot)
        row.in_flight = self._placer.begun(place)
        part.sent += 1
        self._fed_until(self._now())
        try:
            await self._load.send(row, stage, spot, place)
        finally:
            self._fed_until(math.nextafter(row.sent, math.inf))  # so that the last one counts
            self._placer.ended(place, row.error_kind)
            self._wake()
            part.done += row.status == "ok"
            part.failed += row.status == "failed"
        return row.status == "ok"

    def _fed_until(self, at: float) -> None:
        self.part.feeding_ended = max(self.part.feeding_ended, min(at, self.end))

    def _row(self, endpoint: str, spot: ScheduleSlot) -> RequestRow:
        return RequestRow(
            self._stage.number,
            self._config.worker,
            spot.number,
            endpoint,
            self._stage.way,
            _NOW if spot.due is None else spot.due,
            warmup=self._stage.warmup,
            turn=spot.turn,
            group=spot.group,
        )

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
        fault = None if task.cancelled() else task.exception()  # each is asked, else it is printed
        self._fault = self._fault or fault
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
