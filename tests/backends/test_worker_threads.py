"""Blocking calls in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bagent.backends.bedrock.errors import WorkerThreads


def test_no_more_threads_than_allowed_and_all_calls_end() -> None:
    inside: set[str] = set()

    def call() -> str:
        inside.add(threading.current_thread().name)
        return "done"

    async def main() -> list[str]:
        threads = WorkerThreads(3, "t")
        found = await asyncio.gather(*(threads.run(call) for _ in range(50)))
        assert threads.count <= 3
        threads.close()
        return list(found)

    assert asyncio.run(main()) == ["done"] * 50
    assert len(inside) <= 3


def test_threads_start_as_they_are_needed() -> None:
    async def main() -> int:
        threads = WorkerThreads(100, "t")
        for _ in range(10):
            await threads.run(lambda: None)
        threads.close()
        return threads.count

    assert asyncio.run(main()) < 10


async def test_what_a_call_raises_is_raised_where_it_is_awaited() -> None:
    def call() -> None:
        raise KeyError("x")

    threads = WorkerThreads(1, "t")
    with pytest.raises(KeyError):
        await threads.run(call)
    assert await threads.run(lambda: 3) == 3
    threads.close()


async def test_a_call_cancelled_before_it_began_never_begins() -> None:
    gate = threading.Event()
    ran: list[int] = []

    threads = WorkerThreads(1, "t")
    first = asyncio.create_task(threads.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run(lambda: ran.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    assert await first
    await threads.run(lambda: ran.append(3))
    threads.close()
    assert ran == [3]
