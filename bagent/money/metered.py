"""Any backend behind a budget: calls wait until they fit, and are settled by their real tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bagent.backends.around import AroundBackend
from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.money.prices import Price
from bagent.money.spending import Spending
from bagent.types import Failure, Reply

TOKENS_PER_BYTE = 0.5
"""Prompt tokens that a byte of a request may be at most, but for rare scripts: English has 0.25."""

TEMPLATE_TOKENS = 64
UNLIMITED = 4096
"""Tokens of an answer where the request names no limit."""


class MeteredBackend(AroundBackend):
    """Sends through ``inner`` what fits the budget.

    A call that ended without an answer is taken to have cost all it might have, unless the
    server refused it: who answered nothing may still send a bill.
    """

    def __init__(self, inner: Backend, price: Price, spending: Spending) -> None:
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
        self.spending.ask(most, begin)
        try:
            await begun.wait()
        except asyncio.CancelledError:
            if begun.is_set():
                self.spending.settle(most, 0.0)
            else:
                self.spending.withdraw(begin)
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
            known = self._price.cost(result.usage)
            return self._at_most(request) if known is None else known
        refused = result.status is not None and result.status >= 400
        return 0.0 if refused or result.kind == "connect" else self._at_most(request)
