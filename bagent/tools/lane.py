"""The calls of one tool: shared runs, kept answers, pace, how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bagent.tools.arguments import canonical, check_arguments, read_arguments
from bagent.tools.cutting import cut
from bagent.tools.kept import Kept
from bagent.tools.pace import Latency, LatencyHistory, Pace
from bagent.tools.tool import Arguments, Tool, ToolFault, bounded, error_text
from bagent.tools.window import Window
from bagent.types import Json

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_TRACE_CHARACTERS = 8_000

T = TypeVar("T")
Answer = str | ToolFault


class ToolStats(msgspec.Struct, frozen=True):
    """One tool so far: calls by what became of them, and how long its runs took.

    ``runs`` counts the calls that it really worked on: a run that answered a batch of ten calls
    is one. ``abandoned`` runs are still going on after their time limit.
    """

    calls: int
    runs: int
    shared: int
    cached: int
    faults: int
    abandoned: int
    latency: Latency | None


class Flight:
    """One run and how many calls wait for it."""

    __slots__ = ("key", "task", "waiters")

    def __init__(self, key: bytes, task: asyncio.Task[str]) -> None:
        self.key = key
        self.task = task
        self.waiters = 0


class Lane:
    """All calls of one tool; see :class:`bagent.tools.pool.ToolPool`."""

    def __init__(self, tool: Tool, bytes_per_token: float) -> None:
        policy = tool.policy
        self.tool = tool
        self.latency = LatencyHistory()
        self.kept = Kept(policy.cache_seconds) if policy.cache_seconds else None
        self.counts = dict.fromkeys(("calls", "runs", "shared", "cached", "faults"), 0)
        self._bytes_per_token = bytes_per_token
        self._flights: dict[bytes, Flight] = {}
        self._all: set[asyncio.Task[str]] = set()
        self._pace = Pace(policy.rate_limit)
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._window = Window(self._run_many) if tool.run_many is not None else None

    async def answer(
        self, given: str | dict[str, Json] | None, limit: float | None
    ) -> tuple[Answer, bool, bool]:
        """The answer to one call, whether it was shared, and whether it was kept from earlier.

        Args:
            given: the arguments as the model wrote them.
            limit: seconds after which this call gives up; the run goes on for the others.
        """
        self.counts["calls"] += 1
        try:
            arguments = read_arguments(given)
            check_arguments(arguments, self.tool.schema)
        except ToolFault as fault:
            return fault, False, False
        key = canonical(arguments)
        if self.kept is not None:
            text = self.kept.get(key, asyncio.get_running_loop().time())
            if text is not None:
                self.counts["cached"] += 1
                return text, False, True
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            flight = self._start(key, arguments)
        else:
            self.counts["shared"] += 1
        return await self._wait(flight, limit), shared, False

    def stats(self) -> ToolStats:
        """The numbers so far."""
        return ToolStats(
            **self.counts, abandoned=self.tool.abandoned(), latency=self.latency.look()
        )

    async def close(self) -> None:
        """Stop all runs; calls that wait for them get a fault."""
        for task in self._all:
            task.cancel()
        if self._all:
            await asyncio.wait(self._all)

    # --- runs ---------------------------------------------------------------------------------

    def _start(self, key: bytes, arguments: Arguments) -> Flight:
        run = self._window.add(arguments) if self._window else self._run_one(arguments)
        flight = Flight(key, asyncio.ensure_future(self._cut(run)))
        self._all.add(flight.task)
        if self.tool.policy.coalesce:
            self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._ended(flight, task))
        return flight

    def _ended(self, flight: Flight, task: asyncio.Task[str]) -> None:
        self._all.discard(task)
        self._forget(flight)
        # Asking for the exception also says that it was not lost, where nobody waits any more.
        if not task.cancelled() and task.exception() is None and self.kept is not None:
            self.kept.put(flight.key, task.result(), asyncio.get_running_loop().time())

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _wait(self, flight: Flight, limit: float | None) -> Answer:
        flight.waiters += 1
        try:
            # Unlike await, this leaves the run alone when the one who waits is cancelled.
            await asyncio.wait((flight.task,), timeout=limit)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._forget(flight)
                flight.task.cancel()
        task = flight.task
        if not task.done():
            return ToolFault("there was no time left to wait for its answer", "timeout")
        if task.cancelled():
            return ToolFault("the call was stopped")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, ToolFault):
            return error
        return ToolFault(in_words(error), place=failing_line(error), trace=traceback_text(error))

    async def _cut(self, run: Awaitable[str]) -> str:
        return cut(await run, self.tool.policy.max_tokens, self._bytes_per_token)

    async def _run_one(self, arguments: Arguments) -> str:
        return await self._limited(lambda: self.tool.run(arguments))

    async def _run_many(self, calls: Sequence[Arguments]) -> Sequence[Answer]:
        run_many = self.tool.run_many
        assert run_many is not None
        return await self._limited(lambda: run_many(calls))

    async def _limited(self, run: Callable[[], Awaitable[T]]) -> T:
        seconds = self.tool.policy.timeout
        clock = asyncio.get_running_loop().time
        async with self._slots:
            await self._pace.wait()
            self.counts["runs"] += 1
            started = clock()
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await run()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ToolFault(
                    f"it took longer than {seconds:g} s and was stopped", "timeout"
                ) from None
            finally:
                self.latency.add((clock() - started) * 1000)


def failing_line(error: BaseException) -> str:
    """Return the first line of a traceback that is the tool's own: not of bagent, not of Python's
    library; empty where there is none."""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(_PACKAGE) and not path.is_relative_to(_LIBRARY):
            return f'File "{path.name}", line {frame.lineno}, in {frame.name}'
    return ""


def traceback_text(error: BaseException) -> str:
    """Return a whole traceback, its middle left out where it is long."""
    text = ""
    with contextlib.suppress(Exception):  # an exception's own words may fail
        text = "".join(traceback.format_exception(error))
    return bounded(text, _TRACE_CHARACTERS)


def in_words(error: BaseException) -> str:
    """One exception as the model may read it: its type and words, bounded."""
    words = bounded(error_text(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
