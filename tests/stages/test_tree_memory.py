"""What a tree of reductions holds while it goes on: its pending rows, not those it is done with."""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

from bagent.stages.base import FailurePolicy, PromptVariables, StageContext
from bagent.stages.reduce import ReduceStage
from bagent.stages.reduction_tree import Node, Reducer, ReduceRule
from bagent.stages.results import StageResults
from bagent.stages.row import StageRow
from bagent.stages.slots import Slot
from bagent.types import Outcome, Row

OPEN = 16
"""Leaves that are in flight at a time; they end in any order."""


def outcome(stage: str, row: int, name: str) -> Outcome:
    """Return a good outcome of a stage."""
    return Outcome(
        key=f"{row:016x}",
        row=row,
        id=name,
        source="",
        line=0,
        stage=stage,
        status="ok",
        text="said",
    )


class Written:
    """A journal that keeps only how many outcomes it was given."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, _: Outcome) -> int:
        self.count += 1
        return self.count

    def read_at(self, _: int) -> Outcome:
        return outcome("leaf", 0, "x")


class Endpoint:
    """Answers each group some time after it was asked about."""

    def __init__(self, records: StageResults) -> None:
        budget = SimpleNamespace(context=None)
        settings = SimpleNamespace(max_tokens=None)
        self.plan: Any = SimpleNamespace(name="sum", budget=budget, settings=settings)
        self.records = records
        self.waiting: deque[Any] = deque()

    def ask(self, _unit: Any, _made_of: Any, make: Any, then: Any, _divide: Any) -> None:
        self.waiting.append((make, then))

    def close(self) -> None:
        """Nothing more is asked."""

    def answer(self) -> None:
        make, then = self.waiting.popleft()
        row = make()
        said = outcome("sum", row.index, row.id)
        then(said, self.records.journal.write(said))


def held(leaves: int) -> Counter[str]:
    """How many objects of a tree are alive once all but the leaves in flight have ended."""
    records = StageResults(Written(), None, lambda *_: None)
    world = StageContext(records, lambda _: None, print, lambda: 0.0)
    endpoint: Any = Endpoint(records)
    entrance, names = FailurePolicy("sum", "include", world), PromptVariables(frozenset(), records)
    reducer = Reducer(endpoint, ReduceRule(10, 1), entrance, names, world)
    [reader] = ReduceStage(endpoint, reducer, (), 1).readers()
    rnd, in_flight = random.Random(1), []
    for number in range(leaves):
        ticket = Slot()
        reader.take(ticket)
        in_flight.append((ticket, Row(number, number * 7919, f"s{number}", {}, "f", number + 1)))
        if len(in_flight) > OPEN:
            ticket, row = in_flight.pop(rnd.randrange(OPEN // 2))
            ticket.fill(StageRow(row, row, "leaf", 0, True, row.index, {"leaf": row.index}))
        while len(endpoint.waiting) > 4:
            endpoint.answer()
    gc.collect()
    kinds = {StageRow, Slot, Node}
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def test_finished_groups_leave_memory():
    few, many = held(150), held(1500)
    assert few["Slot"] > OPEN
    # Ten times the leaves are one level more, of which a group may be open.
    for kind, count in many.items():
        assert count <= few[kind] + 4 * OPEN, kind
