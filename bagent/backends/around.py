"""A backend around another one: what is not its own business is passed on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import Request
from bagent.types import Failure


class AroundBackend:
    """Passes every call on to ``inner``; see :class:`bagent.backends.base.Backend`."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def group_key(self, request: Request) -> Hashable | None:
        """As the inner backend has it."""
        return self._inner.group_key(request)

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """As the inner backend has it."""
        return self._inner.group_limit(endpoint, request)

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """As the inner backend does."""
        await self._inner.learn(endpoint, samples, timeouts)

    def forget(self, endpoint: Endpoint) -> None:
        """As the inner backend does."""
        self._inner.forget(endpoint)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """As the inner backend does."""
        return await self._inner.send(endpoint, group, timeouts)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """As the inner backend does: nothing is generated, so it costs nothing."""
        return await self._inner.probe(endpoint, seconds)

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """As the inner backend does: nothing is generated."""
        return await self._inner.count_tokens(endpoint, request, seconds)

    async def close(self) -> None:
        """Close all connections."""
        await self._inner.close()
