"""Conversations whose calls travel in batches: from their first call to their outcomes.

Finished batches are read and their answers evaluated; passing failures go into a later batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bagent.agents.conversation import Conversation, Step, converse, text_bytes
from bagent.agents.plan import StagePlan
from bagent.backends.base import Exchange
from bagent.backends.request import answer_limit
from bagent.batches.builder import BatchBuilder, RequestCost
from bagent.batches.edited import EditedItems
from bagent.batches.files import BatchFileReader, BatchItem
from bagent.batches.record import BatchRecord
from bagent.batches.service import BatchService, request_number
from bagent.clocks import unix
from bagent.fleet.call import Call, CallResult, Delivery, attempt_record
from bagent.fleet.fleet import Fleet
from bagent.money.prices import Price, pricer
from bagent.stages.dedupe import RequestDedupe, copy_outcome
from bagent.stages.results import Emit
from bagent.stages.row_runner import OutcomeLog
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import PASSING_KINDS, Attempt, Failure, Json, Outcome, Reply, Row

DEFAULT_ANSWER_TOKENS = 4096
"""Assumed answer length if the request has no limit."""

ROWS_AT_ONCE = 64
"""Rows processed before the event loop gets a turn."""

NO_ANSWER = Failure("timeout", "the batch ended without an answer to this row", passing=True)


@dataclass(frozen=True)
class RowTools:
    """What rows need."""

    plan: StagePlan
    journal: OutcomeLog
    """Where outcomes go."""
    fleet: Fleet
    sharing: RequestDedupe
    guards: StopRules
    emit: Emit
    price: Price | None = None
    """Price of batches."""
    single_price: Price | None = None
    """Price of single calls."""
    dedupe: bool = False
    """Send equal requests once."""
    clock: Callable[[], float] = unix
    """Unix seconds."""
    tier: Mapping[str, Json] = field(default_factory=dict)
    """Request fields of a cheaper tier for single calls."""
    tier_until: float = 0.0
    """When single calls stop using it, in Unix seconds."""


class BatchLine(NamedTuple):
    """Where a call waits."""

    label: str
    """The batch."""
    number: int
    """The line of its file."""


class BatchRows:
    """Puts the calls of conversations into batches, and writes outcomes.

    ``advice`` receives a reason to stop.
    """

    def __init__(self, tools: RowTools, builder: BatchBuilder) -> None:
        self.plan = tools.plan
        self._single = msgspec.structs.replace(tools.plan, price=pricer(tools.single_price))
        settings = tools.plan.settings
        self._tiered = msgspec.structs.replace(
            self._single,
            settings=msgspec.structs.replace(settings, extra={**settings.extra, **tools.tier}),
        )
        self._tools = tools
        self._builder = builder
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    def remember(self, label: str | None, number: int, item: BatchItem) -> None:
        """Offer the request of an item that the builder loads to rows with an equal one.

        See :data:`bagent.batches.builder.OnItem` for the arguments.
        """
        if label is None or not self._tools.dedupe:
            return
        conversation = Conversation(self.plan, item.row, item.answer)
        call = conversation.restore(item.state)
        if isinstance(call, Call) and call.turn == 1:
            self._builder.remember(conversation.request_hash, label, number)

    def begin(self, row: Row, answer: int) -> None:
        """Start a row, unless an equal request has an answer or is in a batch."""
        conversation = Conversation(self.plan, row, answer)
        call = conversation.open()
        if isinstance(call, Outcome):
            self.finish(conversation, call)
            return
        earlier = self._tools.sharing.finished_answer(conversation)
        if earlier is not None:
            self.finish(conversation, copy_outcome(conversation, earlier, self.now()))
            return
        leader = self._builder.leader(conversation.request_hash) if self._tools.dedupe else None
        if leader is not None:
            self._builder.copy(leader[0], BatchItem(row, answer, of=leader[1]))
            return
        self.send(conversation, call, again=False)

    def send(
        self, conversation: Conversation, call: Call, *, again: bool = True
    ) -> Outcome | BatchLine:
        """Put a call into a batch; a call that the service cannot express fails its row."""
        item = BatchItem(conversation.row, conversation.answer, conversation.to_state(call))
        try:
            line = BatchLine(
                *self._builder.put(
                    call.request, item, self._cost_of(call, self._tools.price), again=again
                )
            )
        except ValueError as error:
            failure = Failure("rejected", f"not sent: {error}")
            return self.take(conversation, conversation.handle(call, CallResult(failure, None)))
        if self._tools.dedupe and call.turn == 1:
            self._builder.remember(conversation.request_hash, *line)
        return line

    def _cost_of(self, call: Call, price: Price | None) -> RequestCost:
        request = call.request
        tokens = self.plan.budget.request_tokens(text_bytes(request.payload))
        limit = answer_limit(request)
        most = DEFAULT_ANSWER_TOKENS if limit is None else limit
        return RequestCost(tokens, 0.0 if price is None else price.at_most(tokens, most))

    def max_single_cost(self, items: list[tuple[BatchItem, list[BatchItem]]]) -> float:
        """Return the maximal price of single calls for these rows; 0 if no price is known."""
        price, most = self._tools.single_price, 0.0
        for item, _ in items if price is not None else ():
            call = Conversation(self._single, item.row, item.answer).restore(item.state)
            if isinstance(call, Call):
                most += self._cost_of(call, price).usd
        return most

    async def send_singly(self, items: list[tuple[BatchItem, list[BatchItem]]]) -> None:
        """Send rows as single calls and wait until all have ended."""
        fleet = self._tools.fleet
        plan = self._tiered if self.now() < self._tools.tier_until else self._single
        tasks = []
        fleet.expect(True)
        for item, copies in items:
            conversation = Conversation(plan, item.row, item.answer)
            call = conversation.restore(item.state)
            if isinstance(call, Outcome):
                self.finish(conversation, call)
            else:
                work = converse(conversation, call, fleet)
                tasks.append(fleet.spawn(self._run_singly(conversation, work, copies)))
        fleet.expect(False)
        if tasks:
            await asyncio.wait(tasks)  # it does not cancel the rows where it is cancelled
        for task in tasks:
            task.result()

    async def _run_singly(
        self, conversation: Conversation, work: Awaitable[Outcome | None], copies: list[BatchItem]
    ) -> None:
        """Wait for a row's outcome, write it, and copy it to equal rows."""
        outcome = await work
        if outcome is not None:
            self.finish(conversation, outcome)
            self.copy_to(copies, outcome)

    def sync(self) -> None:
        """Sync the outcomes to disk. Raises WriteError."""
        self._tools.journal.sync()

    def now(self) -> float:
        """Return Unix seconds."""
        return self._tools.clock()

    def take(self, conversation: Conversation, step: Step) -> Outcome | BatchLine:
        """Put a further call into a batch, or write the outcome; return which it was."""
        if isinstance(step, Outcome):
            return self.finish(conversation, step)
        return self.send(conversation, step)

    def finish(self, conversation: Conversation, outcome: Outcome) -> Outcome:
        """Write an outcome, and return it."""
        tools = self._tools
        if outcome.finished_at is None:
            outcome.finished_at = round(self.now(), 4)
        location = tools.journal.write(outcome)
        tools.emit([(outcome, location, conversation.row)])
        advice = tools.guards.ended([(None, outcome)])
        if advice is not None and not self.advice.done():
            self.advice.set_result(advice)
        tools.sharing.finished([(conversation, outcome)], [location])
        return outcome

    def copy_to(self, copies: list[BatchItem], outcome: Outcome) -> None:
        """Copy the answer to equal rows; after a passing failure they are sent themselves."""
        for item in copies:
            if outcome.error_kind in PASSING_KINDS:
                self.begin(item.row, item.answer)
                continue
            conversation = Conversation(self.plan, item.row, item.answer)
            step = conversation.open()
            if not isinstance(step, Outcome):
                step = copy_outcome(conversation, outcome, self.now())
            self.finish(conversation, step)


class ReadRules(msgspec.Struct, frozen=True):
    """How answers are processed."""

    retries: int
    """Attempts after the first."""
    price: Price | None
    is_done: Callable[[int], bool]
    """Whether a unit is finished."""
    edited: EditedItems | None = None
    """Finds rows that were edited since; None where not all of the input is read."""

    def is_over(self, item: BatchItem, stage: str) -> bool:
        """Return whether an earlier start has finished a row, or the row was edited since."""
        return self.is_done(item.unit(stage)) or (self.edited is not None and self.edited.has(item))


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
        on_attempts: Callable[[Sequence[Attempt]], None],
    ) -> None:
        self._record = record
        self._rows = rows
        self._builder = builder
        self._service = service
        self._rules = rules
        self._on_attempts = on_attempts
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
        """Return whether an interrupted process has handled the answer before, or whether the row
        was edited since."""
        stage = self._rows.plan.name
        return self._rules.is_over(item, stage) or self._builder.has_later(
            self._record, item.unit(stage)
        )

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
        attempt = attempt_record(call, result, failure, self._exchange, self._delivery)
        self._on_attempts([attempt])
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
