"""Drives the rows of one asking stage through the fleet and writes what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from typing import Protocol

from bagent.agents.conversation import Conversation
from bagent.agents.conversation_factory import make_conversation
from bagent.agents.plan import StagePlan
from bagent.clocks import unix
from bagent.fleet.call import Call
from bagent.fleet.fleet import Fleet
from bagent.stages.dedupe import RequestDedupe, copy_outcome
from bagent.stages.feeder import Work
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import PASSING_KINDS, Outcome, Row

MOST_FOLLOWERS = 10_000
"""Rows that may wait for equal requests in flight: it bounds memory."""

BEGUN_AT_ONCE = 32
"""Rows begun in one turn of the event loop, so that answers do not wait for a whole batch."""

LONGEST_TURN_SECONDS = 0.1

OPEN_PER_SLOT = 8
"""Agents that may be open for each row that the fleet may have in flight: those that wait for a
tool hold no slot, and this bounds what they take of memory."""


NOT_WRITTEN = -1

Replace = Callable[[Outcome, Row], bool]
"""Whether other rows take the place of a row that ended."""


class OutcomeLog(Protocol):
    """Where finished rows go first: :class:`bagent.store.journal.journal.Journal`."""

    def write(self, outcome: Outcome) -> int:
        """Write one outcome; returns its location. Raises WriteError."""
        ...


class RowRunner:
    """Makes conversations of rows, sends their calls, writes their outcomes.

    Args:
        emit: gets each outcome, its place in the journal, and its row, once it is written.
        gate: awaited before each batch of rows; backpressure of whoever takes the outcomes.
        replace: called with each outcome before it is written; returns whether other rows take its
            place. Such an outcome is neither written nor counted.
        alone: whether it has the fleet for itself; else who shares it says whether rows come.

    ``advice`` gets the reason to stop, once the guards have one.
    """

    def __init__(
        self,
        plan: StagePlan,
        fleet: Fleet,
        journal: OutcomeLog,
        *,
        sharing: RequestDedupe,
        guards: StopRules,
        emit: Callable[[Outcome, int, Row], None],
        gate: Callable[[], Awaitable[None]] | None = None,
        replace: Replace | None = None,
        alone: bool = True,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._journal = journal
        self._sharing = sharing
        self._guards = guards
        self._emit = emit
        self._gate = gate
        self._replace = replace
        self._alone = alone
        self._bounded = plan.agent is not None or plan.program is not None
        self._begun = 0
        self._ended = 0
        self._over = asyncio.Event()
        self._no_followers = asyncio.Event()
        self._one_over = asyncio.Event()
        self.advice: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    async def run(self, source: AsyncIterable[Work]) -> None:
        """Feed all rows and wait until each has ended; cancel it to stop feeding."""
        if self._alone:
            self._fleet.expect(True)
        clock = asyncio.get_running_loop().time
        turn_began = clock()
        async for batch in source:
            if self._gate is not None:
                await self._gate()
            for row, answers in batch:
                for answer in answers:
                    if not self._fleet.has_room:
                        await self._fleet.wait_for_room()
                    while self._sharing.waiting > MOST_FOLLOWERS:
                        self._no_followers.clear()
                        await self._no_followers.wait()
                    while self._bounded and self._full():
                        self._one_over.clear()
                        await self._one_over.wait()
                    self._begun += 1
                    self._begin(row, answer)
                    # Signals and answers wait meanwhile, and templates may take their time.
                    if (
                        self._begun % BEGUN_AT_ONCE == 0
                        or clock() - turn_began > LONGEST_TURN_SECONDS
                    ):
                        await asyncio.sleep(0)
                        turn_began = clock()
        if self._alone:
            self._fleet.expect(False)
            await self._fleet.wait_idle()
        while self._ended < self._begun:
            self._over.clear()
            await self._over.wait()

    def _full(self) -> bool:
        """Whether as many agents are open as may be."""
        program = self._plan.program
        open_now = self._begun - self._ended - self._sharing.waiting
        if program is not None:
            return open_now >= program.most
        return open_now >= OPEN_PER_SLOT * max(1, self._fleet.limit)

    def _begin(self, row: Row, answer: int) -> None:
        conversation = make_conversation(self._plan, row, answer, self)
        if self._plan.row_seconds is not None:
            now = asyncio.get_running_loop().time()
            conversation.give_up_at = now + self._plan.row_seconds
        call = conversation.open()
        if call is None:
            return
        found = self._sharing.answer_for(conversation)
        if found is not None:
            self.finish(conversation, copy_outcome(conversation, found, self.now(), found.key))
        elif not self._sharing.follow(conversation):
            self._guards.begin(conversation, call.request)
            self._fleet.submit(call, urgent=call.turn > 1)

    # --- what conversations ask for -------------------------------------------------------------

    def now(self) -> float:
        """Unix seconds."""
        return unix()

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Send a further call; it goes before new rows."""
        self._fleet.submit(call, urgent=True)

    @property
    def closing(self) -> bool:
        """Whether the run is ending early."""
        return self._fleet.closed

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task beside the fleet's own; a drain waits for it, or cancels it."""
        return self._fleet.spawn(work)

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Write the outcome, then finish the conversations that wait for it."""
        self._ended += 1
        if self._replace is not None and self._replace(outcome, conversation.row):
            location = NOT_WRITTEN
            self._guards.discard(conversation)
        else:
            location = self._journal.write(outcome)
            self._emit(outcome, location, conversation.row)
            advice = self._guards.outcome(outcome, conversation)
            if advice is not None and not self.advice.done():
                self.advice.set_result(advice)
        followers = self._sharing.finished(conversation, outcome, location)
        for follower in followers:
            if outcome.error_kind in PASSING_KINDS:
                self._begin(follower.row, follower.answer)
            else:
                copy = copy_outcome(follower, outcome, self.now(), outcome.key)
                self.finish(follower, copy)
        if followers and self._sharing.waiting <= MOST_FOLLOWERS:
            self._no_followers.set()
        if self._bounded:
            self._one_over.set()
        if self._ended == self._begun:
            self._over.set()
