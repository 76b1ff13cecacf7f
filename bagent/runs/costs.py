"""What a job's tokens cost, and its budget."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bagent.backends.base import Backend
from bagent.errors import EXIT_NEEDS_PERSON, JobError
from bagent.money.prices import Price, find_price, known_prices
from bagent.money.spending import Spending
from bagent.runs.stop import Stop

if TYPE_CHECKING:
    from bagent.job.spec import Job


def price_of(job: Job, kind: str, model: str | None) -> Price | None:
    """The price of the job's tokens: its own, else the known one of a hosted model.

    Args:
        kind: the backend's kind.
        model: the model that is asked for.
    """
    own = job.prices
    if own is not None and own.input is not None and own.output is not None:
        cached = own.input if own.cached is None else own.cached
        written = own.input if own.cache_write is None else own.cache_write
        return Price(kind, model or "", own.input, own.output, cached, written, source="the job")
    # A gateway's address may cost anything, whatever it speaks.
    if model is None or job.backend is None or job.backend.base is not None:
        return None
    return find_price(known_prices(), kind, model) if kind in ("openai", "anthropic") else None


class Purse:
    """The budgets of one run: stages with the same budget share it, whatever servers they ask.

    Args:
        asked: gets the stop once a budget is spent.
    """

    def __init__(self, asked: asyncio.Future[Stop]) -> None:
        self._asked = asked
        self._spendings: dict[float, Spending] = {}

    def within(self, backend: Backend, job: Job, kind: str) -> Backend:
        """The backend, behind the job's budget where it has one.

        Raises:
            JobError: a budget, and no price is known for the model.
        """
        budget = job.limits.budget_usd
        if budget is None:
            return backend
        price = price_of(job, kind, None if job.model == "auto" else job.model)
        if price is None:
            raise JobError(
                f"limits.budget_usd: no price is known for {job.model} at this backend",
                hint="write prices: {input: 0.15, output: 0.60} (dollars per million tokens)",
                at=job.source.position(("limits", "budget_usd")),
            )
        from bagent.money.metered import MeteredBackend

        spending = self._spendings.get(budget)
        if spending is None:
            spending = self._spendings[budget] = Spending(budget, self._exhausted)
        return MeteredBackend(backend, price, spending)

    def _exhausted(self, words: str) -> None:
        if not self._asked.done():
            hint = "raise limits.budget_usd (--budget) and run the same command again"
            # Nothing is in flight any more: there is nothing to wait for.
            self._asked.set_result(Stop(EXIT_NEEDS_PERSON, words, hint, grace=0.0))
