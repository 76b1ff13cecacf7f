"""Stages that ask about each row by itself: map, and broadcast to every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from bagent.stages.base import FailurePolicy, PromptVariables, RowRequester, RowStage, prompt_row
from bagent.stages.row import StageRow, derive_key, stage_item
from bagent.stages.slots import Slot
from bagent.types import Outcome, Row


class MapStage(RowStage):
    """Row in, row out; with several answers, as many rows out.

    A row keeps its key and id. Where there are several answers, each row that goes on has a key
    of its own and ``#ANSWER`` behind its id.
    """

    def __init__(
        self, asker: RowRequester, entrance: FailurePolicy, names: PromptVariables
    ) -> None:
        super().__init__(asker.plan.name, entrance)
        self._asker = asker
        self._names = names

    def _all_taken(self) -> None:
        self._asker.close()
        super()._all_taken()

    def _take(self, item: StageRow, ticket: Slot) -> None:
        count = self._asker.plan.answers
        tickets = [ticket] if count == 1 else ticket.split(count)
        for answer, place in enumerate(tickets):
            make = partial(self._row, item)
            unit = item.row.key, answer
            self._asker.ask(unit, (item,), make, partial(self._done, item, place))

    def _row(self, item: StageRow) -> Row:
        return prompt_row(item.row, item, self._names.of(item))

    def _done(self, item: StageRow, ticket: Slot, outcome: Outcome, place: int) -> None:
        row = item.row
        if self._asker.plan.answers > 1:
            row = msgspec.structs.replace(
                row,
                key=derive_key((row.key,), self.name, outcome.answer),
                id=f"{row.id}#{outcome.answer}",
            )
        ticket.fill(stage_item(item, row, outcome, place))

    async def run(self) -> None:
        """Ask until all rows have ended."""
        await self._asker.run()


class BroadcastStage(RowStage):
    """Every row to every endpoint: as many rows out as there are endpoints.

    Args:
        endpoints: names the endpoints, once rows come.
    """

    def __init__(
        self,
        asker: RowRequester,
        entrance: FailurePolicy,
        names: PromptVariables,
        endpoints: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__(asker.plan.name, entrance)
        self._asker = asker
        self._names = names
        self._endpoints = endpoints

    def _all_taken(self) -> None:
        self._asker.close()
        super()._all_taken()

    def _take(self, item: StageRow, ticket: Slot) -> None:
        endpoints = self._endpoints()
        for endpoint, place in zip(endpoints, ticket.split(len(endpoints)), strict=True):
            row = msgspec.structs.replace(
                item.row,
                key=derive_key((item.row.key,), self.name, endpoint),
                id=f"{item.row.id}@{endpoint}",
                endpoint=endpoint,
            )
            make = partial(self._row, item, row)
            done = partial(self._done, item, row, place)
            self._asker.ask((row.key, 0), (item,), make, done)

    def _row(self, item: StageRow, row: Row) -> Row:
        return prompt_row(row, item, self._names.of(item))

    def _done(self, item: StageRow, row: Row, ticket: Slot, outcome: Outcome, place: int) -> None:
        ticket.fill(stage_item(item, msgspec.structs.replace(row, endpoint=None), outcome, place))

    async def run(self) -> None:
        """Ask until all rows have ended."""
        await self._asker.run()
