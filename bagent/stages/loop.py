"""The loop stage: sections write to a shared board, round by round, until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import msgspec

from bagent.job.templates.environment import JsonLines
from bagent.job.templates.template import Expression, TemplateFailure
from bagent.stages.base import (
    NO_SURVIVOR,
    FailurePolicy,
    PromptVariables,
    RowRequester,
    RowStage,
    StageContext,
    make_outcome,
    prompt_row,
)
from bagent.stages.feeder import MOST_WAITING, Backpressure
from bagent.stages.reduction_tree import ContextFit, shortened
from bagent.stages.row import (
    Response,
    StageRow,
    derive_key,
    is_good,
    reference,
    response_of,
    stage_item,
    value_of,
)
from bagent.stages.slots import Slot
from bagent.types import Json, Outcome, Row

MOST_BOARDS = 1024
"""Boards in progress before reading of the input pauses."""


def section_stage(stage: str, section: str) -> str:
    """Return the stage name of a section's outcomes in the results."""
    return f"{stage}.{section}"


class Board(JsonLines):
    """The newest answers of all sections; ``board.NAME`` is one, printed they are JSON lines."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, Json] = {}

    def __getattr__(self, name: str) -> Json:
        values: dict[str, Json] = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(name)
        return values[name]

    def write(self, section: str, number: int, response: Response, value: Json) -> None:
        """Replace a section's last answer by its newest one; a failure replaces no good answer."""
        entry = {"section": section, "round": number, **response.printed_fields()}
        del entry["id"]
        if response.is_good:
            del entry["status"]
            self._values[section] = value
        elif section in self._values:
            return
        others = [other for other in self if other["section"] != section]
        self[:] = [*others, entry]


class BoardWriter(msgspec.Struct, frozen=True, eq=False):
    """One section: its requester and the variables of its prompt."""

    name: str
    requester: RowRequester
    variables: PromptVariables


class LoopRule(msgspec.Struct, frozen=True):
    """When a loop ends, and whether its sections write in parallel or one after another."""

    rounds: int
    until: Expression | None
    parallel: bool


class _State(msgspec.Struct, eq=False):
    """One board in progress."""

    item: StageRow
    board: Board
    number: int = 0
    last: dict[str, tuple[Outcome, int]] = {}
    refs: tuple[str, ...] = ()


class LoopStage(RowStage):
    """Runs a board for each row.

    Each answer of a section is an outcome of the stage ``LOOP.SECTION``, the last board is the
    loop's own outcome. A board holds one answer of each section, cut to its share of the context.
    """

    def __init__(
        self,
        name: str,
        writers: Sequence[BoardWriter],
        rule: LoopRule,
        policy: FailurePolicy,
        context: StageContext,
        backpressure: Backpressure,
    ) -> None:
        super().__init__(name, policy)
        self._writers = writers
        self._rule = rule
        self._context = context
        self._backpressure = backpressure
        usable = [
            tokens for w in writers if (tokens := ContextFit(w.requester.plan).usable) is not None
        ]
        self._longest = min(usable) // 2 // len(writers) if usable else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ended = False
        backpressure.watch(self)

    def __len__(self) -> int:
        """Return the boards in progress beyond their limit, on the scale of a stage's queue."""
        return max(0, len(self._tasks) - MOST_BOARDS + MOST_WAITING)

    def _on_input_end(self) -> None:
        self._ended = True
        self._changed.set()
        super()._on_input_end()

    def _process(self, item: StageRow, slot: Slot) -> None:
        if self._was_finished(self._context, item, slot):
            # What its writers answered is not asked for again, but still counts.
            for number, writer in product(range(1, self._rule.rounds + 1), self._writers):
                key = self._section_key(item, number, writer)
                self._context.results.keep(key, writer.requester.plan.name)
            return
        task = asyncio.ensure_future(self._work(item, slot))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._changed.set())

    async def run(self) -> None:
        """Work until all boards are finished."""
        works = [writer.requester.run() for writer in self._writers]
        tasks = [asyncio.ensure_future(work) for work in (*works, self._boards())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()

    async def _boards(self) -> None:
        while self._tasks or not self._ended:
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()
            self._backpressure.notify()
            if self._tasks or not self._ended:
                self._changed.clear()
                await self._changed.wait()
        for writer in self._writers:
            writer.requester.close()

    # --- one board --------------------------------------------------------------------------------

    async def _work(self, item: StageRow, slot: Slot) -> None:
        state = _State(item, Board(), last={})
        error: tuple[str, str] | None = None
        for number in range(1, self._rule.rounds + 1):
            state.number = number
            written = await self._round(state)
            if not any(map(is_good, written)):
                message = written[0].error or written[0].status
                error = (NO_SURVIVOR, f"round {number}: no section came out ok; {message}")
                break
            try:
                if self._is_complete(state):
                    break
            except TemplateFailure as failure:
                error = ("template", str(failure))
                break
        values = {w.name: getattr(state.board, w.name, None) for w in self._writers}
        row = msgspec.structs.replace(prompt_row(item.row, item), parents=state.refs)
        outcome = make_outcome(self.name, row, self._context.now(), output=values, error=error)
        location = self._context.results.write(outcome, row)
        slot.fill(stage_item(item, item.row, outcome, location))

    async def _round(self, state: _State) -> list[Outcome]:
        """Have every section write once."""
        if self._rule.parallel:
            parents = state.refs
            answers = await asyncio.gather(*(self._write(state, w, parents) for w in self._writers))
            for writer, answer in zip(self._writers, answers, strict=True):
                self._write_answer(state, writer, answer)
        else:
            answers = []
            for writer in self._writers:
                answer = await self._write(state, writer, state.refs)
                self._write_answer(state, writer, answer)
                answers.append(answer)
        return [outcome for outcome, _ in answers]

    async def _write(
        self, state: _State, writer: BoardWriter, refs: tuple[str, ...]
    ) -> tuple[Outcome, int]:
        item, number = state.item, state.number
        row = msgspec.structs.replace(
            prompt_row(item.row, item),
            key=self._section_key(item, number, writer),
            id=f"{item.row.id}/{number}.{writer.name}",
            parents=(*item.parents, *refs),
        )
        future: asyncio.Future[tuple[Outcome, int]] = asyncio.get_running_loop().create_future()

        def then(outcome: Outcome, location: int) -> None:
            if not future.done():
                future.set_result((outcome, location))

        make = partial(self._row, state, writer, row)
        writer.requester.ask((row.key, 0), (item,), make, then)
        return await future

    def _section_key(self, item: StageRow, number: int, writer: BoardWriter) -> int:
        return derive_key((item.row.key,), self.name, number, writer.name)

    def _row(self, state: _State, writer: BoardWriter, row: Row) -> Row:
        return msgspec.structs.replace(row, extra=self._scope(state, writer))

    def _scope(self, state: _State, writer: BoardWriter) -> dict[str, Json]:
        extra: dict[str, Json] = dict(writer.variables.of(state.item))
        for other in self._writers:
            value = getattr(state.board, other.name, None)
            if value is not None:
                extra[other.name] = value
        extra.update(board=state.board, round=state.number, section=writer.name)
        return extra

    def _write_answer(
        self, state: _State, writer: BoardWriter, answer: tuple[Outcome, int]
    ) -> None:
        outcome = answer[0]
        response = shortened(response_of(outcome), self._longest)
        cut = response["output"] is None and response["text"] != outcome.text
        value = response["text"] if cut else value_of(outcome)
        state.board.write(writer.name, state.number, response, value)
        state.last[writer.name] = answer
        state.refs = tuple(reference(last.stage, last.id, 0) for last, _ in state.last.values())

    def _is_complete(self, state: _State) -> bool:
        """Return whether the condition holds.

        It can name sections, stages, properties of the sections' answers, and fields. A property
        that several sections have has the first true value.
        """
        until = self._rule.until
        if until is None:
            return False
        properties: dict[str, Any] = {}
        for writer in self._writers:
            value = getattr(state.board, writer.name, None)
            if isinstance(value, dict):
                for name, property_value in value.items():
                    properties[name] = properties.get(name) or property_value
        scope = {**state.item.row.data, **properties}
        for writer in self._writers:
            scope.update(self._scope(state, writer))
        return until.holds(scope)
