"""Prices of a job's tokens and GPU time, and its budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from bagent.backend_kinds import TRAITS, BackendKind
from bagent.backends.base import Backend
from bagent.errors import JobError
from bagent.money.budget import BudgetedBackend, BudgetLedger, CallBudget
from bagent.money.prices import Price, find_price, gpu_pricer, known_prices, pricer
from bagent.types import Json, Usage

if TYPE_CHECKING:
    from bagent.job.spec.job import Job


def job_price(job: Job, kind: BackendKind, model: str | None) -> Price | None:
    """Return the price of the job's tokens: the job's own, else the known one of a hosted model.

    Args:
        kind: the backend's kind.
        model: the requested model.
    """
    own = job.prices
    if own is not None and own.input is not None and own.output is not None:
        cached = own.input if own.cached is None else own.cached
        written = own.input if own.cache_write is None else own.cache_write
        prices = (own.input, own.output, cached, written, own.batch)
        return Price(kind, model or "", *prices, source="the job")
    # Another address, such as a gateway, has prices of its own.
    if model is None or job.backend is None or job.backend.base is not None:
        return None
    provider = TRAITS[kind].prices
    price = find_price(known_prices(), provider, model) if provider is not None else None
    if price is None or job.batching.service_tier is None:
        return price
    # OpenAI charges the batch price for flex; the prices of other tiers are not known here.
    return price.in_batches() if job.batching.service_tier == "flex" else None


def gpu_hour_price(job: Job, kind: BackendKind) -> float | None:
    """Return dollars per GPU hour; None for hosted backends."""
    return None if job.prices is None or TRAITS[kind].hosted else job.prices.gpu_hour


def job_pricer(
    job: Job, kind: BackendKind, model: str | None
) -> Callable[[str | None, Usage], float | None] | None:
    """Return the function that computes the cost of a row; None where no price is known.

    The cost is GPU time where the user's own GPUs have a price, else tokens.
    """
    hour = gpu_hour_price(job, kind)
    return pricer(job_price(job, kind, model)) if hour is None else gpu_pricer(hour)


def stage_price(stage: str, job: Job, kind: BackendKind, model: str | None) -> Json:
    """Return a stage's prices for run.json, see :class:`bagent.money.prices.StagePrice`."""
    from bagent.money.prices import StagePrice

    stage_prices = StagePrice(stage, job_price(job, kind, model), gpu_hour_price(job, kind))
    return cast("Json", msgspec.to_builtins(stage_prices))


class BudgetGuard:
    """Budgets of one run; stages with equal budgets share one, whatever servers they call.

    Args:
        on_exhausted: called with a message once a budget is spent.
    """

    def __init__(self, on_exhausted: Callable[[str], None]) -> None:
        self._on_exhausted = on_exhausted
        self._ledgers: dict[float, BudgetLedger] = {}

    @property
    def spent(self) -> float:
        """The dollars that all budgets have spent."""
        return sum(ledger.spent for ledger in self._ledgers.values())

    def wrap(self, backend: Backend, job: Job, kind: BackendKind) -> Backend:
        """Wrap ``backend`` so that it counts GPU time and respects the job's budget, if any.

        Raises:
            JobError: the job has a budget and no token price is known for the model.
        """
        if gpu_hour_price(job, kind) is not None:
            from bagent.money.gpu_time import GpuTimeBackend

            backend = GpuTimeBackend(backend)
        budget = job.limits.budget_usd
        if budget is None:
            return backend
        price = job_price(job, kind, None if job.model == "auto" else job.model)
        if price is None:
            raise JobError(
                f"limits.budget_usd: no price is known for {job.model} at this backend",
                hint="write prices: {input: 0.15, output: 0.60} (dollars per million tokens)",
                at=job.source.position(("limits", "budget_usd")),
            )
        ledger = self._ledgers.get(budget)
        if ledger is None:
            ledger = self._ledgers[budget] = BudgetLedger(budget, self._on_exhausted)
        return BudgetedBackend(backend, CallBudget(price, ledger))
