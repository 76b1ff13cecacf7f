"""The tools of a job, and the one way to call them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sysconfig
import traceback
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bagent.clocks import unix
from bagent.redaction import Redactor
from bagent.tools.arguments import canonical, check_arguments, read_arguments
from bagent.tools.types import (
    BYTES_PER_TOKEN,
    Arguments,
    Tool,
    ToolFault,
    ToolResult,
    error_text,
    truncate,
    truncate_middle,
)
from bagent.types import Json, ToolCall

MAX_ENTRIES = 1024


class TTLCache:
    """The answers of one tool, each for ``seconds``; the one asked for longest ago goes first.

    Args:
        seconds: how long an answer may be given again.
        most: how many answers there are at most.
    """

    def __init__(self, seconds: float, most: int = MAX_ENTRIES) -> None:
        self._seconds = seconds
        self._most = most
        self._answers: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes, now: float) -> str | None:
        """The answer of ``key``, None if there is none or it is too old at ``now`` (seconds)."""
        found = self._answers.get(key)
        if found is None:
            return None
        if now >= found[0]:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return found[1]

    def put(self, key: bytes, text: str, now: float) -> None:
        """Keep an answer that came at ``now``."""
        self._answers[key] = (now + self._seconds, text)
        self._answers.move_to_end(key)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)


SECONDS = 0.005
MAX_BATCH = 100

Answers = Sequence[str | ToolFault]


class MicroBatcher:
    """Gathers calls for ``seconds`` after the first one, or until there are ``most``.

    A call that is cancelled before its window closes is left out of it; later its answer is
    thrown away, and when all calls of a window are cancelled, so is its run.

    Args:
        run: answers the gathered calls, in their order.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Arguments]], Awaitable[Answers]],
        seconds: float = SECONDS,
        most: int = MAX_BATCH,
    ) -> None:
        self._run = run
        self._seconds = seconds
        self._most = most
        self._open: list[tuple[Arguments, asyncio.Future[str]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[Answers]] = set()

    async def add(self, arguments: Arguments) -> str:
        """The answer to one call, from a run that it shares.

        Raises:
            ToolFault, or whatever the run raises.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._open.append((arguments, answer))
        if len(self._open) >= self._most:
            self._close()
        elif self._timer is None:
            self._timer = loop.call_later(self._seconds, self._close)
        return await answer

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls = [call for call in self._open if not call[1].done()]
        self._open = []
        if not calls:
            return
        waiting = [answer for _, answer in calls]
        task = asyncio.ensure_future(self._run([call[0] for call in calls]))
        self._running.add(task)
        task.add_done_callback(lambda ended: self._deliver(ended, waiting))
        for answer in waiting:
            answer.add_done_callback(lambda _: self._leave(task, waiting))

    def _leave(self, task: asyncio.Task[Answers], waiting: Sequence[asyncio.Future[str]]) -> None:
        if all(answer.cancelled() for answer in waiting):
            task.cancel()

    def _deliver(self, task: asyncio.Task[Answers], waiting: list[asyncio.Future[str]]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        answers: Answers = () if task.cancelled() or error else task.result()
        if not error and not task.cancelled() and len(answers) != len(waiting):
            error = ToolFault(f"{len(answers)} answers for {len(waiting)} calls")
        for place, answer in enumerate(waiting):
            if answer.done():
                continue
            if task.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            elif isinstance(one := answers[place], ToolFault):
                answer.set_exception(one)
            else:
                answer.set_result(one)


HISTORY = 1024


class ToolRateLimiter:
    """A token bucket of one token: runs start at least ``1 / rate`` seconds apart.

    More tokens would let a burst through after a quiet time, and with it more calls in a second
    than the job allows. Time is the event loop's.
    """

    def __init__(self, rate: float | None) -> None:
        self._gap = 1 / rate if rate else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when a run may start; waiters go in their order, and cost nothing if cancelled."""
        if not self._gap:
            return
        clock = asyncio.get_running_loop().time
        async with self._turn:
            wait = self._next - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            self._next = max(self._next, clock()) + self._gap


class Latency(msgspec.Struct, frozen=True):
    """How long runs of a tool took: percentiles in milliseconds over the last 1,024."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class LatencyHistory:
    """The last 1,024 durations of one tool's runs."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=HISTORY)
        self._count = 0

    def add(self, milliseconds: float) -> None:
        """Note one run."""
        self._last.append(milliseconds)
        self._count += 1

    def look(self) -> Latency | None:
        """The percentiles (nearest rank); None before the first run."""
        if not self._last:
            return None
        values = sorted(self._last)

        def rank(share: float) -> float:
            return values[math.ceil(share * len(values)) - 1]

        return Latency(self._count, rank(0.5), rank(0.9), rank(0.99))


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


class InFlightCall:
    """One run and how many calls wait for it."""

    __slots__ = ("key", "task", "waiters")

    def __init__(self, key: bytes, task: asyncio.Task[str]) -> None:
        self.key = key
        self.task = task
        self.waiters = 0


class ToolRunner:
    """All calls of one tool; see :class:`bagent.tools.executor.ToolExecutor`."""

    def __init__(self, tool: Tool, bytes_per_token: float) -> None:
        policy = tool.policy
        self.tool = tool
        self.latency = LatencyHistory()
        self.kept = TTLCache(policy.cache_seconds) if policy.cache_seconds else None
        self.counts = dict.fromkeys(("calls", "runs", "shared", "cached", "faults"), 0)
        self._bytes_per_token = bytes_per_token
        self._flights: dict[bytes, InFlightCall] = {}
        self._all: set[asyncio.Task[str]] = set()
        self._pace = ToolRateLimiter(policy.rate_limit)
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._window = MicroBatcher(self._run_many) if tool.run_many is not None else None

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

    def _start(self, key: bytes, arguments: Arguments) -> InFlightCall:
        run = self._window.add(arguments) if self._window else self._run_one(arguments)
        flight = InFlightCall(key, asyncio.ensure_future(self._cut(run)))
        self._all.add(flight.task)
        if self.tool.policy.coalesce:
            self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._ended(flight, task))
        return flight

    def _ended(self, flight: InFlightCall, task: asyncio.Task[str]) -> None:
        self._all.discard(task)
        self._forget(flight)
        # Asking for the exception also says that it was not lost, where nobody waits any more.
        if not task.cancelled() and task.exception() is None and self.kept is not None:
            self.kept.put(flight.key, task.result(), asyncio.get_running_loop().time())

    def _forget(self, flight: InFlightCall) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _wait(self, flight: InFlightCall, limit: float | None) -> Answer:
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
        return ToolFault(
            describe_exception(error), place=failing_line(error), trace=traceback_text(error)
        )

    async def _cut(self, run: Awaitable[str]) -> str:
        return truncate(await run, self.tool.policy.max_tokens, self._bytes_per_token)

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
    return truncate_middle(text, _TRACE_CHARACTERS)


def describe_exception(error: BaseException) -> str:
    """One exception as the model may read it: its type and words, bounded."""
    words = truncate_middle(error_text(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


class CallContext(msgspec.Struct, frozen=True):
    """What a call knows about the row that makes it.

    ``deadline``: the event loop's time after which nobody waits for the answer; None: no limit.
    """

    deadline: float | None = None


NO_CONTEXT = CallContext()


class ToolExecutor:
    """Runs the calls that models ask for; use it in one event loop.

    Only tools that it was given are run. Every fault is a result: :meth:`call` raises nothing but
    ``CancelledError``, when its own task is cancelled.

    Args:
        tools: the tools, in the order of ``definitions``.
        wall: Unix seconds, for ``ToolResult.started``.
        bytes_per_token: by which answers are cut.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        wall: Callable[[], float] = unix,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        self._wall = wall
        self._lanes = {tool.name: ToolRunner(tool, bytes_per_token) for tool in tools}
        self._unknown = 0
        self.definitions: list[Json] = [tool.definition for tool in tools]
        """The tools as ``tools`` of a chat request has them, always in the same order."""
        self.redact = Redactor()
        """Masks secrets in what a tool says of its failure: the model and the journal get it."""

    def __contains__(self, name: str) -> bool:
        return name in self._lanes

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def names(self) -> list[str]:
        """The names of the tools, in the order of ``definitions``."""
        return list(self._lanes)

    @property
    def unknown_calls(self) -> int:
        """Calls of tools that are not in the pool."""
        return self._unknown

    def tool(self, name: str) -> Tool | None:
        """One tool; None if there is none of that name."""
        lane = self._lanes.get(name)
        return None if lane is None else lane.tool

    def has_side_effects(self, name: str) -> bool:
        """Whether a call that was cut off may have done something; False for unknown tools."""
        lane = self._lanes.get(name)
        return lane is not None and lane.tool.side_effects

    def latency(self, name: str) -> Latency | None:
        """How long runs of a tool took; None before its first run."""
        lane = self._lanes.get(name)
        return None if lane is None else lane.latency.look()

    def stats(self) -> dict[str, ToolStats]:
        """The numbers of every tool so far."""
        return {name: lane.stats() for name, lane in self._lanes.items()}

    async def call(self, call: ToolCall, context: CallContext = NO_CONTEXT) -> ToolResult:
        """Answer one call.

        Where several equal calls share a run, cancelling one leaves the run to the others; a run
        that nobody waits for any more is stopped.
        """
        clock = asyncio.get_running_loop().time
        began, started = clock(), self._wall()
        lane = self._lanes.get(call.name)
        if lane is None:
            self._unknown += 1
            return _result(self._no_such_tool(call.name), started)
        limit = None if context.deadline is None else max(0.0, context.deadline - began)
        answer, shared, cached = await lane.answer(call.arguments, limit)
        if isinstance(answer, ToolFault):
            lane.counts["faults"] += 1
            answer = ToolFault(
                self.redact(answer.message),
                answer.kind,
                place=self.redact(answer.place),
                trace=self.redact(answer.trace),
            )
        took = round((clock() - began) * 1000, 3)
        return _result(answer, started, shared=shared, cached=cached, latency_ms=took)

    def _no_such_tool(self, name: str) -> ToolFault:
        there = ", ".join(self._lanes) or "none"
        return ToolFault(
            f"there is no tool {truncate_middle(name, 80)!r}; the tools are: {there}",
            "unknown_tool",
        )

    async def close(self) -> None:
        """Stop all runs."""
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))


def _result(
    answer: str | ToolFault,
    started: float,
    *,
    shared: bool = False,
    cached: bool = False,
    latency_ms: float = 0.0,
) -> ToolResult:
    if isinstance(answer, ToolFault):
        text, kind = f"error: {truncate_middle(answer.message)}", answer.kind
        message = truncate_middle(answer.message)
        detail = message if kind == "failed" else f"{kind}: {message}"
        detail = f"{detail} ({answer.place})" if answer.place else detail
        trace = "" if shared else answer.trace
        return ToolResult(text, kind, shared, cached, latency_ms, started, detail, trace)
    return ToolResult(answer, None, shared, cached, latency_ms, started)
