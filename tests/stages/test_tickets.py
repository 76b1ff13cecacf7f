"""Places for rows: order kept while everything ends out of order."""

from __future__ import annotations

from random import Random

import pytest

from bagent.stages.row import Item, input_item
from bagent.stages.slots import InOrder, Ticket
from bagent.types import Row


def item(number: int) -> Item:
    return input_item(Row(number, number, f"r{number}", {}, "", 0))


def numbers(items: list[Item]) -> list[int]:
    return [one.row.index for one in items]


@pytest.mark.parametrize("seed", range(5))
def test_items_come_in_the_order_of_their_tickets_whatever_ends_first(seed):
    found: list[Item] = []
    ends: list[bool] = []
    reader = InOrder(found.append, lambda: ends.append(True))
    tickets = [Ticket() for _ in range(30)]
    for ticket in tickets:
        reader.take(ticket)
    reader.end()
    order = list(range(30))
    Random(seed).shuffle(order)
    for number in order:
        assert not ends
        tickets[number].fill(item(number))
    assert numbers(found) == list(range(30))
    assert ends == [True]


def test_split_tickets_keep_their_place_and_empty_ones_leave_none():
    found: list[Item] = []
    ends: list[bool] = []
    reader = InOrder(found.append, lambda: ends.append(True))
    first, second, third = Ticket(), Ticket(), Ticket()
    for ticket in (first, second, third):
        reader.take(ticket)
    third.fill(item(9))
    one, two = first.split(2)
    two.fill(item(2))
    inner = one.split(1)
    second.split(0)
    reader.end()
    assert not found
    inner[0].fill(item(1))
    assert numbers(found) == [1, 2, 9]
    assert ends == [True]


def test_a_thousand_known_tickets_do_not_nest():
    found: list[Item] = []
    reader = InOrder(found.append, lambda: None)
    gate = Ticket()
    reader.take(gate)
    for number in range(1, 5000):
        ticket = Ticket()
        ticket.fill(item(number))
        reader.take(ticket)
    gate.fill(item(0))
    assert numbers(found) == list(range(5000))
