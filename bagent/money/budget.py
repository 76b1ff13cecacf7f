"""A run's money: what is spent, what is in flight, and whether one more call fits the budget.

A pure object: it knows no network and no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.backends.wrappers import BackendWrapper
from bagent.money.prices import Price
from bagent.types import Failure, Reply


class BudgetLedger:
    """Lets calls begin only as long as all of them together cannot pass the budget.

    Args:
        budget: dollars.
        exhausted: called once, with words for people, when nothing is in flight any more and
            the next call might pass the budget.
    """

    def __init__(self, budget: float, exhausted: Callable[[str], None]) -> None:
        self._budget = budget
        self._exhausted: Callable[[str], None] | None = exhausted
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._calls = 0
        self.spent = 0.0
        self.reserved = 0.0

    def reserve(self, most: float, begin: Callable[[], None]) -> None:
        """Call ``begin`` as soon as a call of at most ``most`` dollars fits; first come, first
        served. Once the budget is exhausted it is never called."""
        self._waiting.append((most, begin))
        self._admit()

    def cancel(self, begin: Callable[[], None]) -> None:
        """Whoever asked no longer waits."""
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not begin)
        self._admit()

    def settle(self, most: float, actual: float) -> None:
        """A call that was let in with ``most`` is over and cost ``actual``."""
        self._calls -= 1
        self.reserved = self.reserved - most if self._calls else 0.0
        self.spent += actual
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            most, begin = self._waiting[0]
            if self.spent + self.reserved + most > self._budget:
                break
            self._waiting.popleft()
            self._calls += 1
            self.reserved += most
            begin()
        if self._waiting and not self._calls and self._exhausted is not None:
            exhausted, self._exhausted = self._exhausted, None
            exhausted(
                f"${self.spent:.4f} of the budget of ${self._budget:g} is spent, and the next"
                f" call may cost ${self._waiting[0][0]:.4f}"
            )


TOKENS_PER_BYTE = 0.5
"""Prompt tokens that a byte of a request may be at most, but for rare scripts: English has 0.25."""

TEMPLATE_TOKENS = 64
UNLIMITED = 4096
"""Tokens of an answer where the request names no limit."""


class BudgetedBackend(BackendWrapper):
    """Sends through ``inner`` what fits the budget.

    A call that ended without an answer is taken to have cost all it might have, unless the
    server refused it: who answered nothing may still send a bill.
    """

    def __init__(self, inner: Backend, price: Price, spending: BudgetLedger) -> None:
        super().__init__(inner)
        self._price = price
        self.spending = spending

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send once the budget has room; where it never has, wait to be cancelled."""
        most = sum(self._at_most(request) for request in group)
        await self._room(most)
        actual = most  # also where the call is given up on its way
        try:
            exchange = await self._inner.send(endpoint, group, timeouts)
            actual = sum(
                self._cost(request, result)
                for request, result in zip(group, exchange.results, strict=True)
            )
            return exchange
        finally:
            self.spending.settle(most, actual)

    async def _room(self, most: float) -> None:
        begun = asyncio.Event()
        begin = begun.set
        self.spending.reserve(most, begin)
        try:
            await begun.wait()
        except asyncio.CancelledError:
            if begun.is_set():
                self.spending.settle(most, 0.0)
            else:
                self.spending.cancel(begin)
            raise

    def _at_most(self, request: Request) -> float:
        prompt = int(len(request.payload) * TOKENS_PER_BYTE) + TEMPLATE_TOKENS
        for tool in request.settings.tools:
            prompt += int(len(str(tool)) * TOKENS_PER_BYTE)
        if request.settings.output is not None:
            prompt += int(len(request.settings.output.document) * TOKENS_PER_BYTE)
        return self._price.at_most(prompt, request.max_tokens or UNLIMITED)

    def _cost(self, request: Request, result: Reply | Failure) -> float:
        if isinstance(result, Reply):
            cost = self._price.cost(result.usage)
            return self._at_most(request) if cost is None else cost
        refused = result.status is not None and result.status >= 400
        return 0.0 if refused or result.kind == "connect" else self._at_most(request)
