"""A budget is never passed, and money that turns out unspent is spent on further calls."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from bagent.backends.base import Exchange
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.money.budget import BudgetedBackend, BudgetLedger
from bagent.money.prices import Price
from bagent.types import Reply, Usage


def test_calls_begin_as_long_as_all_of_them_fit() -> None:
    begun: list[int] = []
    messages: list[str] = []
    spending = BudgetLedger(1.0, messages.append)
    for number in range(4):
        spending.reserve(0.3, lambda number=number: begun.append(number))  # type: ignore[misc]
    assert begun == [0, 1, 2]
    assert messages == []
    spending.settle(0.3, 0.1)
    assert begun == [0, 1, 2, 3]


def test_the_end_is_told_once_and_only_when_nothing_is_in_flight() -> None:
    messages: list[str] = []
    spending = BudgetLedger(1.0, messages.append)
    spending.reserve(0.6, lambda: None)
    spending.reserve(0.6, lambda: None)
    assert messages == []
    spending.settle(0.6, 0.6)
    spending.reserve(0.6, lambda: None)
    assert len(messages) == 1
    assert "$0.6000 of the budget of $1" in messages[0]


def test_a_first_call_that_could_pass_the_budget_is_never_sent() -> None:
    messages: list[str] = []
    begun: list[int] = []
    BudgetLedger(0.1, messages.append).reserve(0.2, lambda: begun.append(1))
    assert (len(messages), begun) == (1, [])


def test_who_no_longer_waits_lets_the_next_one_in() -> None:
    begun: list[str] = []

    def large() -> None:
        begun.append("large")

    spending = BudgetLedger(1.0, lambda _: None)
    spending.reserve(0.5, lambda: begun.append("first"))
    spending.reserve(0.9, large)
    spending.reserve(0.2, lambda: begun.append("small"))
    assert begun == ["first"]
    spending.cancel(large)
    assert begun == ["first", "small"]


def test_what_waits_for_the_budget_is_not_sent() -> None:
    spending = BudgetLedger(1.0, lambda _: None)

    def waiting() -> None:
        raise AssertionError("it does not fit")

    spending.reserve(0.6, lambda: None, 2)
    assert (spending.unsent, spending.waiting_rows) == (0, 0)
    spending.reserve(0.6, waiting, 3)
    assert (spending.unsent, spending.waiting_rows) == (1, 3)
    spending.cancel(waiting)
    assert (spending.unsent, spending.waiting_rows) == (1, 0), "it was never sent"


def test_whatever_calls_cost_the_budget_is_not_passed() -> None:
    random = Random(7)
    spending = BudgetLedger(5.0, lambda _: None)
    flying: list[float] = []
    for _ in range(2000):
        if flying and random.random() < 0.5:
            most = flying.pop(random.randrange(len(flying)))
            spending.settle(most, most * random.random())
        else:
            most = random.uniform(0.001, 0.2)
            spending.reserve(most, lambda most=most: flying.append(most))  # type: ignore[misc]
        assert spending.spent + sum(flying) <= 5.0 + 1e-9
    assert spending.spent > 4.0


class OneReply:
    """A backend that answers each call and counts what the ledger has reserved for it."""

    def __init__(self) -> None:
        self.reserved: list[float] = []
        self.ledger = BudgetLedger(1.0, pytest.fail)

    async def send(self, endpoint: Any, group: Any, timeouts: Any) -> Exchange:
        self.reserved.append(self.ledger.reserved)
        reply = Reply("ok", "stop", usage=Usage(prompt=1, completion=1))
        return Exchange([reply], 0.0, None, None, 1.0, 200)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_batch_line_with_a_limit_of_its_own_reserves_no_more(name: str) -> None:
    inner: Any = OneReply()
    backend = BudgetedBackend(inner, Price("p", "m", 0, 1_000_000 / 100), inner.ledger)
    body = {"model": "m", "messages": [], name: 60}
    settings = CallSettings(None, {}, {})
    line = Request(settings, encode_payload(body), body=body)
    endpoint: Any = None
    asyncio.run(backend.send(endpoint, [line], endpoint))
    assert inner.reserved == [pytest.approx(0.6)]
