"""Equal requests in batches, and what batches may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.errors import NeedsPerson
from bagent.money.prices import Price
from bagent.types import Row
from support.batch_runs import SCHEMA, Options, row, run_through
from support.batch_services import Course, OpenAIServer, good, nothing

PRICE = Price("openai", "m-1", 1000.0, 2000.0, batch=0.5)
"""Dear: 7 and 3 tokens cost 0.0065 dollars in a batch."""


def same(count: int) -> list[Row]:
    return [row(n, id="same" if n % 2 else f"r{n}") for n in range(count)]


def test_equal_requests_are_sent_once_and_copied(tmp_path: Path) -> None:
    server = OpenAIServer()
    run = run_through(tmp_path, server, same(10), Options(dedupe=True))
    assert run.error is None
    assert [len(batch["lines"]) for batch in server.made] == [6]
    assert sorted(line["row"] for line in run.lines) == list(range(10))
    copies = [line for line in run.lines if line.get("copied_from")]
    assert len(copies) == 4
    assert {line["text"] for line in copies} == {"fine"}
    assert all("prompt_tokens" not in line for line in copies)


def test_copies_follow_a_row_into_its_second_round(tmp_path: Path) -> None:
    first = Course(answer=good("not json"))
    server = OpenAIServer(first, Course(answer=good('{"score": 3}')))
    run = run_through(tmp_path, server, same(6), Options(dedupe=True, schema=SCHEMA))
    assert run.error is None
    assert [len(batch["lines"]) for batch in server.made] == [4, 4]
    assert [line["status"] for line in run.lines] == ["ok"] * 6


def test_copies_of_a_row_that_was_never_answered_ask_themselves(tmp_path: Path) -> None:
    server = OpenAIServer(Course(("completed",), nothing), Course())
    run = run_through(tmp_path, server, same(4), Options(dedupe=True, retries=0))
    assert run.error is None
    found = {line["row"]: line["status"] for line in run.lines}
    assert found == {0: "failed", 1: "failed", 2: "failed", 3: "ok"}


def test_a_row_costs_what_a_batch_takes(tmp_path: Path) -> None:
    price = PRICE.in_batches()
    run = run_through(tmp_path, OpenAIServer(), [row(0), row(1)], Options(price=price))
    assert [line["cost_usd"] for line in run.lines] == [pytest.approx(0.0065)] * 2
    assert run.records[0].cost_usd == pytest.approx(0.013)
    assert Price("openai", "m-1", 1.0, 2.0).in_batches() is None


def test_batches_are_sent_as_far_as_the_budget_goes(tmp_path: Path) -> None:
    """A row of 14 estimated and 64 allowed tokens may cost 0.071 dollars."""
    options = Options(price=PRICE.in_batches(), budget=0.30, size=2)
    server = OpenAIServer()
    run = run_through(tmp_path, server, [row(n) for n in range(40)], options)
    assert isinstance(run.error, NeedsPerson)
    assert "of the budget of $0.3" in str(run.error)
    assert all(len(batch["lines"]) <= 4 for batch in server.made)
    costs: list[Any] = [line["cost_usd"] for line in run.lines]
    assert 0.1 < sum(costs) <= 0.30
    more = Options(price=PRICE.in_batches(), budget=5.0)
    again = run_through(tmp_path, server, [row(n) for n in range(40)], more)
    assert again.error is None
    assert len(again.lines) == 40
    assert sum(len(batch["lines"]) for batch in server.made) == 40
