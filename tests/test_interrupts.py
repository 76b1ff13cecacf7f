"""Ctrl-C while a command waits for servers."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from bagent.interrupts import run_interruptible


async def wait(events: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        events.append("ended")


def test_the_loop_is_woken_by_a_ctrl_c_and_the_work_ends_in_order() -> None:
    events: list[str] = []

    async def work() -> None:
        wakes = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakes)
        events.append("wakes" if wakes >= 0 else "sleeps on")
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await wait(events)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert events == ["wakes", "ended"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_work() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_without_a_ctrl_c_the_result_and_a_cancellation_are_the_work_s_own() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert run_interruptible(work()) == 7
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: run_interruptible(work())).result() == 7
    with pytest.raises(asyncio.CancelledError):
        run_interruptible(cancelled())
