"""Blocking calls off the event loop, in a bounded number of threads that hold no process up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class WorkerThreads:
    """At most ``most`` threads, started as they are needed.

    They are daemons: a call that hangs in a library can not keep the process from ending, as it
    would in ``concurrent.futures``.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._count = 0

    @property
    def count(self) -> int:
        """How many threads there are."""
        return self._count

    async def run(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns or raises, run in a thread; waits for one where all are taken.

        A cancelled call that has begun goes on in its thread, and nobody hears of it.
        """
        job: Future[_T] = Future()
        self._jobs.put((job, call))
        if not self._free.acquire(blocking=False) and self._count < self._most:
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads as they become free."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            found = self._jobs.get()
            if found is None:
                return
            job, call = found
            if job.set_running_or_notify_cancel():
                _run(job, call)
            del found, job, call  # what a call holds must not live until the next one
            self._free.release()


def _run(job: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        job.set_exception(error)
    else:
        job.set_result(result)
