"""The background tasks of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

FleetCoroutine = Coroutine[asyncio.Future[Any], None, None]
"""A coroutine that awaits nothing but futures of the fleet."""


class FleetTasks:
    """Runs the tasks of a fleet; an exception in one stops the fleet.

    Args:
        loop: the event loop.
        on_cancelled: called when a task was cancelled.

    Attributes:
        requests: tasks that a drain waits for.
        probes: those that it cancels.
        stopped: gets the reason when the fleet cannot continue: an outage or a bug.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancelled: Callable[[], None]) -> None:
        self.loop = loop
        self._on_cancelled = on_cancelled
        self.requests: set[asyncio.Task[None]] = set()
        self.probes: set[asyncio.Task[None]] = set()
        self.stopped: asyncio.Future[BaseException] = loop.create_future()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work``, which a drain waits for."""
        return self._spawn(work, self.requests)

    def run(self, work: FleetCoroutine) -> None:
        """Run ``work`` until it awaits a future, and resume it in the turn after that is done.

        It takes one callback of the event loop for each future. A task would take four.
        """
        try:
            future = work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return  # it ended, or the fleet was closed
        except Exception as error:  # noqa: BLE001 - it stops the fleet
            self.stop(error)
        else:
            future.add_done_callback(lambda _: self.run(work))

    def spawn_probe(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work``, which a drain cancels."""
        return self._spawn(work, self.probes)

    def _spawn(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.requests.discard(task)
        self.probes.discard(task)
        if task.cancelled():
            self._on_cancelled()
        elif (error := task.exception()) is not None:
            self.stop(error)

    def stop(self, reason: BaseException) -> None:
        """Report that the fleet cannot continue."""
        if not self.stopped.done():
            self.stopped.set_result(reason)

    def cancel_probes(self) -> None:
        """Cancel all probes."""
        for probe in self.probes:
            probe.cancel()

    async def drain(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Wait up to ``seconds`` for the requests, call ``on_timeout``, then cancel the others."""
        if not self.requests:
            return
        _, pending = await asyncio.wait(set(self.requests), timeout=seconds)
        on_timeout()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
