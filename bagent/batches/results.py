"""Reading of finished batches: answers are evaluated, passing failures go into a later batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from bagent.agents.conversation import Conversation
from bagent.backends.base import Exchange
from bagent.batches.builder import BatchBuilder
from bagent.batches.conversation_host import BatchLine, BatchRows
from bagent.batches.files import BatchFileReader, BatchItem
from bagent.batches.record import BatchRecord
from bagent.batches.service import BatchService, request_number
from bagent.fleet.call import Call, CallResult, Delivery, attempt_record
from bagent.money.prices import Price
from bagent.store.journal.codec import unit_of
from bagent.types import Attempt, Failure, Outcome, Reply

ROWS_AT_ONCE = 64
"""Rows processed before the event loop gets a turn."""

NO_ANSWER = Failure("timeout", "the batch ended without an answer to this row", passing=True)


class ReadRules(msgspec.Struct, frozen=True):
    """How answers are processed."""

    retries: int
    """Attempts after the first."""
    price: Price | None
    is_done: Callable[[int], bool]
    """Whether a unit is finished."""


class ResultReader:
    """Reads one batch; use it once.

    ``refusal`` is an account failure of some rows: they are in a later batch, which is sent once a
    person has acted. ``cost`` is in dollars, None if a token count is missing. ``foreign`` counts
    lines that answer none of the rows.
    """

    def __init__(
        self,
        record: BatchRecord,
        rows: BatchRows,
        builder: BatchBuilder,
        service: BatchService,
        rules: ReadRules,
        on_attempt: Callable[[Attempt], None],
    ) -> None:
        self._record = record
        self._rows = rows
        self._builder = builder
        self._service = service
        self._rules = rules
        self._on_attempt = on_attempt
        self._files = builder.files(record)
        self.refusal: Failure | None = None
        self.cost: float | None = 0.0
        self.foreign = 0
        self._failures: dict[int, Failure] = {}
        sent_at = record.sent_at or rows.now()
        self._delivery = Delivery(
            service.name,
            record.batch_id or record.label,
            sent_at,
            record.ended_at or rows.now(),
            0.0,
        )
        self._exchange = Exchange([NO_ANSWER] * record.rows, sent_at, done=self._delivery.done)

    async def answers(self) -> None:
        """Process the fetched answers; rows without one go into a later batch."""
        reader = BatchFileReader(self._files)
        seen = bytearray(len(reader))
        try:
            with self._files.answers.open("rb") as handle:
                for count, line in enumerate(handle):
                    if line.strip():
                        self._line(line, reader, seen)
                    if count % ROWS_AT_ONCE == 0:
                        await asyncio.sleep(0)
            for number, there in enumerate(seen):
                if not there:
                    self._take(reader, number, self._failures.pop(number, NO_ANSWER))
                if number % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            reader.close()

    async def again(self, faults: dict[int, Failure]) -> None:
        """Put all rows but those in ``faults`` into later batches; no attempt is counted."""
        reader = BatchFileReader(self._files)
        try:
            for number in range(len(reader)):
                self._take(reader, number, faults.get(number))
                if number % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            reader.close()

    def _line(self, line: bytes, reader: BatchFileReader, seen: bytearray) -> None:
        try:
            name, result = self._service.read(line, self._record)
        except ValueError:
            self.foreign += 1
            return
        number = request_number(name, self._record.label)
        if number is None or number >= len(reader) or seen[number]:
            self.foreign += 1
            return
        if isinstance(result, Failure):
            # Applied at the end: a later line may hold the answer, which is paid for.
            self.foreign += number in self._failures
            self._failures.setdefault(number, result)
            return
        seen[number] = 1
        if self.cost is not None:
            price = self._rules.price
            cost = price.cost(result.usage) if price is not None else None
            self.cost = None if cost is None else self.cost + cost
        self._take(reader, number, result)

    def _take(self, reader: BatchFileReader, number: int, result: Reply | Failure | None) -> None:
        item, rows = reader.item(number), self._rows
        copies = list(reader.copies(number))
        step = None if self._is_taken(item) else self._evaluate(item, result)
        copies = [copy for copy in copies if not self._is_taken(copy)]
        if isinstance(step, Outcome):
            rows.copy_to(copies, step)
        elif step is not None:
            for copy in copies:
                copy.of = step.number
                self._builder.copy(step.label, copy)
        else:
            for copy in copies:
                rows.begin(copy.row, copy.answer)

    def _is_taken(self, item: BatchItem) -> bool:
        """Return whether an interrupted process has handled the answer before."""
        unit = unit_of(item.row.key, self._rows.plan.name, item.answer)
        return self._rules.is_done(unit) or self._builder.has_later(self._record, unit)

    def _evaluate(self, item: BatchItem, result: Reply | Failure | None) -> Outcome | BatchLine:
        """Return the row's outcome, or where its next call waits."""
        rows = self._rows
        conversation = Conversation(rows.plan, item.row, item.answer)
        call = conversation.restore(item.state)
        if isinstance(call, Outcome):
            return rows.finish(conversation, call)
        if result is None:
            return rows.send(conversation, call)
        call.attempts += 1
        failure: Failure | None
        if isinstance(result, Reply):
            failure = conversation.evaluate(call, result, self._delivery)
            self._exchange.status, self._exchange.request_id = 200, result.request_id
        else:
            failure = result
            self._exchange.status, self._exchange.request_id = result.status, None
        self._on_attempt(attempt_record(call, result, failure, self._exchange, self._delivery))
        if failure is not None:
            return self._failed(conversation, call, failure)
        end = CallResult(result, self._delivery)
        return rows.take(conversation, conversation.handle(call, end))

    def _failed(
        self, conversation: Conversation, call: Call, failure: Failure
    ) -> Outcome | BatchLine:
        rows = self._rows
        if self._service.learn(call.request, failure, self._record.form):
            return rows.send(conversation, call)
        if failure.kind in ("auth", "budget"):
            self.refusal = failure
            return rows.send(conversation, call)
        if failure.passing and self._record.cancelled_at is not None:
            return rows.send(conversation, call)  # cancelled by this run: no fault of the row
        if failure.passing:
            call.counted_attempts += 1
            if call.counted_attempts <= self._rules.retries:
                return rows.send(conversation, call)
            message = f"{failure.message} ({call.counted_attempts} tries)"
            failure = msgspec.structs.replace(failure, message=message)
        end = CallResult(failure, self._delivery)
        return rows.take(conversation, conversation.handle(call, end))
