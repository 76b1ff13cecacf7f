"""The budget of a run: a ledger of spent and reserved dollars, and what calls may cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request, answer_limit
from bagent.backends.wrappers import BackendWrapper
from bagent.money.prices import Price
from bagent.types import Failure, Reply


class BudgetLedger:
    """Admits calls as long as their maximum costs together fit the budget.

    Args:
        budget: dollars.
        exhausted: called once with a message when nothing is in flight and the next call might
            exceed the budget.
    """

    def __init__(self, budget: float, exhausted: Callable[[str], None]) -> None:
        self._budget = budget
        self._exhausted: Callable[[str], None] | None = exhausted
        self._waiting: dict[Callable[[], object], None] = {}
        self._calls = 0
        self.spent = 0.0
        self.reserved = 0.0

    def admits(self, most: float) -> bool:
        """Return whether a call of at most ``most`` dollars fits now."""
        return self.spent + self.reserved + most <= self._budget

    def wait(self, most: float, on_freed: Callable[[], object]) -> None:
        """Call ``on_freed`` once another call has ended, since one of ``most`` dollars did not fit.

        If nothing is in flight the budget is exhausted.
        """
        if self._calls:
            self._waiting[on_freed] = None
        elif self._exhausted is not None:
            exhausted, self._exhausted = self._exhausted, None
            exhausted(
                f"${self.spent:.4f} of the budget of ${self._budget:g} is spent, and the next"
                f" call may cost ${most:.4f}"
            )

    def reserve(self, most: float) -> None:
        """Reserve the maximum cost of a call that begins."""
        self._calls += 1
        self.reserved += most

    def settle(self, most: float, actual: float) -> None:
        """Replace the reservation of a finished call by its actual cost."""
        self._calls -= 1
        self.reserved = self.reserved - most if self._calls else 0.0
        self.spent += actual
        waiting, self._waiting = self._waiting, {}
        for on_freed in waiting:
            on_freed()


TOKENS_PER_BYTE = 0.5
"""Upper bound of prompt tokens a byte, except for rare scripts; English has 0.25."""

TEMPLATE_TOKENS = 64
UNLIMITED = 4096
"""Tokens of an answer if the request has no limit."""


class CallBudget:
    """What calls may cost, and whether the ledger admits them.

    A call without an answer counts with its maximum cost, since it may be billed, unless the
    server refused it or was never reached.
    """

    def __init__(self, price: Price, ledger: BudgetLedger) -> None:
        self._price = price
        self.ledger = ledger

    def affordable(self, group: Sequence[Request], on_freed: Callable[[], object]) -> int:
        """Return how many calls of ``group``, from the first one on, fit now.

        If none does, ``on_freed`` is called once another call has ended.
        """
        most = 0.0
        for count, request in enumerate(group):
            most += self._at_most(request)
            if not self.ledger.admits(most):
                if not count:
                    self.ledger.wait(most, on_freed)
                return count
        return len(group)

    def reserve(self, group: Sequence[Request]) -> float:
        """Reserve the maximum cost of a request that begins, and return it."""
        most = sum(map(self._at_most, group))
        self.ledger.reserve(most)
        return most

    def cost(self, group: Sequence[Request], exchange: Exchange) -> float:
        """Return what a request has cost."""
        arrived = exchange.connected and not exchange.stale_connection
        pairs = zip(group, exchange.results, strict=True)
        return sum(self._cost(request, result) for request, result in pairs) if arrived else 0.0

    def _at_most(self, request: Request) -> float:
        prompt = int(len(request.payload) * TOKENS_PER_BYTE) + TEMPLATE_TOKENS
        for tool in request.settings.tools:
            prompt += int(len(str(tool)) * TOKENS_PER_BYTE)
        if request.settings.output is not None:
            prompt += int(len(request.settings.output.document) * TOKENS_PER_BYTE)
        limit = answer_limit(request)
        return self._price.at_most(prompt, UNLIMITED if limit is None else limit)

    def _cost(self, request: Request, result: Reply | Failure) -> float:
        if isinstance(result, Reply):
            cost = self._price.cost(result.usage)
            return self._at_most(request) if cost is None else cost
        refused = result.status is not None and result.status >= 400
        return 0.0 if refused else self._at_most(request)


class BudgetedBackend(BackendWrapper):
    """Sends checks of endpoints through ``inner`` once they fit ``budget``, one call each.

    A fleet admits its own calls before it gives them an endpoint's slot, and sends them through
    ``inner``.
    """

    def __init__(self, inner: Backend, budget: CallBudget) -> None:
        super().__init__(inner)
        self.inner = inner
        self.budget = budget

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send once the budget admits the call; wait for cancellation if it never does."""
        assert len(group) == 1
        freed = asyncio.Event()
        while not self.budget.affordable(group, freed.set):
            await freed.wait()
            freed.clear()
        actual = most = self.budget.reserve(group)  # also if the call is cancelled in flight
        try:
            exchange = await self.inner.send(endpoint, group, timeouts)
            actual = self.budget.cost(group, exchange)
            return exchange
        finally:
            self.budget.ledger.settle(most, actual)
