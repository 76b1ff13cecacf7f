"""Places for rows: order kept while everything ends out of order."""

from __future__ import annotations

from bagent.stages.row import StageRow, input_item
from bagent.stages.slots import OrderedReader, Slot
from bagent.types import Row


def item(number: int) -> StageRow:
    return input_item(Row(number, number, f"r{number}", {}, "", 0))


def numbers(items: list[StageRow]) -> list[int]:
    return [one.row.index for one in items]


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
    assert numbers(found) == list(range(5000))
