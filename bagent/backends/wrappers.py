"""Backends that wrap another one, and the base of backends without groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from bagent.backends.base import Backend, DirectBackend, Exchange, SentCall, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.keys import KeySource
from bagent.backends.profile import EndpointForms, EndpointProfiles
from bagent.backends.request import Request
from bagent.types import Failure, Reply


class BackendWrapper:
    """Delegates every method to ``inner``; see :class:`bagent.backends.base.Backend`."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._inner_send_now = inner.send_now if isinstance(inner, DirectBackend) else None

    def group_key(self, request: Request) -> Hashable | None:
        """Delegate to the inner backend."""
        return self._inner.group_key(request)

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """Delegate to the inner backend."""
        return self._inner.group_limit(endpoint, request)

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Delegate to the inner backend."""
        await self._inner.learn(endpoint, samples, timeouts)

    def forget(self, endpoint: Endpoint) -> None:
        """Delegate to the inner backend."""
        self._inner.forget(endpoint)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Delegate to the inner backend."""
        return await self._inner.send(endpoint, group, timeouts)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Delegate to the inner backend."""
        return await self._inner.probe(endpoint, seconds)

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Delegate to the inner backend."""
        return await self._inner.count_tokens(endpoint, request, seconds)

    async def close(self) -> None:
        """Close all connections."""
        await self._inner.close()


class KeyRotatingBackend(BackendWrapper):
    """Sends through ``inner`` with the current key, and renews it after a 401."""

    def __init__(self, inner: Backend, keys: KeySource) -> None:
        super().__init__(inner)
        self._keys = keys
        self._refused: str | None = None  # a key that a call without a task was refused with

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Delegate with the current key."""
        await self._inner.learn(self._keys.apply(endpoint), samples, timeouts)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send; get a new key if the old one was refused."""
        if self._keys.key == self._refused:
            await self._keys.renew(self._refused)
        used = self._keys.key
        exchange = await self._inner.send(self._keys.apply(endpoint), group, timeouts)
        if _refused(exchange) and self._keys.is_used_by(endpoint):
            exchange.new_key = await self._keys.renew(used)
        return exchange

    def send_now(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, on_end: Callable[[], None]
    ) -> SentCall | None:
        """Send one call without a task; if its key is refused, :meth:`send` gets a new one."""
        used = self._keys.key
        if self._inner_send_now is None or used == self._refused:
            return None
        sent = self._inner_send_now(self._keys.apply(endpoint), request, timeouts, on_end)
        if sent is None:
            return None
        inner_exchange = sent.exchange

        def exchange() -> Exchange:
            exchange = inner_exchange()
            if _refused(exchange) and self._keys.is_used_by(endpoint):
                self._refused, exchange.new_key = used, True
            return exchange

        return SentCall(sent.cancel, exchange)

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Delegate with the current key."""
        return await self._inner.count_tokens(self._keys.apply(endpoint), request, seconds)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Probe, and repeat with a new key if the old one was refused."""
        used = self._keys.key
        result = await self._inner.probe(self._keys.apply(endpoint), seconds)
        refused = isinstance(result, Failure) and result.status == 401
        if refused and self._keys.is_used_by(endpoint) and await self._keys.renew(used):
            return await self._inner.probe(self._keys.apply(endpoint), seconds)
        return result


def _refused(exchange: Exchange) -> bool:
    """Return whether the key was refused: 401, or expired credentials under 403."""
    return all(
        isinstance(result, Failure)
        and result.kind == "auth"
        and (result.status == 401 or "expired" in result.message.lower())
        for result in exchange.results
    )


class SingleRequestBackend(ABC):
    """Base of backends that send one call per request.

    Args:
        enforce: see :class:`bagent.backends.profile.EndpointForms`.
        clock: Unix seconds.
        notice: called with a message when something is learned.
    """

    def __init__(
        self, enforce: str, clock: Callable[[], float], notice: Callable[[str], None]
    ) -> None:
        self._profiles = EndpointProfiles()
        self._forms = EndpointForms(self._profiles, enforce, notice)
        self._clock = clock

    def group_key(self, request: Request) -> Hashable | None:
        """Return None: calls are never grouped."""
        return None

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """Return 1: one call per request."""
        return 1

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """Do nothing: there are no groups."""
        return

    def forget(self, endpoint: Endpoint) -> None:
        """Return to the default form for the endpoint."""
        self._profiles.forget(endpoint)

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Return None: the API does not count without a generation."""
        return None

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send one call."""
        exchange = Exchange(results=[], sent=self._clock())
        result = await self._send(endpoint, group[0], timeouts, exchange)
        exchange.done = self._clock()
        exchange.results = [result]
        return exchange

    @abstractmethod
    async def _send(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        """Send one call; record status and times in ``exchange``."""
