"""Drives the rows of a stage through a provider's batches: fills, sends, waits, reads, again.

Every step is noted in the ledger before the next one begins, so that a process that is killed
anywhere goes on with the same batches. What to do next the desk decides; here it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from bagent.batches.desk import Desk, Feed, Step
from bagent.batches.parcel import Item, ParcelReader
from bagent.batches.post import LOOK_HINT, Post, PostTools
from bagent.batches.quota import is_quota
from bagent.batches.reading import Reading, ReadRules
from bagent.batches.record import OUT, BatchRecord
from bagent.batches.rows import BatchRows
from bagent.batches.service import BatchService
from bagent.batches.spool import Spool
from bagent.errors import NeedsPerson
from bagent.stages.feeder import Work
from bagent.store.codec import unit_of
from bagent.types import Attempt, Failure

UNSENT = 2
"""So many batches may be on disk and not sent before no more rows are taken: it bounds the disk."""

DIVIDED = "divided"
"""The word for a batch that was never made: its rows go into others."""


async def pause(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, no longer than ``seconds``."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


@dataclass(frozen=True)
class EngineTools:
    """What the engine needs besides rows and batches; ``pause`` waits by the clock of ``post``."""

    rules: ReadRules
    post: PostTools
    on_attempt: Callable[[Attempt], None]
    gate: Callable[[], Awaitable[None]] | None = None
    budget: float | None = None
    pause: Callable[[asyncio.Event, float | None], Awaitable[None]] = field(default=pause)


class BatchEngine:
    """Runs all rows of a stage through batches; see :class:`bagent.stages.engine.Engine`."""

    def __init__(
        self, service: BatchService, spool: Spool, rows: BatchRows, desk: Desk, tools: EngineTools
    ) -> None:
        self._service = service
        self._spool = spool
        self._rows = rows
        self._desk = desk
        self._tools = tools
        self._settling: list[BatchRecord] = []
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._fed = False
        self._post = Post(service, spool, desk, tools.post)
        self._clock, self._notice = tools.post.clock, tools.post.notice

    async def run(self, source: AsyncIterable[Work]) -> None:
        """Take all rows and return once each has ended; cancel it to leave batches where they are.

        Raises:
            NeedsPerson: the account cannot pay, a key is refused, or a batch is refused as a whole.
            StoppedEarly: the provider does not answer.
            WriteError: the disk refuses.
        """
        feeding = asyncio.create_task(self._feed(source))
        feeding.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                if feeding.done():
                    await feeding
                    self._fed = True
                step = self._next()
                if step.kind == "over":
                    return
                await self._do(step)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            self._spool.drop_open()
            self._tell_left()

    @property
    def out(self) -> tuple[int, int]:
        """Rows that are with the provider, and rows that wait here to be sent."""
        records = self._spool.records
        out = sum(record.rows - record.ended for record in records if record.state in OUT)
        here = sum(record.rows for record in records if record.state == "sealed")
        return out, here + self._spool.open_rows

    def _tell_left(self) -> None:
        left = [record for record in self._spool.records if record.state == "waiting"]
        if left:
            count = f"{len(left)} batches stay" if len(left) > 1 else "1 batch stays"
            rows = sum(record.rows for record in left)
            self._notice(
                f"{count} with the provider ({rows:,} rows); the same command goes on with"
                f" {'them' if len(left) > 1 else 'it'}"
            )

    def _next(self) -> Step:
        settling = {record.label for record in self._settling}
        records = [one for one in self._spool.records if one.label not in settling]
        feed = Feed(self._fed, self._spool.open)
        return self._desk.next(records, feed, self._spool.spent, self._clock())

    # --- rows ---------------------------------------------------------------------------------

    async def _feed(self, source: AsyncIterable[Work]) -> None:
        stage, seals = self._rows.plan.name, -1
        async for batch in source:
            if self._tools.gate is not None:
                await self._tools.gate()
            for row, answers in batch:
                for answer in answers:
                    if self._spool.seals != seals:
                        seals = self._spool.seals
                        self._changed.set()
                        await self._room()
                    if not self._spool.has(unit_of(row.key, stage, answer)):
                        self._rows.begin(row, answer)
            await asyncio.sleep(0)

    async def _room(self) -> None:
        """Wait until few enough batches are on disk and not sent."""
        while sum(record.state == "sealed" for record in self._spool.records) >= UNSENT:
            self._sent.clear()
            await self._sent.wait()

    # --- steps --------------------------------------------------------------------------------

    async def _do(self, step: Step) -> None:
        record = step.record
        if step.kind == "seal":
            await self._seal()
        elif step.kind == "broke":
            self._broke()
        elif record is None:
            await self._wait(step.until)
        elif step.kind == "send":
            await self._send(record)
        elif step.kind == "look":
            await self._post.look(record)
        elif step.kind == "read":
            await self._read(record)
        else:
            await self._split(record)

    async def _wait(self, until: float | None) -> None:
        left = None if until is None else max(0.0, until - self._clock())
        if not self._changed.is_set():
            await self._tools.pause(self._changed, left)
        self._changed.clear()

    def _broke(self) -> None:
        budget, spent = self._tools.budget or 0.0, self._spool.spent
        raise NeedsPerson(
            f"${spent:.4f} of the budget of ${budget:g} is spent, and the next batch may pass it",
            hint="raise limits.budget_usd (--budget) and run the same command again",
        )

    async def _send(self, record: BatchRecord) -> None:
        if record.state == "sealed" and not self._spool.files(record).requests.exists():
            await self._split(record)  # refused after its file was thought to be needed no more
        else:
            await self._post.send(record)
        self._sent.set()

    # --- what came back -----------------------------------------------------------------------

    def _reading(self, record: BatchRecord) -> Reading:
        tools = self._tools
        return Reading(
            record, self._rows, self._spool, self._service, tools.rules, tools.on_attempt
        )

    async def _read(self, record: BatchRecord) -> None:
        if record.faults or record.word == DIVIDED:
            await (self._refused(record) if record.faults else self._divide(record))
            return
        answers = self._spool.files(record).answers
        if not answers.exists():
            failure = await self._service.fetch(record, answers)
            if failure is not None:
                self._post.trouble(record, failure)
                return
        reading = self._reading(record)
        await reading.answers()
        record.cost_usd = reading.cost
        if reading.foreign:
            words = f"batch {record.number}: {reading.foreign:,} lines are no answers to its rows"
            self._notice(words)
        await self._read_whole(record)
        if reading.refusal is not None:
            self._spool.seal_all()
            self._settle()
            raise NeedsPerson(
                f"batch {record.number}: {reading.refusal.message}",
                hint="raise the quota or change the key, then give the same command again",
            )

    async def _refused(self, record: BatchRecord) -> None:
        """A batch was refused before any of it was done: for its size, its lines, or its kind."""
        words = "; ".join(fault.message for fault in record.faults[:3])
        if any(is_quota(f"{fault.code} {fault.message}") for fault in record.faults):
            record.state, record.batch_id, record.faults = "sealed", None, ()
            self._spool.save(record)
            self._post.wait_for_quota(record, words)
            return
        faults = {
            fault.line - 1: Failure("rejected", f"{fault.message} ({fault.code or 'refused'})")
            for fault in record.faults
            if fault.line is not None and fault.line > 0
        }
        if len(faults) < len(record.faults):
            record.state, record.batch_id, record.file_id = "sealed", None, None
            record.faults = ()
            self._spool.save(record)
            raise NeedsPerson(f"batch {record.number} was refused: {words}", hint=LOOK_HINT)
        await self._reading(record).again(faults)
        record.cost_usd = 0.0
        await self._read_whole(record)

    async def _split(self, record: BatchRecord) -> None:
        """Put the rows into batches that can be taken; from now on they are no more in this one."""
        self._notice(f"batch {record.number} cannot be sent as it is: its rows are divided")
        record.state, record.word = "ended", DIVIDED
        self._spool.save(record)
        await self._divide(record)

    async def _divide(self, record: BatchRecord) -> None:
        await self._reading(record).again({})
        record.cost_usd = 0.0
        await self._read_whole(record)

    async def _read_whole(self, record: BatchRecord) -> None:
        """All rows were taken; the batch is done once those that go again are sealed."""
        self._settling.append(record)
        if self._fed:
            await self._seal()
        elif not self._spool.open_again:
            self._settle()
        self._changed.set()

    async def _seal(self) -> None:
        self._spool.seal_all()
        for files in self._spool.small():
            reader = ParcelReader(files)
            try:
                rows = [(reader.item(n), list(reader.copies(n))) for n in range(len(reader))]
            finally:
                reader.close()
            await self._alone(rows)
        self._settle()

    async def _alone(self, rows: list[tuple[Item, list[Item]]]) -> None:
        if not self._desk.affords(
            self._spool.records, self._rows.most_alone(rows), self._spool.spent
        ):
            self._broke()
        self._notice(f"{len(rows)} rows are too few for a batch: they are asked singly")
        await self._rows.send_alone(rows)

    def _settle(self) -> None:
        for record in self._settling:
            record.state = "done"
            self._spool.save(record)
            self._spool.files(record).remove()
        self._settling.clear()
        self._sent.set()
