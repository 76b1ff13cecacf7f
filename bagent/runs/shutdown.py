"""Early ends of a run: signals, the deadline, a spent budget, errors, a closed pipe."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_NEEDS_PERSON,
    EXIT_STOPPED,
    BagentError,
    StoppedEarly,
)
from bagent.observe.next_step import MORE_BUDGET
from bagent.runs.deadline import Deadline

HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""The signal of a closed terminal, unless it is ignored already (``nohup``)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, *HANG_UP)

GRACE_SECONDS = 5.0
"""How long requests in flight may take after a signal; PBS kills 10 s after it."""

AUTO_CONNECTIONS = 4096
"""Connections for which file descriptors are reserved by default."""

FLUSH_SECONDS = 8.0
"""How long the end of a run may take after draining."""


class Stop(msgspec.Struct, frozen=True):
    """An early end."""

    code: int
    """The exit code."""
    reason: str
    hint: str = ""
    """What a person should do."""
    grace: float = GRACE_SECONDS
    """Seconds for draining."""
    error: BaseException | None = None
    by_deadline: bool = False


class StopRequests:
    """Requests of another program to stop a run in one of its threads; use it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._listener: Callable[[], None] | None = None

    def request(self) -> None:
        """Stop the run after what is in flight; a second request does not wait for that."""
        with self._lock:
            self._count += 1
            if self._listener is not None:
                self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` for each request, also for those already made; None ends that."""
        with self._lock:
            self._listener = listener
            for _ in range(self._count if listener is not None else 0):
                assert listener is not None
                listener()


class StopSwitch:
    """Collects reasons to stop: the first one counts, and a later signal ends the draining.

    Use it inside the event loop. :meth:`close` restores the signals.

    Args:
        requests: another program's requests; None: this process's signals are such requests, and
            the loop runs in the main thread.
    """

    def __init__(self, requests: StopRequests | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self.requested: asyncio.Future[Stop] = self._loop.create_future()
        self.hurried = asyncio.Event()
        self.interrupted = False
        """Whether Ctrl-C came after another signal, for which the exit code is 130."""
        self._has_signal = False
        self._timer: asyncio.TimerHandle | None = None
        if requests is not None:
            requests.listen(self._notify_loop)
            return
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._signalled, number)

    def request(self, stop: Stop) -> None:
        """Stop for this reason, unless another one came first."""
        if not self.requested.done():
            self.requested.set_result(stop)

    def budget_exhausted(self, message: str, *, spent: bool) -> None:
        """Stop because a budget is spent; nothing is in flight any more.

        Args:
            spent: this start spent some of it, so the next one may do as much.
        """
        hint = MORE_BUDGET
        if spent:
            hint = "give --budget MORE; a budget is for one start: the same command may spend it"
            hint += " again"
        self.request(Stop(EXIT_NEEDS_PERSON, message, hint, grace=0.0))

    def stop_at(self, deadline: Deadline) -> None:
        """Stop feeding in time for ``deadline``, and drain within the rest of its margin."""
        wait = deadline.stop_feeding_at - time.time()
        grace = max(1.0, deadline.margin - FLUSH_SECONDS)
        remaining = deadline.at - time.time()
        reason, hint = f"the deadline is {min(remaining, deadline.margin):.0f} s away", ""
        if remaining <= 0:
            reason = f"the deadline has passed, {-remaining:.0f} s ago, by {deadline.source}"
            hint = "--deadline none runs without one"
        stop = Stop(EXIT_STOPPED, reason, hint, grace=grace, by_deadline=True)
        if wait <= 0:
            grace = max(0.0, min(grace, remaining - FLUSH_SECONDS))
            self.request(msgspec.structs.replace(stop, grace=grace))
        else:
            self._timer = self._loop.call_later(wait, self.request, stop)

    def close(self) -> None:
        """Stop listening."""
        if self._requests is not None:
            self._requests.listen(None)
        else:
            for number in STOP_SIGNALS:
                self._loop.remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()

    def _notify_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._requested)

    def _requested(self) -> None:
        if self.requested.done():
            self.hurried.set()
        else:
            self.request(Stop(EXIT_STOPPED, "the program asked it to stop"))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        is_repeated, self._has_signal = self._has_signal, True
        if not self.requested.done():
            reason = "interrupted" if number == signal.SIGINT else f"got {name}"
            self.request(Stop(EXIT_STOPPED, reason))
            return
        self.hurried.set()
        if number == signal.SIGINT and is_repeated:
            self.interrupted = True


def stop_for_stdout(error: OSError) -> Stop:
    """Return the stop for a failed write to stdout; the rows are in the journal."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Stop(EXIT_STOPPED, "stdout was closed")
    reason = f"cannot write to stdout: {error.strerror}"
    return Stop(EXIT_CANNOT_WRITE, reason, "make room where stdout goes to")


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect the signals of the block in a list, which is yielded first."""
    received: list[int] = []
    handlers = {n: signal.signal(n, lambda n, _: received.append(n)) for n in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals until the block has ended, such as while a run is locked and opened.

    A mask would hold only for this thread: the kernel would give the signal to another one, and
    Python runs its handler in the main thread all the same.
    """
    received: list[int] = []
    try:
        with collect_signals() as received:
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise on signals while no event loop runs, such as at a pipe without a first row.

    Raises:
        StoppedEarly: a signal came.
    """

    def stop(number: int, _: object) -> None:
        raise StoppedEarly(
            f"got {signal.Signals(number).name} before anything was sent",
            hint="give the same command again",
        )

    handlers = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_for_error(error: BaseException) -> Stop:
    """Return the stop for an error in the middle of a run.

    A usage error needs a person by then, since rows were sent already.
    """
    if isinstance(error, BagentError):
        code = EXIT_NEEDS_PERSON if error.exit_code == 2 else error.exit_code
        return Stop(code, str(error), error.hint, grace=2.0, error=error)
    return Stop(EXIT_NEEDS_PERSON, f"a fault in bagent: {error!r}", grace=2.0, error=error)


def raise_file_limit(concurrency: int | str) -> int:
    """Raise the soft limit of open files to the hard one; return how many connections may be open.

    Args:
        concurrency: the requested number, or ``auto``.
    """
    needed = max(AUTO_CONNECTIONS, 0 if concurrency == "auto" else int(concurrency))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    if soft < min(hard, needed + 128):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    open_now = Path("/proc/self/fd")
    in_use = sum(1 for _ in open_now.iterdir()) if open_now.is_dir() else 32
    return max(1, soft - in_use - 64)
