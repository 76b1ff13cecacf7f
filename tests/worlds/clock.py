"""A clock and an event loop of one world: hours pass in no time, and always the same way."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from bagent import clocks

EPOCH = 1_700_000_000.0
"""Unix time at which a world begins; before now, since files have times of the real clock."""

STEADY_OFFSET = 1000.0
"""The monotonic clock at the beginning of a world."""

LONGEST_START = 2 * 3600.0
"""Virtual seconds after which a start counts as waiting for ever."""

MOST_TURNS = 20_000
"""Turns of the event loop without a step of the clock after which it counts as spinning."""


class Died(SystemExit):
    """The simulated process is killed; asyncio lets only such exceptions pass."""


class Stuck(BaseException):
    """A start waits for ever, or spins."""


class WorldClock:
    """The time of a world, in seconds since its beginning."""

    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> float:
        """Return Unix seconds."""
        return EPOCH + self.now

    def steady(self) -> float:
        """Return monotonic seconds."""
        return STEADY_OFFSET + self.now

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make this the clock of the process."""
        with (
            mock.patch.object(time, "time", self.wall),
            mock.patch.object(time, "monotonic", self.steady),
            mock.patch.object(clocks.unix, "_steady", self.steady),
            mock.patch.object(clocks.unix, "_offset", EPOCH - STEADY_OFFSET),
        ):
            yield


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Moves the world's clock instead of waiting."""

    def __init__(self, clock: WorldClock) -> None:
        super().__init__()
        self._clock = clock
        self._until = clock.now + LONGEST_START
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return nothing; the clock moves by ``timeout``."""
        if timeout is None:
            raise Stuck("everything waits, and nothing will ever happen")
        if timeout > 0:
            self._turns = 0
            self._clock.now += timeout
            if self._clock.now > self._until:
                raise Stuck(f"the start goes on for more than {LONGEST_START:g} s")
        self._turns += 1
        if self._turns > MOST_TURNS:
            raise Stuck("the event loop spins")
        return []


class WorldLoop(asyncio.SelectorEventLoop):
    """The event loop of one simulated process. It has no threads and no real signals."""

    def __init__(self, clock: WorldClock, is_dead: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_dead = is_dead
        self.handlers: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.tasks: list[object] = []
        """What a dead process was at."""
        super().__init__(_Selector(clock))
        self.set_exception_handler(self._on_error)
        self.errors: list[str] = []

    def time(self) -> float:
        """Return monotonic seconds of the world."""
        return self._clock.steady()

    def run_until_complete(self, future: Any) -> Any:
        """Run; in a process that has died nothing runs any more."""
        if self._is_dead():
            self.tasks += [*asyncio.all_tasks(self), future]
            raise Died
        return super().run_until_complete(future)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Call ``func`` at once."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Note who takes a signal."""
        self.handlers[sig] = callback, args

    def remove_signal_handler(self, sig: int) -> bool:
        """Forget who takes a signal."""
        return self.handlers.pop(sig, None) is not None

    def signal(self, sig: int) -> None:
        """Deliver a signal."""
        if sig in self.handlers:
            callback, args = self.handlers[sig]
            callback(*args)

    def _on_error(self, loop: Any, context: dict[str, Any]) -> None:
        if not self._is_dead() and not isinstance(context.get("exception"), Died):
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
