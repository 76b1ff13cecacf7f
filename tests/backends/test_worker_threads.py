"""Blocking calls in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading

from bagent.backends.bedrock.backend import WorkerThreads


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
