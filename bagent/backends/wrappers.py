"""A backend around another one: what is not its own business is passed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import msgspec

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.keys import KeySource, replace_key
from bagent.backends.profile import EndpointForms
from bagent.backends.request import Request
from bagent.types import Failure, Reply


class BackendWrapper:
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


class KeyRotatingBackend:
    """Sends through ``inner``; after a 401 gets a new key and sends once more.

    Args:
        keys: the key that endpoints were given in their headers, and the way to newer ones.
    """

    def __init__(self, inner: Backend, keys: KeySource) -> None:
        self._inner = inner
        self._keys = keys
        self._first = keys.key
        self._current: dict[str, tuple[str, Endpoint]] = {}

    def group_key(self, request: Request) -> Hashable | None:
        """As the inner backend has it."""
        return self._inner.group_key(request)

    def group_limit(self, endpoint: Endpoint, request: Request) -> int | None:
        """As the inner backend has it."""
        return self._inner.group_limit(endpoint, request)

    async def learn(
        self, endpoint: Endpoint, samples: Sequence[Request], timeouts: Timeouts
    ) -> None:
        """As the inner backend does, with the key of now."""
        await self._inner.learn(self._with_key(endpoint), samples, timeouts)

    def forget(self, endpoint: Endpoint) -> None:
        """As the inner backend does."""
        self._inner.forget(endpoint)

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send, and once more with a new key where the old one was refused."""
        used = self._keys.key
        exchange = await self._inner.send(self._with_key(endpoint), group, timeouts)
        if _refused(exchange) and await self._keys.renew(used):
            return await self._inner.send(self._with_key(endpoint), group, timeouts)
        return exchange

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """As the inner backend does, with the key of now."""
        return await self._inner.count_tokens(self._with_key(endpoint), request, seconds)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
        """Probe, and once more with a new key where the old one was refused."""
        used = self._keys.key
        result = await self._inner.probe(self._with_key(endpoint), seconds)
        if isinstance(result, Failure) and result.status == 401 and await self._keys.renew(used):
            return await self._inner.probe(self._with_key(endpoint), seconds)
        return result

    async def close(self) -> None:
        """Close all connections."""
        await self._inner.close()

    def _with_key(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint with the key of now; the same object as long as that holds."""
        key = self._keys.key
        if key == self._first:
            return endpoint
        cached = self._current.get(endpoint.name)
        if cached is None or cached[0] != key:
            headers = replace_key(endpoint.headers, self._first, key)
            cached = key, msgspec.structs.replace(endpoint, headers=headers)
            self._current[endpoint.name] = cached
        return cached[1]


def _refused(exchange: Exchange) -> bool:
    """Whether the server did not know the key: 401, or expired credentials under 403."""
    return all(
        isinstance(result, Failure)
        and result.kind == "auth"
        and (result.status == 401 or "expired" in result.message.lower())
        for result in exchange.results
    )


class SingleRequestBackend(ABC):
    """The part of :class:`bagent.backends.base.Backend` that speaks of groups: there are none.

    Args:
        forms: how each endpoint wants its requests.
        clock: Unix seconds.
    """

    def __init__(self, forms: EndpointForms, clock: Callable[[], float]) -> None:
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
        result = await self._send(endpoint, group[0], timeouts, exchange)
        exchange.done = self._clock()
        exchange.results = [result]
        return exchange

    @abstractmethod
    async def _send(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, exchange: Exchange
    ) -> Reply | Failure:
        """Send one call; status and times are noted in ``exchange``."""
