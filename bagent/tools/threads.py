"""Blocking functions in threads that may be given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from bagent.tools.tool import ToolFault, error_text

T = TypeVar("T")

MOST_ABANDONED = 64
"""With more runs than this that nothing can stop, a tool is not started again."""


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
        """Keep whatever the function raised, SystemExit too: it ends the call, not the thread."""
        self.error = error
        return True


class Threads:
    """Daemon threads, each started when all others are busy, and used again.

    A thread cannot be stopped. A call that is cancelled leaves its function running, counted in
    ``abandoned`` until it ends. The threads never keep the program from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._closed = False
        self.abandoned = 0

    async def run(self, function: Callable[[], T]) -> T:
        """What ``function`` returns.

        Raises:
            ToolFault: too many calls that nothing can stop still run.
            whatever it raises.
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
            except RuntimeError:  # the loop is closed: nobody waits any more
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
    """An exception that a future takes and that does not end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ToolFault(f"{type(error).__name__}: {error_text(error)}".rstrip(": "))
