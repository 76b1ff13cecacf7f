"""An event loop whose clock jumps: hours pass in no time, and always the same way."""

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


def on_jumping_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs on a :class:`JumpingLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        run_jumping(test(*args, **named))

    return run


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function: it runs on an event loop in real time."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run
