"""Host of the conversations of batches: puts their calls into batches and writes outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bagent.agents.conversation import Conversation, Step, converse, text_bytes
from bagent.agents.plan import StagePlan
from bagent.backends.request import answer_limit
from bagent.batches.builder import BatchBuilder, RequestCost
from bagent.batches.files import BatchItem, encode_item
from bagent.fleet.call import Call, CallResult
from bagent.fleet.fleet import Fleet
from bagent.money.prices import Price, pricer
from bagent.stages.dedupe import RequestDedupe, copy_outcome
from bagent.stages.row_runner import OutcomeLog
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import PASSING_KINDS, Failure, Json, Outcome, Row

DEFAULT_ANSWER_TOKENS = 4096
"""Assumed answer length if the request has no limit."""


@dataclass(frozen=True)
class RowTools:
    """What rows need."""

    plan: StagePlan
    journal: OutcomeLog
    """Where outcomes go."""
    fleet: Fleet
    sharing: RequestDedupe
    guards: StopRules
    emit: Callable[[Outcome, int, Row], None]
    price: Price | None = None
    """Price of batches."""
    single_price: Price | None = None
    """Price of single calls."""
    dedupe: bool = False
    """Send equal requests once."""
    clock: Callable[[], float] = time.time
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
                *self._builder.put(call.request, item, self._cost_of(call), again=again)
            )
        except ValueError as error:
            failure = Failure("rejected", f"not sent: {error}")
            return self.take(conversation, conversation.handle(call, CallResult(failure, None)))
        if self._tools.dedupe and call.turn == 1:
            self._builder.remember(conversation.request_hash, *line)
        return line

    def _cost_of(self, call: Call) -> RequestCost:
        request, price = call.request, self._tools.price
        tokens = self.plan.budget.request_tokens(text_bytes(request.payload))
        limit = answer_limit(request)
        most = DEFAULT_ANSWER_TOKENS if limit is None else limit
        return RequestCost(tokens, 0.0 if price is None else price.at_most(tokens, most))

    def max_single_cost(self, items: list[tuple[BatchItem, list[BatchItem]]]) -> float:
        """Return the maximal price of single calls for these rows; 0 if no price is known."""
        price, most = self._tools.single_price, 0.0
        for item, _ in items:
            size = text_bytes(encode_item(item))  # an upper bound of the prompt
            max_tokens = item.state.max_tokens or DEFAULT_ANSWER_TOKENS
            most += (
                0.0
                if price is None
                else price.at_most(self.plan.budget.request_tokens(size), max_tokens)
            )
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
        tools.emit(outcome, location, conversation.row)
        advice = tools.guards.outcome(outcome)
        if advice is not None and not self.advice.done():
            self.advice.set_result(advice)
        tools.sharing.finished(conversation, outcome, location)
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
