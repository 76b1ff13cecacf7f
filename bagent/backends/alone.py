"""What backends share whose calls each are a request of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.forms import Forms
from bagent.backends.request import Request
from bagent.types import Failure, Reply


class AloneBackend(ABC):
    """The part of :class:`bagent.backends.base.Backend` that speaks of groups: there are none.

    Args:
        forms: how each endpoint wants its requests.
        clock: Unix seconds.
    """

    def __init__(self, forms: Forms, clock: Callable[[], float]) -> None:
        self._forms = forms
        self._clock = clock

    def group_key(self, request: Request) -> Hashable | None:
        """None: every call goes alone."""
        return None

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """One call a request."""
        return 1

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Nothing is to be found out: calls go alone."""
        return

    def forget(self, endpoint: Endpoint) -> None:
        """Ask the endpoint in the usual form again."""
        self._forms.forget(endpoint)

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Not told without a generation."""
        return None

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send one call and wait for its end; see :class:`bagent.backends.base.Backend`."""
        exchange = Exchange(results=[], sent=self._clock())
        found = await self._send(endpoint, group[0], timeouts, exchange)
        exchange.done = self._clock()
        exchange.results = [found]
        return exchange

    @abstractmethod
    async def _send(
        self, endpoint: Endpoint, asked: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        """Send one call; status and times are noted in ``exchange``."""
