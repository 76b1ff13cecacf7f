"""A budget is never passed, and money that turns out unspent is spent on further calls."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from bagent.backends.base import Exchange
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.money.budget import BudgetedBackend, BudgetLedger, CallBudget
from bagent.money.prices import Price
from bagent.types import Failure, Reply, Usage


def fits(ledger: BudgetLedger, most: float) -> bool:
    """Reserve ``most`` dollars if they fit."""
    if not ledger.admits(most):
        return False
    ledger.reserve(most)
    return True


def test_calls_begin_as_long_as_all_of_them_fit() -> None:
    messages: list[str] = []
    freed: list[str] = []
    ledger = BudgetLedger(1.0, messages.append)
    assert [fits(ledger, 0.3) for _ in range(4)] == [True, True, True, False]
    ledger.wait(0.3, lambda: freed.append("other"))
    assert (messages, freed) == ([], [])
    ledger.settle(0.3, 0.1)
    assert freed == ["other"]
    assert fits(ledger, 0.3)
    ledger.settle(0.3, 0.1)
    assert freed == ["other"], "each is told once"


def test_the_end_is_told_once_and_only_when_nothing_is_in_flight() -> None:
    messages: list[str] = []
    freed: list[str] = []
    ledger = BudgetLedger(1.0, messages.append)
    assert fits(ledger, 0.6)
    assert not fits(ledger, 0.6)
    ledger.wait(0.6, lambda: freed.append("waiting"))
    assert messages == []
    ledger.settle(0.6, 0.6)
    assert freed == ["waiting"]
    for _ in range(2):
        assert not fits(ledger, 0.6)
        ledger.wait(0.6, lambda: freed.append("never"))
    assert (len(messages), freed) == (1, ["waiting"])
    assert "$0.6000 of the budget of $1" in messages[0]


def test_whatever_calls_cost_the_budget_is_not_passed() -> None:
    random = Random(7)
    ledger = BudgetLedger(5.0, lambda _: None)
    flying: list[float] = []
    for _ in range(2000):
        if flying and random.random() < 0.5:
            most = flying.pop(random.randrange(len(flying)))
            ledger.settle(most, most * random.random())
        else:
            most = random.uniform(0.001, 0.2)
            if fits(ledger, most):
                flying.append(most)
        assert ledger.spent + sum(flying) <= 5.0 + 1e-9
    assert ledger.spent > 4.0


def test_a_group_is_sent_as_far_as_it_fits() -> None:
    """Else a run with lists of rows ends while the budget would allow some of them."""
    messages: list[str] = []
    ledger = BudgetLedger(10.0, messages.append)
    budget = CallBudget(Price("p", "m", 0, 1_000_000 / 100), ledger)
    settings = CallSettings(None, {}, {})
    group = [Request(settings, b"x", prompt="x", max_tokens=tokens) for tokens in (400, 500, 600)]
    assert budget.affordable(group, lambda: None) == 2
    assert messages == []
    assert budget.reserve(group[:2]) == 9.0
    assert budget.affordable(group[2:], lambda: None) == 0
    assert messages == []


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
    backend = BudgetedBackend(inner, CallBudget(Price("p", "m", 0, 1_000_000 / 100), inner.ledger))
    body = {"model": "m", "messages": [], name: 60}
    settings = CallSettings(None, {}, {})
    line = Request(settings, encode_payload(body), body=body)
    endpoint: Any = None
    asyncio.run(backend.send(endpoint, [line], endpoint))
    assert inner.reserved == [pytest.approx(0.6)]


@pytest.mark.parametrize(
    ("failure", "exchange", "cost"),
    [
        (Failure("connect", "broke", True), {}, 40.96),
        (Failure("connect", "no route", True), {"connected": False}, 0.0),
        (Failure("timeout", "no connection", True), {"connected": False}, 0.0),
        (Failure("connect", "closed", True), {"stale_connection": True}, 0.0),
        (Failure("timeout", "no answer", True), {}, 40.96),
        (Failure("overloaded", "busy", True, status=503), {}, 0.0),
    ],
)
def test_what_may_have_been_billed_counts_in_full(
    failure: Failure, exchange: dict[str, bool], cost: float
) -> None:
    """A connection that broke after the request was sent may have cost a whole answer."""
    budget = CallBudget(Price("p", "m", 0, 1_000_000 / 100), BudgetLedger(100.0, lambda _: None))
    request = Request(CallSettings(None, {}, {}), b"x", prompt="x")
    assert budget.cost([request], Exchange([failure], sent=0.0, **exchange)) == cost  # type: ignore[arg-type]
