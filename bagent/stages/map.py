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
    """Makes one row of each row; with several answers, one for each.

    A row keeps its key and id. With several answers each row that is made has a key of its own and
    ``#ANSWER`` behind its id.
    """

    def __init__(
        self, requester: RowRequester, policy: FailurePolicy, variables: PromptVariables
    ) -> None:
        super().__init__(requester.plan.name, policy)
        self._requester = requester
        self._variables = variables

    def _on_input_end(self) -> None:
        self._requester.close()
        super()._on_input_end()

    def _process(self, item: StageRow, slot: Slot) -> None:
        count = self._requester.plan.answers
        slots = [slot] if count == 1 else slot.split(count)
        for answer, answer_slot in enumerate(slots):
            make = partial(self._prompt_row, item, item.row)
            unit = item.row.key, answer
            self._requester.ask(unit, (item,), make, partial(self._done, item, answer_slot))

    def _prompt_row(self, item: StageRow, row: Row) -> Row:
        return prompt_row(row, item, self._variables.of(item))

    def _done(self, item: StageRow, slot: Slot, outcome: Outcome, location: int) -> None:
        row = item.row
        if self._requester.plan.answers > 1:
            row = msgspec.structs.replace(
                row,
                key=derive_key((row.key,), self.name, outcome.answer),
                id=f"{row.id}#{outcome.answer}",
            )
        slot.fill(stage_item(item, row, outcome, location))

    async def run(self) -> None:
        """Ask until all rows have ended."""
        await self._requester.run()


class BroadcastStage(MapStage):
    """Makes one row of each row and endpoint.

    Args:
        requester: asks about rows.
        policy: decides about failed rows.
        variables: the variables of the prompt.
        endpoints: returns the names of the endpoints, once rows come.
    """

    def __init__(
        self,
        requester: RowRequester,
        policy: FailurePolicy,
        variables: PromptVariables,
        endpoints: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__(requester, policy, variables)
        self._endpoints = endpoints

    def _process(self, item: StageRow, slot: Slot) -> None:
        endpoints = self._endpoints()
        for endpoint, endpoint_slot in zip(endpoints, slot.split(len(endpoints)), strict=True):
            row = msgspec.structs.replace(
                item.row,
                key=derive_key((item.row.key,), self.name, endpoint),
                id=f"{item.row.id}@{endpoint}",
                endpoint=endpoint,
            )
            make = partial(self._prompt_row, item, row)
            done = partial(self._done_at, item, row, endpoint_slot)
            self._requester.ask((row.key, 0), (item,), make, done)

    def _done_at(
        self, item: StageRow, row: Row, slot: Slot, outcome: Outcome, location: int
    ) -> None:
        slot.fill(stage_item(item, msgspec.structs.replace(row, endpoint=None), outcome, location))
