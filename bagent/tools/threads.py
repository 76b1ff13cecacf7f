"""Threads and event loops for the user's functions, which may be abandoned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from bagent.tools.types import ToolFault, error_text

T = TypeVar("T")

MOST_ABANDONED = 64
"""Abandoned runs of a tool after which it is not started again."""


class _Job:
    """One call of a function and the future that waits for it."""

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.function = function
        self.future = future
        self.value: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Keep any exception, SystemExit too: it ends the call, not the thread."""
        self.error = error
        return True


class AbandonableThreads:
    """A pool of daemon threads that grows when all are busy.

    A thread cannot be stopped: a cancelled call leaves its function running, counted in
    ``abandoned`` until it ends. Daemon threads do not keep the program from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._closed = False
        self.abandoned = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a thread and return its result, or raise its exception.

        Raises:
            ToolFault: too many abandoned calls still run.
        """
        if self.abandoned >= MOST_ABANDONED:
            raise ToolFault(
                f"{self.abandoned} earlier calls still run after their time limit", "overloaded"
            )
        job = _Job(function, asyncio.get_running_loop().create_future())
        thread = self._idle.pop() if self._idle else self._start()
        thread.put(job)
        try:
            result: T = await job.future
        except asyncio.CancelledError:
            if job.future.cancelled():
                self.abandoned += 1
            raise
        return result

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start(self) -> SimpleQueue[_Job | None]:
        queue: SimpleQueue[_Job | None] = SimpleQueue()
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._work, args=(queue, loop), name=f"bagent-{self._name}", daemon=True
        ).start()
        return queue

    def _work(self, queue: SimpleQueue[_Job | None], loop: asyncio.AbstractEventLoop) -> None:
        while job := queue.get():
            with job:
                job.value = job.function()
            try:
                loop.call_soon_threadsafe(self._ended, job, queue)
            except RuntimeError:  # the loop is closed
                return

    def _ended(self, job: _Job, queue: SimpleQueue[_Job | None]) -> None:
        if self._closed:
            queue.put(None)
        else:
            self._idle.append(queue)
        if job.future.cancelled():
            self.abandoned -= 1
        elif job.error is not None:
            job.future.set_exception(in_future(job.error))
        else:
            job.future.set_result(job.value)


def in_future(error: BaseException) -> BaseException:
    """Return an exception that a future accepts and that does not end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ToolFault(f"{type(error).__name__}: {error_text(error)}".rstrip(": "))


GRACE = 1.0
"""Seconds in which a cancelled coroutine must end; else its loop is abandoned."""


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
            # A task of the user that exits, or stops the loop, must not end other calls.
            while not self._over:
                with suppress(KeyboardInterrupt, SystemExit):
                    self.loop.run_forever()
        finally:
            self.loop.close()

    def stop(self) -> None:
        """End the thread, once nothing blocks it."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    def join(self) -> None:
        """Wait at most ``GRACE`` seconds for the end of the thread."""
        self._thread.join(GRACE)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
        await self.loop.shutdown_asyncgens()
        self._over = True
        self.loop.call_soon(self.loop.stop)


class EventLoopThread:
    """Runs coroutines in an event loop in a thread; a loop that is blocked is replaced."""

    def __init__(self, name: str) -> None:
        self._name = f"bagent-{name}"
        self._current: _Loop | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self.abandoned = 0

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine of ``make`` and return its result; cancelling this cancels it."""
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
        """Abandon a loop that is blocked: later calls run in a new one."""
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
    # Called here, so that code before the first await runs in the loop's thread too.
    try:
        return await make()
    except (KeyboardInterrupt, SystemExit) as error:  # it would end the run
        message = f"{type(error).__name__}: {error_text(error)}".rstrip(": ")
        raise ToolFault(message) from None


async def _nothing() -> None:
    return None
