"""Execution of a stage through provider batches: fill, send, poll, read, repeat.

Every step is recorded in the ledger before the next one begins, so that a killed process resumes
with the same batches. :class:`ProviderBatchScheduler` decides the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagent.batches.builder import BatchBuilder
from bagent.batches.conversations import BatchRows, ReadRules, ResultReader
from bagent.batches.files import BatchItem, batch_items, read_rows
from bagent.batches.record import OUT, BatchRecord, BatchStatus
from bagent.batches.scheduler import Action, InputState, ProviderBatchScheduler, is_quota_refusal
from bagent.batches.service import BatchService
from bagent.clocks import unix
from bagent.errors import NeedsPerson, StoppedEarly
from bagent.stages.feeder import Work
from bagent.store.journal.codec import unit_of
from bagent.types import Attempt, Failure

MAX_SILENCE = 1800.0
"""Seconds without a response of the provider after which the run ends, to be resumed."""

READ_AHEAD_SECONDS = 60.0
"""Seconds for which batches of an earlier start wait until the input was read: rows in them may
have been edited."""

APPEARANCE_SECONDS = 30.0
"""Seconds for which an unconfirmed batch may still appear before it is created again."""

_UNCLEAR = (408, 409, 425)
"""Statuses of a creation that may have succeeded."""

_TOO_LATE = (400, 404, 409, 422)
"""Statuses of a cancellation of a batch that has ended."""

_AT_WORK = frozenset({"in_progress", "finalizing", "InProgress"})
"""Statuses of an accepted batch, whose file is no longer needed."""

LOOK_HINT = "look at the batch in the provider's console, then give the same command again"

_NO_SERVICE = (404, 405, 501)
"""Statuses of the first request for a batch to a server that makes none."""

Shield = Callable[[Coroutine[None, None, str | Failure]], Awaitable[str | Failure]]


def _hint_before_sending(failure: Failure) -> str:
    """Return the hint for a failure before the provider has anything of a batch."""
    if failure.status in _NO_SERVICE:
        return "does it serve batches? batching: {mode: auto} sends each row by itself"
    if failure.kind == "auth":
        return "give a key that may make batches, then the same command again"
    return "remove the cause, then give the same command again"


@dataclass(frozen=True)
class SubmitterTools:
    """What a submitter needs besides batches."""

    shelter: Shield
    """Runs a request that a stop waits for."""
    note: Callable[[str], None]
    """Shows the current state."""
    notice: Callable[[str], None]
    """Shows and logs a line."""
    clock: Callable[[], float] = unix
    """Unix seconds."""


class BatchSubmitter:
    """Creates batches from files and polls them until they have ended."""

    def __init__(
        self,
        service: BatchService,
        builder: BatchBuilder,
        scheduler: ProviderBatchScheduler,
        tools: SubmitterTools,
    ) -> None:
        self._service = service
        self._builder = builder
        self._scheduler = scheduler
        self._tools = tools
        self._heard = tools.clock()

    async def send(self, record: BatchRecord) -> None:
        """Create a batch; it is recorded before, so that it is never created twice.

        Raises:
            NeedsPerson: the account cannot pay, or the key or the batch is refused.
            StoppedEarly: nothing was heard for long.
        """
        batch_id: str | Failure | None = None
        if record.state == "sending" and record.file_id is not None:
            batch_id = await self._service.find(record)
            if isinstance(batch_id, Failure):
                self.handle_failure(record, batch_id)
                return
            if batch_id is None and self._may_appear(record):
                return
        if batch_id is None:
            record.state, record.sent_at = "sending", round(self._tools.clock(), 3)
            self._builder.save(record)
            batch_id = await self._make(record)
        elif isinstance(batch_id, str):
            self._note_id(record, batch_id)
        if isinstance(batch_id, Failure):
            self._not_sent(record, batch_id)
            return
        self._scheduler.quota(record.group).taken()
        self._scheduler.succeeded(record, self._heard_now())
        self._tools.notice(f"batch {record.number} is {batch_id}: {record.rows:,} rows")

    def _may_appear(self, record: BatchRecord) -> bool:
        """Return whether a batch that was not found is too recent to be created again."""
        now = self._tools.clock()
        age = now - (record.sent_at or 0.0)
        if age >= APPEARANCE_SECONDS:
            return False
        self._scheduler.failed(record, now, min(APPEARANCE_SECONDS, APPEARANCE_SECONDS - age))
        return True

    async def _make(self, record: BatchRecord) -> str | Failure:
        requests = self._builder.files(record).requests
        if record.file_id is None:
            uploaded = await self._service.upload(record, requests)
            if isinstance(uploaded, Failure):
                # An uploaded file costs nothing.
                record.state = "sealed"
                return uploaded
            record.file_id = uploaded
            self._builder.save(record)
        return await self._tools.shelter(self._create(record, requests))

    async def _create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Create the batch and record its id, even if the run is stopped meanwhile."""
        batch_id = await self._service.create(record, requests)
        if isinstance(batch_id, str):
            self._note_id(record, batch_id)
        return batch_id

    def _note_id(self, record: BatchRecord, batch_id: str) -> None:
        record.state, record.batch_id, record.word = "waiting", batch_id, ""
        self._builder.save(record)

    def _not_sent(self, record: BatchRecord, failure: Failure) -> None:
        """Handle a failed creation. If its outcome is unknown, the batch is searched first."""
        status = failure.status or 0
        if 400 <= status < 500 and status not in _UNCLEAR:
            record.state = "sealed"
        self._builder.save(record)
        if is_quota_refusal(failure.message) and failure.kind != "budget":
            self._heard_now()
            record.state = "sealed"
            self._builder.save(record)
            self.wait_for_quota(record, failure.message)
            return
        self.handle_failure(record, failure)

    def wait_for_quota(self, record: BatchRecord, message: str) -> None:
        """Postpone a batch that was refused for want of quota, which is no error."""
        out = self._scheduler.out(self._builder.records, record)
        self._scheduler.refused(record, message, out, self._tools.clock())
        self._tools.notice(f"batch {record.number} waits: {message}")

    def handle_failure(self, record: BatchRecord, failure: Failure) -> None:
        """Postpone the step after a passing failure; end the run after any other.

        Raises:
            NeedsPerson: a person has to act first.
            StoppedEarly: nothing was heard for long.
        """
        now = self._tools.clock()
        if not failure.passing:
            hint = LOOK_HINT
            if record.batch_id is None and record.file_id is None:
                hint = _hint_before_sending(failure)
            raise NeedsPerson(f"batch {record.number}: {failure.message}", hint=hint)
        if failure.status is not None:
            self._heard_now()
        elif now - self._heard > MAX_SILENCE:
            raise StoppedEarly(
                f"no answer from {self._service.name} for {MAX_SILENCE / 60:.0f} minutes: "
                f"{failure.message}",
                hint="batches stay with the provider; the same command resumes",
            )
        wait = self._scheduler.failed(record, now, failure.retry_after)
        self._tools.note(f"batch {record.number}: {failure.message}; again in {wait:.0f} s")

    def _heard_now(self) -> float:
        self._heard = self._tools.clock()
        return self._heard

    async def poll(self, record: BatchRecord) -> None:
        """Poll a batch; raises as :meth:`handle_failure`."""
        status = await self._service.poll(record)
        now = self._tools.clock()
        if isinstance(status, Failure):
            self.handle_failure(record, status)
            return
        self._heard_now()
        if record.batch_id in record.rejected_ids:
            record.state, record.batch_id = "sending", None
            self._builder.save(record)
            self._scheduler.succeeded(record, now)
            return
        changed = (status.word, status.ended, status.failed) != (
            record.word,
            record.ended,
            record.failed,
        )
        news = status.word != record.word
        self._apply_status(record, status, now)
        if changed or status.over:
            self._builder.save(record, sync=status.over)
        if news:  # after the ledger, so that a killed run repeats no message
            self._tools.notice(f"batch {record.number} ({record.batch_id}) is {status.word}")
        self._scheduler.succeeded(record, now)
        if status.word in _AT_WORK and not record.unconfirmed:
            with suppress(OSError):
                self._builder.files(record).requests.unlink()

    async def cancel(self, record: BatchRecord) -> None:
        """Let the provider stop a late batch; raises as :meth:`handle_failure`.

        One that has just ended cannot be stopped, and is read as usual.
        """
        failure = await self._service.cancel(record)
        if failure is not None and failure.status not in _TOO_LATE:
            self.handle_failure(record, failure)
            return
        record.cancelled_at = round(self._tools.clock(), 3)
        self._builder.save(record)
        self._heard_now()
        self._scheduler.cancelled(record)
        self._tools.notice(
            f"batch {record.number} is late: it is cancelled, and rows without an answer are sent"
            " singly"
        )

    def _apply_status(self, record: BatchRecord, status: BatchStatus, now: float) -> None:
        record.word, record.ended, record.failed = status.word, status.ended, status.failed
        record.polled_at = round(now, 3)
        if status.over:
            record.state, record.outputs, record.faults = "ended", status.outputs, status.faults
            record.ended_at = round(status.ended_at or now, 3)


MAX_UNSENT = 2
"""Unsent batches on disk before reading pauses."""

DIVIDED = "divided"
"""Status of a batch that was never created, because its rows go into others."""


async def pause(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most ``seconds``."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


@dataclass(frozen=True)
class EngineTools:
    """What the engine needs besides rows and batches."""

    rules: ReadRules
    post: SubmitterTools
    on_attempts: Callable[[Sequence[Attempt]], None]
    gate: Callable[[], Awaitable[None]] | None = None
    budget: float | None = None
    pause: Callable[[asyncio.Event, float | None], Awaitable[None]] = field(default=pause)
    """Waits by the clock of ``post``."""


class BatchEngine:
    """Runs all rows of a stage through batches; see :class:`bagent.stages.row_runner.RowRunner`."""

    def __init__(
        self,
        service: BatchService,
        builder: BatchBuilder,
        rows: BatchRows,
        scheduler: ProviderBatchScheduler,
        tools: EngineTools,
    ) -> None:
        self._service = service
        self._builder = builder
        self._rows = rows
        self._scheduler = scheduler
        self._tools = tools
        self._settling: list[BatchRecord] = []
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._waits_for_room = asyncio.Event()
        self._fed = False
        self._post = BatchSubmitter(service, builder, scheduler, tools.post)
        self._clock, self._notice = tools.post.clock, tools.post.notice

    async def run(self, source: AsyncIterable[Work]) -> None:
        """Process all rows. Cancelling leaves batches with the provider.

        Raises:
            NeedsPerson: the account cannot pay, a key is refused, or a batch is refused as a whole.
            StoppedEarly: the provider does not answer.
            WriteError: the disk refuses.
        """
        feeding = asyncio.create_task(self._feed(source))
        feeding.add_done_callback(lambda _: self._changed.set())
        try:
            if self._builder.records and self._tools.rules.edited is not None:
                await self._read_ahead(feeding)
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
            self._builder.drop_open()
            self._notify_outstanding()

    @property
    def out(self) -> tuple[int, int]:
        """The rows at the provider, and the rows that wait to be sent."""
        builder = self._builder
        out = sum(record.rows - record.ended for record in builder.records if record.state in OUT)
        sealed = (record for record in builder.records if record.state == "sealed")
        here = sum(record.rows - builder.finished_rows(record) for record in sealed)
        return out, here + builder.open_rows

    def _notify_outstanding(self) -> None:
        waiting = [record for record in self._builder.records if record.state == "waiting"]
        if waiting:
            count = f"{len(waiting)} batches stay" if len(waiting) > 1 else "1 batch stays"
            rows = sum(record.rows for record in waiting)
            self._notice(
                f"{count} with the provider ({rows:,} rows); the same command waits for"
                f" {'them' if len(waiting) > 1 else 'it'}"
            )

    def _next(self) -> Action:
        settling = {record.label for record in self._settling}
        records = [record for record in self._builder.records if record.label not in settling]
        feed = InputState(self._fed, self._builder.open)
        return self._scheduler.next(records, feed, self._builder.spent, self._clock())

    # --- rows ---------------------------------------------------------------------------------

    async def _read_ahead(self, feeding: asyncio.Task[None]) -> None:
        """Wait until the input was read, or until reading waits for room."""
        room = asyncio.create_task(self._waits_for_room.wait())
        reasons: set[asyncio.Task[Any]] = {feeding, room}
        await asyncio.wait(reasons, timeout=READ_AHEAD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        room.cancel()

    async def _feed(self, source: AsyncIterable[Work]) -> None:
        stage, seals, edited = self._rows.plan.name, -1, self._tools.rules.edited
        async for batch in source:
            if self._tools.gate is not None:
                await self._tools.gate()
            for row, answers in batch:
                if edited is not None:
                    edited.read(row)
                for answer in answers:
                    if self._builder.seals != seals:
                        seals = self._builder.seals
                        self._changed.set()
                        await self._wait_for_room()
                    if not self._builder.has(unit_of(row.key, stage, answer)):
                        self._rows.begin(row, answer)
            await asyncio.sleep(0)
        if edited is not None:
            edited.end()

    async def _wait_for_room(self) -> None:
        """Wait until fewer than :data:`MAX_UNSENT` batches are unsent."""
        while sum(record.state == "sealed" for record in self._builder.records) >= MAX_UNSENT:
            self._sent.clear()
            self._waits_for_room.set()
            await self._sent.wait()

    # --- steps --------------------------------------------------------------------------------

    async def _do(self, step: Action) -> None:
        record = step.record
        if step.kind == "seal":
            await self._seal()
        elif step.kind == "over_budget":
            self._raise_over_budget()
        elif record is None:
            await self._wait(step.until)
        elif step.kind == "send":
            await self._send(record)
        elif step.kind == "cancel":
            await self._post.cancel(record)
        elif step.kind == "singly":
            await self._send_singly(record)
        elif step.kind == "poll":
            await self._post.poll(record)
        elif step.kind == "read":
            await self._read(record)
        else:
            await self._split(record)

    async def _wait(self, until: float | None) -> None:
        seconds = None if until is None else max(0.0, until - self._clock())
        if not self._changed.is_set():
            await self._tools.pause(self._changed, seconds)
        self._changed.clear()

    def _raise_over_budget(self) -> None:
        budget, spent = self._tools.budget or 0.0, self._builder.spent
        raise NeedsPerson(
            f"${spent:.4f} of the budget of ${budget:g} is spent, and the next batch may pass it",
            hint="raise limits.budget_usd (--budget) and run the same command again",
        )

    async def _send(self, record: BatchRecord) -> None:
        if not self._may_exist(record) and not self._is_whole(record):
            await self._split(record)  # refused after its file was removed, or rows were edited
        else:
            await self._post.send(record)
        self._sent.set()

    @staticmethod
    def _may_exist(record: BatchRecord) -> bool:
        """Return whether the provider may have the batch."""
        return record.state == "sending" and record.file_id is not None

    def _is_whole(self, record: BatchRecord) -> bool:
        """Return whether a batch still has its file, and none of its rows was edited."""
        files, edited = self._builder.files(record), self._tools.rules.edited
        if not files.requests.exists():
            return False
        if edited is None or not self._builder.is_loaded(record):
            return True
        return not any(edited.has(item) for _, item in batch_items(files))

    async def _send_singly(self, record: BatchRecord) -> None:
        """Send the rows of a late batch as single calls; those that ended before are left out."""
        rows = read_rows(self._builder.files(record))
        record.cost_usd = self._rows.max_single_cost(rows)
        remaining: list[tuple[BatchItem, list[BatchItem]]] = []
        unanswered: list[BatchItem] = []  # copies of rows that are over
        for item, all_copies in rows:
            copies = [copy for copy in all_copies if not self._is_over(copy)]
            if self._is_over(item):
                unanswered += copies
            else:
                remaining.append((item, copies))
        if remaining:
            self._check_budget(record.cost_usd)
        self._builder.close(record)
        record.state = "ended"  # not on disk: after a kill it is sent again
        if remaining:
            await self._alone(remaining, "late")
        for copy in unanswered:
            self._rows.begin(copy.row, copy.answer)
        record.state = "done"
        self._builder.save(record)
        self._builder.files(record).remove()
        self._sent.set()

    def _is_over(self, item: BatchItem) -> bool:
        return self._tools.rules.is_over(item, self._rows.plan.name)

    # --- what came back -----------------------------------------------------------------------

    def _reading(self, record: BatchRecord) -> ResultReader:
        tools = self._tools
        self._builder.close(record)
        return ResultReader(
            record, self._rows, self._builder, self._service, tools.rules, tools.on_attempts
        )

    async def _read(self, record: BatchRecord) -> None:
        if record.faults or record.word == DIVIDED:
            await (self._refused(record) if record.faults else self._divide(record))
            return
        answers = self._builder.files(record).answers
        if not answers.exists():
            failure = await self._service.fetch(record, answers)
            if failure is not None:
                self._post.handle_failure(record, failure)
                return
        reading = self._reading(record)
        await reading.answers()
        record.cost_usd = reading.cost
        if reading.foreign:
            message = f"batch {record.number}: {reading.foreign:,} lines are no answers to its rows"
            self._notice(message)
        await self._finish_reading(record)
        if reading.refusal is not None:
            self._builder.seal_all()
            self._settle()
            raise NeedsPerson(
                f"batch {record.number}: {reading.refusal.message}",
                hint="raise the quota or change the key, then give the same command again",
            )

    async def _refused(self, record: BatchRecord) -> None:
        """Handle a batch that was refused for its quota, its lines, or its kind."""
        message = "; ".join(fault.message for fault in record.faults[:3])
        if any(is_quota_refusal(f"{fault.code} {fault.message}") for fault in record.faults):
            record.state, record.batch_id, record.faults = "sealed", None, ()
            self._builder.save(record)
            self._post.wait_for_quota(record, message)
            return
        faults = {
            fault.line - 1: Failure("rejected", f"{fault.message} ({fault.code or 'refused'})")
            for fault in record.faults
            if fault.line is not None and fault.line > 0
        }
        if len(faults) < len(record.faults):
            record.state, record.batch_id, record.file_id = "sealed", None, None
            record.faults = ()
            self._builder.save(record)
            raise NeedsPerson(f"batch {record.number} was refused: {message}", hint=LOOK_HINT)
        await self._reading(record).again(faults)
        record.cost_usd = 0.0
        await self._finish_reading(record)

    async def _split(self, record: BatchRecord) -> None:
        """Move the rows into smaller batches."""
        self._notice(f"batch {record.number} cannot be sent as it is: its rows are divided")
        record.state, record.word = "ended", DIVIDED
        self._builder.save(record)
        await self._divide(record)

    async def _divide(self, record: BatchRecord) -> None:
        await self._reading(record).again({})
        record.cost_usd = 0.0
        await self._finish_reading(record)

    async def _finish_reading(self, record: BatchRecord) -> None:
        """Finish a batch whose rows were all read, once rows for later batches are sealed."""
        self._settling.append(record)
        if self._fed:
            await self._seal()
        elif not self._builder.open_again:
            self._settle()
        self._changed.set()

    async def _seal(self) -> None:
        self._builder.seal_all()
        for files in self._builder.small():
            rows = read_rows(files)
            self._check_budget(self._rows.max_single_cost(rows))
            await self._alone(rows, "too few for a batch")
        self._settle()

    def _check_budget(self, most_usd: float) -> None:
        """Raise where the budget does not cover single calls that cost ``most_usd``."""
        if not self._scheduler.affords(self._builder.records, most_usd, self._builder.spent):
            self._raise_over_budget()

    async def _alone(self, rows: list[tuple[BatchItem, list[BatchItem]]], reason: str) -> None:
        self._notice(f"{len(rows)} rows are {reason}: they are asked singly")
        await self._rows.send_singly(rows)

    def _settle(self) -> None:
        if self._settling:
            self._rows.sync()  # before the answers are removed
        for record in self._settling:
            record.state = "done"
            self._builder.save(record)
            self._builder.files(record).remove()
        self._settling.clear()
        self._sent.set()
