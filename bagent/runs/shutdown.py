"""Why a run ends before its rows do: signals, the deadline, a file, guards, a closed pipe."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_STOPPED,
    BagentError,
    StoppedEarly,
)
from bagent.runs.deadline import Deadline

HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""The signal of a terminal that went away, unless whoever began this process (``nohup``) had it
ignored."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, *HANG_UP)

GRACE_SECONDS = 5.0
"""How long requests in flight may take to end after a signal: PBS kills 10 s after it."""

AUTO_CONNECTIONS = 4096
"""Connections for which room is made where the user names no number."""

FLUSH_SECONDS = 8.0
"""What the end of a run may take once it has stopped feeding and draining."""


class Stop(msgspec.Struct, frozen=True):
    """An early end: its exit code, why, what a person should do, and seconds left to drain."""

    code: int
    reason: str
    hint: str = ""
    grace: float = GRACE_SECONDS
    error: BaseException | None = None


class StopSwitch:
    """Collects reasons to stop; the first one counts, a second signal ends the draining.

    Use it inside the event loop, in the main thread; :meth:`close` gives the signals back.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[Stop] = self._loop.create_future()
        self.hurried = asyncio.Event()
        self.code: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._signalled, number)

    def ask(self, stop: Stop) -> None:
        """Stop for this reason, unless something else came first."""
        if not self.asked.done():
            self.code = stop.code
            self.asked.set_result(stop)

    def budget_exhausted(self, message: str) -> None:
        """Stop because a budget is spent; nothing is in flight any more."""
        hint = "raise limits.budget_usd (--budget) and run the same command again"
        self.ask(Stop(EXIT_NEEDS_PERSON, message, hint, grace=0.0))

    def stop_at(self, deadline: Deadline) -> None:
        """Stop feeding in time for ``deadline``, with what is left of its margin to drain."""
        wait = deadline.stop_feeding_at - time.time()
        grace = max(1.0, deadline.margin - FLUSH_SECONDS)
        left = deadline.at - time.time()
        words = f"the deadline is {min(left, deadline.margin):.0f} s away"
        if left <= 0:
            words = f"the deadline has passed, {-left:.0f} s ago, by {deadline.source}"
        hint = "" if left > 0 else "--deadline none runs without one"
        stop = Stop(EXIT_STOPPED, words, hint, grace=grace)
        if wait <= 0:
            left = deadline.at - time.time() - FLUSH_SECONDS
            self.ask(msgspec.structs.replace(stop, grace=max(0.0, min(grace, left))))
        else:
            self._timer = self._loop.call_later(wait, self.ask, stop)

    def close(self) -> None:
        """Stop listening."""
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.asked.done():
            words = "interrupted" if number == signal.SIGINT else f"got {name}"
            self.ask(Stop(EXIT_STOPPED, words))
            return
        self.hurried.set()
        if number == signal.SIGINT:
            self.code = EXIT_INTERRUPTED


def stop_for_stdout(error: OSError) -> Stop:
    """Why to stop once stdout takes no more rows; all of them are in the journal."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Stop(EXIT_STOPPED, "stdout was closed")
    words = f"cannot write to stdout: {error.strerror}"
    return Stop(EXIT_CANNOT_WRITE, words, "make room where stdout goes to")


@contextmanager
def defer_signals() -> Iterator[None]:
    """Signals wait until what is begun here is whole, such as owning and opening a run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Signals are stops also where no event loop runs yet, such as at a pipe without a first row.

    The loop's own handlers take over while it runs.

    Raises:
        StoppedEarly: a signal came.
    """

    def stop(number: int, _: object) -> None:
        raise StoppedEarly(f"got {signal.Signals(number).name} before anything was sent")

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_for_error(error: BaseException) -> Stop:
    """The early end that an error in the middle of a run means.

    Input that turns out broken on the way needs a person: rows were sent already.
    """
    if isinstance(error, BagentError):
        code = EXIT_NEEDS_PERSON if error.exit_code == 2 else error.exit_code
        return Stop(code, str(error), error.hint, grace=2.0, error=error)
    return Stop(EXIT_NEEDS_PERSON, f"a fault in bagent: {error!r}", grace=2.0, error=error)


def raise_file_limit(concurrency: int | str) -> int:
    """Raise the soft limit of open files to the hard one; returns how many may be used.

    ``concurrency`` is what the user asked for, or ``auto``; some handles are kept for everything
    else.
    """
    wanted = max(AUTO_CONNECTIONS, 0 if concurrency == "auto" else int(concurrency))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    if soft < min(hard, wanted + 128):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    open_now = Path("/proc/self/fd")
    in_use = sum(1 for _ in open_now.iterdir()) if open_now.is_dir() else 32
    return max(1, soft - in_use - 64)
