"""Host of the conversations of batches: puts their calls into batches and writes outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import msgspec

from bagent.agents.conversation import Conversation, make_conversation, text_bytes
from bagent.agents.plan import StagePlan
from bagent.batches.builder import BatchBuilder, RequestCost
from bagent.batches.files import BatchItem, encode_item
from bagent.fleet.call import Call
from bagent.fleet.fleet import Fleet
from bagent.money.prices import Price, pricer
from bagent.stages.dedupe import RequestDedupe, copy_outcome
from bagent.stages.row_runner import OutcomeLog
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import PASSING_KINDS, Failure, Outcome, Row

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


class BatchRows:
    """The host of all conversations; see :class:`bagent.agents.plan.AgentHost`.

    ``placed`` is the batch and line of the last call, ``ended`` the last outcome with its offset in
    the journal; :meth:`forget` clears both. ``advice`` receives a reason to stop.
    """

    def __init__(self, tools: RowTools, builder: BatchBuilder) -> None:
        self.plan = tools.plan
        self._single = msgspec.structs.replace(tools.plan, price=pricer(tools.single_price))
        self._tools = tools
        self._builder = builder
        self._single_calls: dict[Conversation, list[BatchItem]] = {}
        self._singles_done = asyncio.Event()
        self.placed: tuple[str, int] | None = None
        self.ended: tuple[Outcome, int] | None = None
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    def forget(self) -> None:
        """Clear the results of the last row."""
        self.placed = self.ended = None

    def begin(self, row: Row, answer: int) -> None:
        """Start a row, unless an equal request has an answer or is in a batch."""
        conversation = make_conversation(self.plan, row, answer, self)
        call = conversation.open()
        if call is None:
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

    def send(self, conversation: Conversation, call: Call, *, again: bool = True) -> None:
        """Put a call into a batch; a call that the service cannot express fails its row."""
        item = BatchItem(conversation.row, conversation.answer, conversation.to_state(call))
        try:
            self.placed = self._builder.put(call.request, item, self._cost_of(call), again=again)
        except ValueError as error:
            conversation.failed(call, Failure("rejected", f"not sent: {error}"), None)
            return
        if self._tools.dedupe and call.turn == 1:
            self._builder.remember(conversation.request_hash, *self.placed)

    def _cost_of(self, call: Call) -> RequestCost:
        request, price = call.request, self._tools.price
        tokens = self.plan.budget.request_tokens(text_bytes(request.payload))
        most = request.max_tokens or DEFAULT_ANSWER_TOKENS
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
        self._tools.fleet.expect(True)
        for item, copies in items:
            conversation = make_conversation(self._single, item.row, item.answer, self)
            call = conversation.from_state(item.state)
            if call is not None:
                self._single_calls[conversation] = copies
                self._tools.fleet.submit(call)
        self._tools.fleet.expect(False)
        while self._single_calls:
            self._singles_done.clear()
            await self._singles_done.wait()

    # --- what conversations ask for -------------------------------------------------------------

    def now(self) -> float:
        """Return Unix seconds."""
        return self._tools.clock()

    @property
    def closing(self) -> bool:
        """Whether the run is ending early."""
        return self._tools.fleet.closed

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task that a drain waits for."""
        return self._tools.fleet.spawn(work)

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Send a follow-up call, in a batch or singly like the conversation."""
        if conversation in self._single_calls:
            self._tools.fleet.submit(call, urgent=True)
        else:
            self.send(conversation, call)

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Write an outcome."""
        tools = self._tools
        location = tools.journal.write(outcome)
        tools.emit(outcome, location, conversation.row)
        advice = tools.guards.outcome(outcome)
        if advice is not None and not self.advice.done():
            self.advice.set_result(advice)
        tools.sharing.finished(conversation, outcome, location)
        self.ended = outcome, location
        copies = self._single_calls.pop(conversation, None)
        if copies is not None:
            self.copy_to(copies, outcome)
            self._singles_done.set()

    def copy_to(self, copies: list[BatchItem], outcome: Outcome) -> None:
        """Copy the answer to equal rows; after a passing failure they are sent themselves."""
        for item in copies:
            if outcome.error_kind in PASSING_KINDS:
                self.begin(item.row, item.answer)
                continue
            conversation = make_conversation(self.plan, item.row, item.answer, self)
            if conversation.open() is not None:
                copy = copy_outcome(conversation, outcome, self.now())
                self.finish(conversation, copy)
