"""Which price holds for a job, and budgets that stages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.backends.http.client import Transport
from bagent.backends.registry import BackendConfig, make_backend
from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.job import Job
from bagent.money.budget import BudgetedBackend
from bagent.servers.pricing import BudgetGuard, job_price
from support.jobs import write_job


def job(folder: Path, backend: str, **keys: Any) -> Job:
    path = write_job(folder, backend, 1, **keys)
    return load_job(JobRequest(path=path, cwd=folder))


def test_the_jobs_own_prices_go_before_known_ones(tmp_path: Path) -> None:
    mine = job(tmp_path, "anthropic", model="claude-opus-5-5", prices={"input": 1, "output": 2})
    price = job_price(mine, "anthropic", "claude-opus-5-5")
    # Without prices of their own, tokens of a cache cost what others do.
    assert (price.input, price.output, price.cached, price.cache_write) == (1, 2, 1, 1)


def test_known_prices_hold_at_the_providers_own_address_only(tmp_path: Path) -> None:
    there = job(tmp_path, "anthropic", model="claude-opus-5-5")
    price = job_price(there, "anthropic", "claude-opus-5-5")
    assert price.source.startswith("https://")
    gateway = job(tmp_path, "anthropic://gateway.example.org", model="claude-opus-5-5")
    assert job_price(gateway, "anthropic", "claude-opus-5-5") is None
    assert job_price(there, "anthropic", "claude-next") is None
    assert job_price(there, "bedrock", "claude-opus-5-5") is None


def test_prices_of_a_job_are_whole_or_wrong(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="output: too"):
        job(tmp_path, "anthropic", prices={"input": 1})
    with pytest.raises(JobError, match="input: and output: too, since they replace the known"):
        job(tmp_path, "anthropic", prices={"batch": 0.5})


def test_stages_with_one_budget_spend_it_together(tmp_path: Path) -> None:
    prices = {"input": 1_000_000, "output": 0}
    mine = job(tmp_path, "anthropic", prices=prices, limits={"budget_usd": 10})

    exhausted: list[str] = []
    guard = BudgetGuard(exhausted.append)
    inner = make_backend("anthropic", Transport(), BackendConfig())
    first, second = (guard.wrap(inner, mine, "anthropic") for _ in range(2))
    assert isinstance(first, BudgetedBackend)
    assert isinstance(second, BudgetedBackend)
    freed: list[str] = []
    first.budget.ledger.reserve(6.0)
    assert not second.budget.ledger.admits(6.0)
    second.budget.ledger.wait(6.0, lambda: freed.append("second"))
    first.budget.ledger.settle(6.0, 6.0)
    assert (exhausted, freed) == ([], ["second"])
    second.budget.ledger.wait(6.0, lambda: freed.append("second"))
    assert len(exhausted) == 1
