"""Handling of signals in commands that wait for servers or are servers."""

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
    """Run ``work`` as ``asyncio.run`` does, and react to Ctrl-C at once.

    Python's own handler does not wake the loop, so a signal just before the loop begins to wait
    is handled only at the next event. The first Ctrl-C cancels ``work``; a second one does not
    wait for it.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    interrupted = False

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            nonlocal interrupted
            interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            if task is not None:
                task.cancel()

        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGINT, stop)
        return await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def handle_signals(numbers: Sequence[int], handler: Callable[[int], None]) -> Iterator[None]:
    """Call ``handler`` in the running loop for each of these signals; main thread only.

    Afterwards the signals are ignored, so that the process ends with its own exit code; the loop's
    own handlers would leave a moment in which a signal kills it. A signal just before the loop
    begins to wait is handled when the loop wakes, so the loop needs an event every second.
    """
    loop = asyncio.get_running_loop()
    for number in numbers:
        signal.signal(number, lambda which, _: loop.call_soon_threadsafe(handler, which))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
