"""Groups of a reduction, pieces of a text, answers cut to their share, and what a tree holds."""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bagent.stages.base import FailurePolicy, PromptVariables, StageContext
from bagent.stages.expand import pieces
from bagent.stages.reduce import ReduceStage
from bagent.stages.reduction_tree import (
    GroupBuilder,
    Node,
    Reducer,
    ReduceRule,
    ReductionGroupRule,
    shortened,
)
from bagent.stages.results import StageResults
from bagent.stages.row import Response, StageRow, estimate, input_item
from bagent.stages.slots import OrderedReader, Slot
from bagent.types import Outcome, Row


def item(number: int, tokens: int = 1) -> StageRow:
    made = input_item(Row(number, number, f"r{number}", {}, "", 0))
    return msgspec.structs.replace(made, tokens=tokens)


def groups(rule: ReductionGroupRule, tokens: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    former = GroupBuilder(rule, lambda group: found.append([one.row.index for one in group]))
    for number, count in enumerate(tokens):
        former.add(item(number, count))
    rest = [one.row.index for one in former.take_group()]
    return [*found, rest] if rest else found


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_larger_than_the_room_and_each_full_one_has_two_rows(seed):
    random = Random(seed)
    tokens = [random.randrange(1, 3000) for _ in range(200)]
    rule = ReductionGroupRule(None, 1000)
    found = groups(rule, tokens)
    assert [number for group in found for number in group] == list(range(200))
    for group in found:
        assert sum(min(tokens[number], rule.longest) for number in group) <= 1000
    assert all(len(group) >= 2 for group in found[:-1])


@pytest.mark.parametrize("overlap", [0, 10, 39])
def test_pieces_cover_the_text_and_keep_their_size(overlap):
    random = Random(1)
    text = " ".join("w" * random.randrange(1, 30) + "." * (n % 7 == 0) for n in range(2000))
    found = pieces(text, 40, overlap)
    assert found[0].start == 0
    assert found[-1].end == len(text)
    for one, after in pairwise(found):
        assert one.start < after.start <= one.end
    assert all(estimate(text[p.start : p.end].encode()) <= 40 for p in found)
    assert len(found) < 20 * len(text) // 40


def test_a_text_without_blanks_is_cut_all_the_same():
    found = pieces("x" * 10_000, 100, 0)
    assert sum(p.end - p.start for p in found) == 10_000
    assert pieces("", 10, 0) == []


@pytest.mark.parametrize("field", ["text", "output", "error"])
def test_what_is_too_long_is_cut_and_says_by_how_much(field):
    status = "failed" if field == "error" else "ok"
    long = Response(id="r1", status=status, output=None, text=None, error=None)
    long[field] = {"a": "y" * 5000} if field == "output" else "y" * 5000
    short = shortened(long, 200)
    assert estimate(msgspec.json.encode(short.printed_fields())) <= 200
    assert "characters left out]" in str(short.printed_fields())
    assert shortened(long, None) is long


def test_a_thousand_known_tickets_do_not_nest():
    found: list[StageRow] = []
    reader = OrderedReader(found.append, lambda: None)
    gate = Slot()
    reader.take(gate)
    for number in range(1, 5000):
        ticket = Slot()
        ticket.fill(item(number))
        reader.take(ticket)
    gate.fill(item(0))
    assert [one.row.index for one in found] == list(range(5000))


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
