"""The runner of one stage's rows: conversations, their calls, and their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Protocol

from bagent.agents.conversation import Conversation, converse
from bagent.agents.plan import StagePlan
from bagent.clocks import unix
from bagent.fleet.call import Call
from bagent.fleet.fleet import Fleet
from bagent.stages.dedupe import RequestDedupe, copy_outcome
from bagent.stages.feeder import Work, with_images
from bagent.stages.stop_rules import StopReason, StopRules
from bagent.types import PASSING_KINDS, Outcome, Row

MOST_FOLLOWERS = 10_000
"""Rows that may wait for equal requests in flight: it bounds memory."""

BEGUN_AT_ONCE = 32
"""Rows started in one turn of the event loop, so that answers do not wait for a full batch."""

LONGEST_TURN_SECONDS = 0.1

OPEN_PER_SLOT = 8
"""Agents that may be open for each row that the fleet may have in flight. Agents that wait for a
tool hold no slot of the fleet, but they take memory."""


NOT_WRITTEN = -1

IsReplaced = Callable[[Outcome, Row], bool]
"""Whether other rows take the place of a row that ended."""


class OutcomeLog(Protocol):
    """The log that finished rows go to first: :class:`bagent.store.journal.journal.Journal`."""

    def write(self, outcome: Outcome) -> int:
        """Write one outcome and return its location; raise WriteError."""
        ...

    def sync(self) -> None:
        """Sync what was written to disk; raise WriteError."""
        ...


class RowRunner:
    """Makes a conversation of each row, sends its calls and writes its outcome.

    Args:
        emit: gets each outcome, its place in the journal, and its row, once it is written.
        gate: awaited before each batch of rows: backpressure of the output.
        is_replaced: called with each outcome before it is written; returns whether other rows take
            its place. Such an outcome is neither written nor counted.
        alone: whether no other runner shares the fleet; else the caller announces rows to it.
    """

    def __init__(
        self,
        plan: StagePlan,
        fleet: Fleet,
        journal: OutcomeLog,
        *,
        dedupe: RequestDedupe,
        stop_rules: StopRules,
        emit: Callable[[Outcome, int, Row], None],
        gate: Callable[[], Awaitable[None]] | None = None,
        is_replaced: IsReplaced | None = None,
        alone: bool = True,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._journal = journal
        self._dedupe = dedupe
        self._stop_rules = stop_rules
        self._emit = emit
        self._gate = gate
        self._is_replaced = is_replaced
        self._alone = alone
        self._bounded = plan.agent is not None or plan.program is not None
        self._begun = 0
        self._ended = 0
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._turn_began = 0.0
        self._all_ended = asyncio.Event()
        self._no_followers = asyncio.Event()
        self._row_ended = asyncio.Event()
        self.stop_reason: asyncio.Future[StopReason] = loop.create_future()
        """Gets the reason to stop, once the stop rules have one."""

    async def run(self, source: AsyncIterable[Work]) -> None:
        """Send all rows and wait until each has ended; cancel it to stop sending."""
        if self._alone:
            self._fleet.expect(True)
        self._turn_began = self._clock()
        if self._plan.images is not None:
            source = with_images(source, self._plan.images)
        async for batch in source:
            if self._gate is not None:
                await self._gate()
            for row, answers in batch:
                for answer in answers:
                    if not self._may_begin():
                        await self._wait_for_room()
                    self._begun += 1
                    self._begin(row, answer)
                    if self._is_turn_over():
                        await self._yield_to_loop()
        if self._alone:
            self._fleet.expect(False)
            await self._fleet.wait_idle()
        while self._ended < self._begun:
            self._all_ended.clear()
            await self._all_ended.wait()

    def _may_begin(self) -> bool:
        """Return whether another row may begin now."""
        many_followers = self._dedupe.waiting > MOST_FOLLOWERS
        return self._fleet.has_room and not (many_followers or (self._bounded and self._full()))

    async def _wait_for_room(self) -> None:
        """Wait until another row may begin."""
        if not self._fleet.has_room:
            await self._fleet.wait_for_room()
        while self._dedupe.waiting > MOST_FOLLOWERS:
            self._no_followers.clear()
            await self._no_followers.wait()
        while self._bounded and self._full():
            self._row_ended.clear()
            await self._row_ended.wait()

    def _is_turn_over(self) -> bool:
        """Return whether enough rows began in this turn of the event loop."""
        if self._begun % BEGUN_AT_ONCE == 0:
            return True
        return self._clock() - self._turn_began > LONGEST_TURN_SECONDS

    async def _yield_to_loop(self) -> None:
        """Let signals and answers be handled, which wait while templates are rendered."""
        await asyncio.sleep(0)
        self._turn_began = self._clock()

    def _full(self) -> bool:
        """Return whether no further agent may be opened."""
        program = self._plan.program
        open_now = self._begun - self._ended - self._dedupe.waiting
        if program is not None:
            return open_now >= program.most
        return open_now >= OPEN_PER_SLOT * max(1, self._fleet.limit)

    def _begin(self, row: Row, answer: int) -> None:
        """Open a row's conversation and send its first call, unless an equal one answers it."""
        give_up_at = None
        if self._plan.row_seconds is not None:
            give_up_at = self._clock() + self._plan.row_seconds
        conversation = Conversation(self._plan, row, answer, give_up_at=give_up_at)
        step = conversation.open()
        if isinstance(step, Outcome):
            self._finish(conversation, step)
            return
        finished = self._dedupe.finished_answer(conversation)
        if finished is not None:
            self._finish(conversation, copy_outcome(conversation, finished, unix()))
        elif not self._dedupe.follow(conversation):
            self._stop_rules.begin(conversation, step.request)
            work = self._run_row(conversation, step)
            if self._bounded:
                self._fleet.spawn(work)
            else:
                self._fleet.run_row(work)

    async def _run_row(self, conversation: Conversation, call: Call) -> None:
        """Wait for a row's outcome, and write it."""
        outcome = await converse(conversation, call, self._fleet)
        if outcome is not None:  # else the run ends first, and a later start resumes the row
            self._finish(conversation, outcome)

    def _finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Write the outcome, then finish the conversations that wait for it."""
        self._ended += 1
        if outcome.finished_at is None:
            outcome.finished_at = round(unix(), 4)
        if self._is_replaced is not None and self._is_replaced(outcome, conversation.row):
            location = NOT_WRITTEN
            self._stop_rules.discard(conversation)
        else:
            location = self._journal.write(outcome)
            self._emit(outcome, location, conversation.row)
            stop_reason = self._stop_rules.outcome(outcome, conversation)
            if stop_reason is not None and not self.stop_reason.done():
                self.stop_reason.set_result(stop_reason)
        followers = self._dedupe.finished(conversation, outcome, location)
        for follower in followers:
            if outcome.error_kind in PASSING_KINDS:
                self._begin(follower.row, follower.answer)
            else:
                self._finish(follower, copy_outcome(follower, outcome, unix()))
        if followers and self._dedupe.waiting <= MOST_FOLLOWERS:
            self._no_followers.set()
        if self._bounded:
            self._row_ended.set()
        if self._ended == self._begun:
            self._all_ended.set()
