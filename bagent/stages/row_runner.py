"""The runner of one stage's rows: conversations, their calls, and their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Protocol

from bagent.agents.conversation import Conversation, converse
from bagent.agents.plan import StagePlan
from bagent.clocks import unix
from bagent.fleet.call import Call, EndedCall
from bagent.fleet.fleet import Fleet
from bagent.stages.dedupe import EndedRow, RequestDedupe, copy_outcome
from bagent.stages.feeder import Work, with_images
from bagent.stages.results import Emit
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

    def write_all(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Write outcomes and return their locations; raise WriteError if none could be written.

        It returns fewer locations if only the first could be written, and the next call raises.
        """
        ...

    def sync(self) -> None:
        """Sync what was written to disk; raise WriteError."""
        ...


class RowRunner:
    """Makes a conversation of each row, sends its calls and writes its outcome.

    Args:
        emit: gets outcomes once they are written.
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
        emit: Emit,
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
        self._opened: list[Call] = []
        """The first calls of rows, to be sent together."""
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
        fleet = self._fleet
        if self._alone:
            fleet.expect(True)
        self._turn_began = self._clock()
        if self._plan.images is not None:
            source = with_images(source, self._plan.images)
        async for batch in source:
            if self._gate is not None:
                await self._gate()
            for row, answers in batch:
                for answer in answers:
                    if (
                        len(self._opened) >= fleet.room
                        or self._dedupe.waiting > MOST_FOLLOWERS
                        or (self._bounded and self._full())
                    ):
                        await self._wait_for_room()
                    self._begun += 1
                    self._begin(row, answer)
                    turn_seconds = self._clock() - self._turn_began
                    if self._begun % BEGUN_AT_ONCE == 0 or turn_seconds > LONGEST_TURN_SECONDS:
                        # Signals and answers wait while templates are rendered.
                        self._send()
                        await asyncio.sleep(0)
                        self._turn_began = self._clock()
            self._send()
        if self._alone:
            fleet.expect(False)
            await fleet.wait_idle()
        while self._ended < self._begun:
            self._all_ended.clear()
            await self._all_ended.wait()

    async def _wait_for_room(self) -> None:
        """Send what was opened, and wait until another row may begin."""
        self._send()
        if self._fleet.room <= 0:
            await self._fleet.wait_for_room()
        while self._dedupe.waiting > MOST_FOLLOWERS:
            self._no_followers.clear()
            await self._no_followers.wait()
        while self._bounded and self._full():
            self._row_ended.clear()
            await self._row_ended.wait()

    def _full(self) -> bool:
        """Return whether no further agent may be opened."""
        program = self._plan.program
        open_now = self._begun - self._ended - self._dedupe.waiting
        if program is not None:
            return open_now >= program.most
        return open_now >= OPEN_PER_SLOT * max(1, self._fleet.limit)

    def _begin(self, row: Row, answer: int) -> None:
        """Open a row's conversation for :meth:`_send`, unless an equal request answers it."""
        give_up_at = None
        if self._plan.row_seconds is not None:
            give_up_at = self._clock() + self._plan.row_seconds
        conversation = Conversation(self._plan, row, answer, give_up_at=give_up_at)
        step = conversation.open()
        if isinstance(step, Outcome):
            self._finish([(conversation, step)])
            return
        finished = self._dedupe.finished_answer(conversation)
        if finished is not None:
            self._finish([(conversation, copy_outcome(conversation, finished, unix()))])
        elif not self._dedupe.follow(conversation):
            if self._bounded:
                self._stop_rules.begin((step,))
                self._fleet.spawn(self._run_row(conversation, step))
            else:
                self._opened.append(step)

    def _send(self) -> None:
        """Send the first calls of the rows that were opened."""
        if self._opened:
            opened, self._opened = self._opened, []
            self._stop_rules.begin(opened)
            self._fleet.submit(opened, self._on_ended)

    async def _run_row(self, conversation: Conversation, call: Call) -> None:
        """Wait for the outcome of a row with tools or a program, and write it."""
        outcome = await converse(conversation, call, self._fleet)
        if outcome is not None:  # else the run ends first, and a later start resumes the row
            self._finish([(conversation, outcome)])
            if conversation.on_written is not None:
                conversation.on_written()

    def _on_ended(self, calls: Sequence[EndedCall]) -> None:
        """Write the outcomes of rows whose calls have ended, or ask again."""
        ended: list[EndedRow] = []
        again: list[Call] = []
        fault: Exception | None = None
        for call, end in calls:
            conversation = call.owner
            assert isinstance(conversation, Conversation)
            try:
                step = conversation.handle(call, end)
            except Exception as error:  # noqa: BLE001 - the other rows are written before it
                fault = error
                continue
            if isinstance(step, Outcome):
                ended.append((conversation, step))
            else:
                again.append(step)
        if ended:
            self._finish(ended)
        if fault is not None:
            raise fault
        self._send()
        if again:  # before new rows
            self._fleet.submit(again, self._on_ended, urgent=True)

    def _finish(self, ended: list[EndedRow]) -> None:
        """Write outcomes, then finish the conversations that wait for them."""
        self._ended += len(ended)
        replaced: list[EndedRow] = []
        if self._is_replaced is not None:
            ended, replaced = self._without_replaced(ended, self._is_replaced)
        locations = (self._write(ended) if ended else []) + [NOT_WRITTEN] * len(replaced)
        copies: list[EndedRow] = []
        was_waiting = self._dedupe.waiting
        for follower, outcome in self._dedupe.finished(ended + replaced, locations):
            if outcome.error_kind in PASSING_KINDS:
                self._begin(follower.row, follower.answer)
            else:
                copies.append((follower, copy_outcome(follower, outcome, unix())))
        if copies:
            self._finish(copies)
        if self._dedupe.waiting <= MOST_FOLLOWERS < was_waiting:
            self._no_followers.set()
        if self._bounded:
            self._row_ended.set()
        if self._ended == self._begun:
            self._all_ended.set()

    def _without_replaced(
        self, ended: list[EndedRow], is_replaced: IsReplaced
    ) -> tuple[list[EndedRow], list[EndedRow]]:
        """Return the rows whose outcomes are written, and those that other rows replace."""
        written: list[EndedRow] = []
        replaced: list[EndedRow] = []
        for conversation, outcome in ended:
            if is_replaced(outcome, conversation.row):
                self._stop_rules.discard(conversation)
                replaced.append((conversation, outcome))
            else:
                written.append((conversation, outcome))
        return written, replaced

    def _write(self, ended: list[EndedRow]) -> list[int]:
        """Write, pass on and count outcomes; return their locations."""
        outcomes = [outcome for _, outcome in ended]
        for outcome in outcomes:
            if outcome.finished_at is None:
                outcome.finished_at = round(unix(), 4)
        locations = self._journal.write_all(outcomes)
        written = ended[: len(locations)]
        rows = [conversation.row for conversation, _ in written]
        self._emit(list(zip(outcomes, locations, rows, strict=False)))
        stop_reason = self._stop_rules.ended(written)
        if stop_reason is not None and not self.stop_reason.done():
            self.stop_reason.set_result(stop_reason)
        if len(written) < len(ended):
            self._journal.write_all(outcomes[len(written) :])  # raises the error of the disk
        return locations
