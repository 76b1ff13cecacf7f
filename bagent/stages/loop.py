"""The loop stage: sections of a shared board write to it, round by round, until it is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
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
    reference,
    response_of,
    stage_item,
    value_of,
)
from bagent.stages.slots import Slot
from bagent.types import Json, Outcome, Row

MOST_BOARDS = 1024
"""Boards at work at once before no more of the input is read."""


def section_stage(stage: str, section: str) -> str:
    """The stage name under which what a section writes is found in the results."""
    return f"{stage}.{section}"


class Board(JsonLines):
    """What the sections wrote last: printed, one JSON line each; ``board.NAME`` is one's answer."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, Json] = {}

    def __getattr__(self, name: str) -> Json:
        values: dict[str, Json] = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(name)
        return values[name]

    def write(self, section: str, number: int, response: Response, value: Json) -> None:
        """Put a section's newest answer in the place of its last one."""
        entry = {"section": section, "round": number, **response.shown()}
        del entry["id"]
        if response["status"] == "ok":
            del entry["status"]
            self._values[section] = value
        elif section in self._values:
            return  # what it wrote before still stands
        kept = [one for one in self if one["section"] != section]
        self[:] = [*kept, entry]


class BoardWriter(msgspec.Struct, frozen=True, eq=False):
    """One section and who is asked for it."""

    name: str
    asker: RowRequester
    names: PromptVariables


class LoopRule(msgspec.Struct, frozen=True):
    """When a loop ends, and whether its sections write at once or one after another."""

    rounds: int
    until: Expression | None
    parallel: bool


class _State(msgspec.Struct, eq=False):
    """One board on its way."""

    item: StageRow
    board: Board
    number: int = 0
    last: dict[str, tuple[Outcome, int]] = {}
    refs: tuple[str, ...] = ()


class LoopStage(RowStage):
    """Runs a board for each row. What a section writes in a round is an outcome of the stage
    ``LOOP.SECTION``, the last board is one of the loop's own.

    What a section wrote stands until it writes again, so a board is never longer than what its
    sections may write at once; each is cut to its share of the context.
    """

    def __init__(
        self,
        name: str,
        writers: Sequence[BoardWriter],
        rule: LoopRule,
        entrance: FailurePolicy,
        world: StageContext,
        gate: Backpressure,
    ) -> None:
        super().__init__(name, entrance)
        self._writers = writers
        self._rule = rule
        self._world = world
        self._gate = gate
        usable = [u for w in writers if (u := ContextFit(w.asker.plan).usable) is not None]
        self._longest = min(usable) // 2 // len(writers) if usable else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ended = False
        gate.watch(self)

    def __len__(self) -> int:
        """Boards beyond the number that may be at work, as an inbox counts."""
        return max(0, len(self._tasks) - MOST_BOARDS + MOST_WAITING)

    def _all_taken(self) -> None:
        self._ended = True
        self._changed.set()
        super()._all_taken()

    def _take(self, item: StageRow, ticket: Slot) -> None:
        if self._was_finished(self._world, item, ticket):
            return
        task = asyncio.ensure_future(self._work(item, ticket))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._changed.set())

    async def run(self) -> None:
        """Work until all boards are done."""
        works = [writer.asker.run() for writer in self._writers]
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
            self._gate.look()
            if self._tasks or not self._ended:
                self._changed.clear()
                await self._changed.wait()
        for writer in self._writers:
            writer.asker.close()

    # --- one board --------------------------------------------------------------------------------

    async def _work(self, item: StageRow, ticket: Slot) -> None:
        state = _State(item, Board(), last={})
        error: tuple[str, str] | None = None
        for number in range(1, self._rule.rounds + 1):
            state.number = number
            written = await self._round(state)
            if not any(outcome.status == "ok" for outcome in written):
                words = written[0].error or written[0].status
                error = (NO_SURVIVOR, f"round {number}: no section came out ok; {words}")
                break
            try:
                if self._enough(state):
                    break
            except TemplateFailure as failure:
                error = ("template", str(failure))
                break
        values = {w.name: getattr(state.board, w.name, None) for w in self._writers}
        row = msgspec.structs.replace(prompt_row(item.row, item), parents=state.refs)
        outcome = make_outcome(self.name, row, self._world.now(), output=values, error=error)
        place = self._world.records.write(outcome, row)
        ticket.fill(stage_item(item, item.row, outcome, place))

    async def _round(self, state: _State) -> list[Outcome]:
        """Let every section write once."""
        if self._rule.parallel:
            before = state.refs
            found = await asyncio.gather(*(self._write(state, w, before) for w in self._writers))
            for writer, one in zip(self._writers, found, strict=True):
                self._put(state, writer, one)
        else:
            found = []
            for writer in self._writers:
                one = await self._write(state, writer, state.refs)
                self._put(state, writer, one)
                found.append(one)
        return [outcome for outcome, _ in found]

    async def _write(
        self, state: _State, writer: BoardWriter, refs: tuple[str, ...]
    ) -> tuple[Outcome, int]:
        item, number = state.item, state.number
        row = msgspec.structs.replace(
            prompt_row(item.row, item),
            key=derive_key((item.row.key,), self.name, number, writer.name),
            id=f"{item.row.id}/{number}.{writer.name}",
            parents=(*item.parents, *refs),
        )
        future: asyncio.Future[tuple[Outcome, int]] = asyncio.get_running_loop().create_future()

        def then(outcome: Outcome, place: int) -> None:
            if not future.done():
                future.set_result((outcome, place))

        make = partial(self._row, state, writer, row)
        writer.asker.ask((row.key, 0), (item,), make, then)
        return await future

    def _row(self, state: _State, writer: BoardWriter, row: Row) -> Row:
        return msgspec.structs.replace(row, extra=self._scope(state, writer))

    def _scope(self, state: _State, writer: BoardWriter) -> dict[str, Json]:
        extra: dict[str, Json] = dict(writer.names.of(state.item))
        for other in self._writers:
            value = getattr(state.board, other.name, None)
            if value is not None:
                extra[other.name] = value
        extra.update(board=state.board, round=state.number, section=writer.name)
        return extra

    def _put(self, state: _State, writer: BoardWriter, found: tuple[Outcome, int]) -> None:
        outcome = found[0]
        response = shortened(response_of(outcome), self._longest)
        cut = response["output"] is None and response["text"] != outcome.text
        value = response["text"] if cut else value_of(outcome)
        state.board.write(writer.name, state.number, response, value)
        state.last[writer.name] = found
        state.refs = tuple(reference(self.name, one.id, 0) for one, _ in state.last.values())

    def _enough(self, state: _State) -> bool:
        """Whether the condition holds: over sections and stages, properties of answers, fields.

        A property that several sections have holds as soon as it does in one of them.
        """
        until = self._rule.until
        if until is None:
            return False
        said: dict[str, Any] = {}
        for writer in self._writers:
            value = getattr(state.board, writer.name, None)
            if isinstance(value, dict):
                for name, one in value.items():
                    said[name] = said.get(name) or one
        scope = {**state.item.row.data, **said}
        for writer in self._writers:
            scope.update(self._scope(state, writer))
        return until.holds(scope)
