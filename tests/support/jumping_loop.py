"""Event loops whose clocks jump by themselves, or are set forward by a test."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting, moves the loop's clock to where the wait would have ended."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready at once; the clock moves by ``timeout`` if nothing is."""
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise AssertionError("everything waits, and nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting for them. For coroutines that use no network."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds on the loop's own clock, from 1000."""
        return self._jumping.now


def run_jumping(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main`` on a :class:`JumpingLoop`."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


Test = Callable[..., Coroutine[Any, Any, None]]


def on_jumping_clock(test: Test) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs on a :class:`JumpingLoop`."""
    return functools.wraps(test)(lambda *args, **named: run_jumping(test(*args, **named)))


class ShiftedLoop(asyncio.SelectorEventLoop):
    """Runs in real time, network included, on a clock that can be set forward.

    So a test decides when a time limit is over, whatever the speed of the machine: limits are
    long, and are skipped once everything else has happened.
    """

    ahead = 0.0
    stopped: float | None = None

    def time(self) -> float:
        """Seconds on the loop's own clock."""
        return (super().time() if self.stopped is None else self.stopped) + self.ahead


def skip(seconds: float) -> None:
    """Set the clock of the running loop, a :class:`ShiftedLoop`, forward."""
    _shifted_loop().ahead += seconds


async def turns(count: int = 100) -> None:
    """Let the loop turn so often: what has begun goes on until it waits for something real."""
    for _ in range(count):
        await asyncio.sleep(0)


def stop_clock() -> None:
    """Let only :func:`skip` move the clock of the running loop, a :class:`ShiftedLoop`."""
    loop = _shifted_loop()
    loop.stopped = loop.time() - loop.ahead


def _shifted_loop() -> ShiftedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ShiftedLoop)
    return loop


def run_shifted(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main`` on a :class:`ShiftedLoop`."""
    with asyncio.Runner(loop_factory=ShiftedLoop) as runner:
        return runner.run(main)


def in_event_loop(test: Test) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs on a :class:`ShiftedLoop`."""
    return functools.wraps(test)(lambda *args, **named: run_shifted(test(*args, **named)))
