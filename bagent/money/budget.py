"""The budget of a run: a ledger of spent and reserved dollars, and a backend that waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request, answer_limit
from bagent.backends.wrappers import BackendWrapper
from bagent.money.prices import Price
from bagent.types import Failure, Reply


class _Waiting(NamedTuple):
    """A call that waits for the budget, see :meth:`BudgetLedger.reserve`."""

    most: float
    begin: Callable[[], None]
    rows: int
    abandon: Callable[[], object]


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
        self._waiting: deque[_Waiting] = deque()
        self._calls = 0
        self.unsent = 0
        """Calls that wait, or were cancelled while they waited."""
        self.spent = 0.0
        self.reserved = 0.0

    @property
    def waiting_rows(self) -> int:
        """The rows of the calls that wait."""
        return sum(call.rows for call in self._waiting)

    def reserve(
        self,
        most: float,
        begin: Callable[[], None],
        rows: int = 1,
        abandon: Callable[[], object] = lambda: None,
    ) -> None:
        """Call ``begin`` once a call of at most ``most`` dollars fits, in the order of requests.

        It is never called once the budget is exhausted. ``rows`` is how many the call carries.
        ``abandon`` is called instead if the ledger is closed before.
        """
        self._waiting.append(_Waiting(most, begin, rows, abandon))
        self.unsent += 1
        self._admit()

    def cancel(self, begin: Callable[[], None]) -> None:
        """Cancel a waiting reservation."""
        self._waiting = deque(call for call in self._waiting if call.begin is not begin)
        self._admit()

    def close(self) -> None:
        """Abandon the calls that wait: they are never sent."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.abandon()

    def settle(self, most: float, actual: float) -> None:
        """Replace the reservation of a finished call by its actual cost."""
        self._calls -= 1
        self.reserved = self.reserved - most if self._calls else 0.0
        self.spent += actual
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            most = self._waiting[0].most
            if self.spent + self.reserved + most > self._budget:
                break
            begin = self._waiting.popleft().begin
            self.unsent -= 1
            self._calls += 1
            self.reserved += most
            begin()
        if self._waiting and not self._calls and self._exhausted is not None:
            exhausted, self._exhausted = self._exhausted, None
            exhausted(
                f"${self.spent:.4f} of the budget of ${self._budget:g} is spent, and the next"
                f" call may cost ${self._waiting[0].most:.4f}"
            )


TOKENS_PER_BYTE = 0.5
"""Upper bound of prompt tokens a byte, except for rare scripts; English has 0.25."""

TEMPLATE_TOKENS = 64
UNLIMITED = 4096
"""Tokens of an answer if the request has no limit."""


class BudgetedBackend(BackendWrapper):
    """Sends through ``inner`` the calls that fit the budget.

    A call without an answer counts with its maximum cost, since it may be billed, unless the
    server refused it.
    """

    def __init__(self, inner: Backend, price: Price, spending: BudgetLedger) -> None:
        super().__init__(inner)
        self._price = price
        self.spending = spending

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send once the budget admits the call; wait for cancellation if it never does."""
        most = sum(self._at_most(request) for request in group)
        await self._reserve(most, len(group))
        actual = most  # also if the call is cancelled in flight
        try:
            exchange = await self._inner.send(endpoint, group, timeouts)
            actual = sum(
                self._cost(request, result)
                for request, result in zip(group, exchange.results, strict=True)
            )
            return exchange
        finally:
            self.spending.settle(most, actual)

    async def _reserve(self, most: float, rows: int) -> None:
        admitted = asyncio.Event()
        begin, task = admitted.set, asyncio.current_task()
        assert task is not None
        self.spending.reserve(most, begin, rows, task.cancel)
        try:
            await admitted.wait()
        except asyncio.CancelledError:
            if admitted.is_set():
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
        limit = answer_limit(request)
        return self._price.at_most(prompt, UNLIMITED if limit is None else limit)

    def _cost(self, request: Request, result: Reply | Failure) -> float:
        if isinstance(result, Reply):
            cost = self._price.cost(result.usage)
            return self._at_most(request) if cost is None else cost
        refused = result.status is not None and result.status >= 400
        return 0.0 if refused or result.kind == "connect" else self._at_most(request)
