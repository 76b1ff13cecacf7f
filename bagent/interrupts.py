"""Commands that wait for servers, or are servers, and the signals that end them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(
    work: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """``asyncio.run``, with a Ctrl-C that is always heard at once.

    Python's own handler wakes no loop: a signal that comes just before the loop begins to wait is
    heard when something else happens, which may be the end of a time limit. The handlers of a loop
    wake it. ``work`` is cancelled by the first Ctrl-C; a second one does not wait for it.

    Raises:
        KeyboardInterrupt: there was a Ctrl-C.
    """
    heard = False

    async def whole() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            nonlocal heard
            heard = True
            loop.remove_signal_handler(signal.SIGINT)
            if task is not None:
                task.cancel()

        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGINT, stop)
        return await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(whole())
    except asyncio.CancelledError:
        if heard:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def signals_heard(numbers: Sequence[int], heard: Callable[[int], None]) -> Iterator[None]:
    """Have ``heard`` called in the running loop with each of these signals; main thread only.

    Afterwards they are ignored, for good: what ends is to end with its own exit code. A loop's own
    handlers would leave a moment in which a signal kills the process. The price: one that comes
    just before the loop begins to wait is heard when the loop wakes for something else, so it has
    to have something that it does every second.
    """
    loop = asyncio.get_running_loop()
    for number in numbers:
        signal.signal(number, lambda which, _: loop.call_soon_threadsafe(heard, which))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
