"""Coroutines of the user in an event loop of their own, in a thread of its own.

A coroutine that blocks would stop every request of the run if it ran beside them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from bagent.tools.tool import ToolFault, error_text

T = TypeVar("T")

GRACE = 1.0
"""Seconds in which a cancelled coroutine must have ended; else its loop is given up."""


class _Loop:
    """One event loop in one daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._over = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            # What a task of the user raises, or a stop() of theirs, is not the end of other calls.
            while not self._over:
                with suppress(KeyboardInterrupt, SystemExit):
                    self.loop.run_forever()
        finally:
            self.loop.close()

    def stop(self) -> None:
        """End the thread; one that is blocked ends when it is not any more."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    def join(self) -> None:
        """Wait a moment for the end of the thread."""
        self._thread.join(GRACE)

    async def _end(self) -> None:
        rest = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=GRACE)
        await self.loop.shutdown_asyncgens()
        self._over = True
        self.loop.call_soon(self.loop.stop)


class Loops:
    """Runs coroutines in one loop for all; a loop that does not answer is replaced."""

    def __init__(self, name: str) -> None:
        self._name = f"bagent-{name}"
        self._current: _Loop | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self.abandoned = 0

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine that ``make`` makes returns; cancelling this cancels it."""
        if self._current is None:
            self._current = _Loop(self._name)
        used = self._current
        future = asyncio.run_coroutine_threadsafe(_called(make), used.loop)
        waiting = asyncio.wrap_future(future)
        try:
            return await waiting
        except asyncio.CancelledError:
            watch = asyncio.ensure_future(self._watch(used))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
            raise

    async def _watch(self, used: _Loop) -> None:
        """Give a loop up that is blocked: what is called later runs in a new one."""
        pong: Future[None] = asyncio.run_coroutine_threadsafe(_nothing(), used.loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(pong), GRACE)
        except TimeoutError:
            if self._current is used:
                self._current = None
                self.abandoned += 1
                used.stop()

    def close(self) -> None:
        """End the loop."""
        for watch in self._watches:
            watch.cancel()
        if self._current is not None:
            self._current.stop()
            self._current.join()
            self._current = None


async def _called(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # Called here, so that what runs before the first await runs in the loop's thread too.
    try:
        return await make()
    except (KeyboardInterrupt, SystemExit) as error:  # would end the run where it is waited for
        words = f"{type(error).__name__}: {error_text(error)}".rstrip(": ")
        raise ToolFault(words) from None


async def _nothing() -> None:
    return None
