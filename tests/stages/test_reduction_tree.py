"""Groups of a reduction, pieces of a text, and answers cut to their share."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from bagent.stages.expand import pieces
from bagent.stages.reduction_tree import GroupBuilder, ReductionGroupRule, shortened
from bagent.stages.row import Response, StageRow, estimate, input_item
from bagent.stages.slots import OrderedReader, Slot
from bagent.types import Row


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
