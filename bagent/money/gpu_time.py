"""GPU time of own servers, divided among the rows in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from bagent.backends.base import Backend, Exchange, SentCall, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.backends.wrappers import BackendWrapper
from bagent.types import Failure, Reply


class SharedTime:
    """The virtual time of processor sharing (Kleinrock 1976) at one endpoint.

    It advances by elapsed time divided by the rows in flight. A row's share of the endpoint's time
    is the virtual time that passed while the row was in flight; all shares sum to the busy time.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._at = 0.0
        self._share = 0.0

    def change(self, now: float, rows: int) -> float:
        """Add ``rows`` (negative to remove) at ``now``; return the virtual time in seconds."""
        if self._rows:
            self._share += (now - self._at) / self._rows
        self._at = now
        self._rows += rows
        return self._share


class GpuTimeBackend(BackendWrapper):
    """Sends through ``inner`` and adds each reply's share of GPU time to its usage.

    The tag ``gpus`` of an endpoint is its number of GPUs, 1 by default.

    Args:
        clock: seconds on a monotonic clock.
    """

    def __init__(self, inner: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._times: dict[str, SharedTime] = {}

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        """Send a group; its replies get equal shares."""
        shared, size = self._shared(endpoint), len(group)
        began = shared.change(self._clock(), size)
        ended = began
        try:
            exchange = await self._inner.send(endpoint, group, timeouts)
        finally:
            ended = shared.change(self._clock(), -size)
        return _with_times(exchange, ended - began, endpoint)

    def send_now(
        self, endpoint: Endpoint, request: Request, timeouts: Timeouts, on_end: Callable[[], None]
    ) -> SentCall | None:
        """Send one call without a task, if ``inner`` does."""
        if self._inner_send_now is None:
            return None
        shared = self._shared(endpoint)
        ended = 0.0

        def end() -> None:
            nonlocal ended
            ended = shared.change(self._clock(), -1)
            on_end()

        sent = self._inner_send_now(endpoint, request, timeouts, end)
        if sent is None:
            return None
        began, exchange = shared.change(self._clock(), 1), sent.exchange
        return SentCall(sent.cancel, lambda: _with_times(exchange(), ended - began, endpoint))

    def _shared(self, endpoint: Endpoint) -> SharedTime:
        shared = self._times.get(endpoint.name)
        if shared is None:
            shared = self._times[endpoint.name] = SharedTime()
        return shared


def _with_times(exchange: Exchange, seconds: float, endpoint: Endpoint) -> Exchange:
    """Add the share of an endpoint's time, in seconds, to the replies of a request."""
    seconds *= float(endpoint.tags.get("gpus") or 1)
    exchange.results = [_with_time(result, seconds) for result in exchange.results]
    return exchange


def _with_time(result: Reply | Failure, seconds: float) -> Reply | Failure:
    if isinstance(result, Failure):
        return result
    usage = msgspec.structs.replace(result.usage, gpu_seconds=seconds)
    return msgspec.structs.replace(result, usage=usage)
