"""The time of a fleet's GPUs, shared out over the rows that were in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from bagent.backends.base import Backend, Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import Request
from bagent.backends.wrappers import BackendWrapper
from bagent.types import Failure, Reply


class SharedTime:
    """One endpoint's time, divided at each moment by how many rows it has in flight.

    All shares together are the time in which it had any. This is the virtual time of processor
    sharing (Kleinrock 1976): a row's share is by how much that time went on while it was there.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._at = 0.0
        self._share = 0.0

    def change(self, now: float, rows: int) -> float:
        """``rows`` more (or, below 0, fewer) from ``now`` on; returns the virtual time in s."""
        if self._rows:
            self._share += (now - self._at) / self._rows
        self._at = now
        self._rows += rows
        return self._share


class GpuTimeBackend(BackendWrapper):
    """Sends through ``inner``; replies then tell their share of GPU time in their usage.

    An endpoint has as many GPUs as its tag ``gpus`` says, else 1.

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
        """As the inner backend does; each reply of the group gets the same share."""
        shared = self._times.get(endpoint.name)
        if shared is None:
            shared = self._times[endpoint.name] = SharedTime()
        size = len(group)
        began = shared.change(self._clock(), size)
        ended = began
        try:
            exchange = await self._inner.send(endpoint, group, timeouts)
        finally:
            ended = shared.change(self._clock(), -size)
        seconds = (ended - began) * float(endpoint.tags.get("gpus") or 1)
        exchange.results = [_with_time(result, seconds) for result in exchange.results]
        return exchange


def _with_time(result: Reply | Failure, seconds: float) -> Reply | Failure:
    if isinstance(result, Failure):
        return result
    usage = msgspec.structs.replace(result.usage, gpu_seconds=seconds)
    return msgspec.structs.replace(result, usage=usage)
