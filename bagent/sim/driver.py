"""An engine on an event loop: its next event is a timer, its changes wake whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

from bagent.sim.engine import Engine, Request, Sequence


class Flight:
    """The sequences of one call, on their way.

    Args:
        stream: wake at every new token, not only at the end.
    """

    def __init__(self, *, stream: bool) -> None:
        self.sequences: list[Sequence] = []
        self.left = 0
        self._stream = stream
        self._fresh: list[Sequence] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether all sequences have ended and all that is new on them was handed out."""
        return not self.left and not self._fresh

    def changed(self, seq: Sequence) -> None:
        """The engine has something new on ``seq``."""
        self._fresh.append(seq)
        if seq.finished_at is not None:
            self.left -= 1
        wake = self._stream or not self.left
        if wake and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> list[Sequence]:
        """Wait for new tokens (streamed) or the end (else): the sequences that have changed."""
        while not self._fresh or (self.left and not self._stream):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        fresh, self._fresh = self._fresh, []
        return fresh


class Driver:
    """Runs ``engine`` on the running event loop, on that loop's clock."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None

    def start(self, flight: Flight, requests: Seq[Request]) -> None:
        """Submit the requests of one call; each has ``flight`` as its tag."""
        now = self._loop.time()
        flight.left = len(requests)
        flight.sequences = [self.engine.submit(request, now) for request in requests]
        self._pump()

    def drop(self, flight: Flight) -> None:
        """Take what is left of a call out of the engine."""
        now = self._loop.time()
        for seq in flight.sequences:
            if seq.finished_at is None:
                self.engine.cancel(seq, now)
        self._pump()

    def close(self) -> None:
        """Stop the clock; nothing changes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump(self) -> None:
        for seq in self.engine.advance(self._loop.time()):
            seq.request.tag.changed(seq)
        due = self.engine.next_event()
        if self._timer is not None:
            # The handles of some loops do not tell when they are due.
            if self._due == due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._due = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()
