"""The executor of tool calls: it reads arguments, shares, caches, limits and runs calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sysconfig
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bagent.answers.schema.schema import OutputSchema
from bagent.clocks import unix
from bagent.redaction import NO_SECRETS, Redactor
from bagent.text.json import decode_json
from bagent.text.unicode import MAX_DEPTH, clean_json, nested_deeper
from bagent.tools.truncate import shorten, truncate
from bagent.tools.types import Arguments, Tool, ToolFault, ToolResult, error_text
from bagent.types import Json, ToolCall

MOST_BYTES = 1 << 20
"""Longest argument text that is read."""

MAX_ENTRIES = 1024


def read_arguments(raw: str | Mapping[str, Json] | None) -> Arguments:
    """Return the object that ``raw`` is: a mapping, its JSON text, or that text as a JSON string.

    None, an empty text and ``null`` are no arguments.

    Raises:
        ToolFault: it is none of these.
    """
    value: Json = raw
    for _ in range(2):
        if isinstance(value, str):
            value = _decoded(value, outer=value is raw)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        text = shorten(repr(value), 80)
        raise ToolFault(f"the arguments are {text}, not a JSON object", "bad_arguments")
    if nested_deeper(dict(value)):
        raise ToolFault(f"the arguments are nested deeper than {MAX_DEPTH} levels", "bad_arguments")
    cleaned: Arguments = clean_json(dict(value))
    return cleaned


def _decoded(text: str, *, outer: bool) -> Json:
    if not text.strip():
        return None
    if len(text) > MOST_BYTES:
        raise ToolFault(f"the arguments are longer than {MOST_BYTES:,} characters", "bad_arguments")
    try:
        return decode_json(text)
    except ValueError as error:
        if not outer:  # the JSON string holds no JSON
            raise ToolFault(
                f"the arguments are {shorten(repr(text), 80)}, not a JSON object", "bad_arguments"
            ) from None
        raise ToolFault(
            f"the arguments are not JSON: {shorten(str(error))}; they begin {text[:80]!r}",
            "bad_arguments",
        ) from None


def check_arguments(arguments: Arguments, schema: OutputSchema) -> None:
    """Raise ToolFault where ``arguments`` do not fit ``schema``."""
    if not schema.accepts_clean(arguments):
        faults = schema.explain(arguments) or ["/: not what the schema asks for"]
        raise ToolFault("the arguments do not fit: " + "; ".join(faults), "bad_arguments")


def canonical(arguments: Arguments) -> bytes:
    """Return equal bytes for equal arguments, whatever the order of their keys."""
    try:
        return msgspec.json.encode(arguments, order="deterministic")
    except OverflowError:  # numbers beyond 64 bits
        return json.dumps(arguments, sort_keys=True, separators=(",", ":")).encode()


class TTLCache:
    """The cached answers of one tool, each valid for ``seconds``; at most MAX_ENTRIES, by LRU."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def get(self, key: bytes, now: float) -> str | None:
        """Return the answer of ``key``, None if there is none or it has expired at ``now``."""
        entry = self._answers.get(key)
        if entry is None:
            return None
        if now >= entry[0]:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, text: str, now: float) -> None:
        """Cache an answer that came at ``now``."""
        self._answers[key] = (now + self._seconds, text)
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_ENTRIES:
            self._answers.popitem(last=False)


BATCH_SECONDS = 0.005
MAX_BATCH = 100

Answers = Sequence[str | ToolFault]


class MicroBatcher:
    """Gathers calls for BATCH_SECONDS after the first one, or until there are MAX_BATCH.

    A call that is cancelled before the batch starts is left out. Later its answer is discarded, and
    a run whose calls are all cancelled is cancelled too.

    Args:
        run: answers the gathered calls, in their order.
    """

    def __init__(self, run: Callable[[Sequence[Arguments]], Awaitable[Answers]]) -> None:
        self._run = run
        self._open: list[tuple[Arguments, asyncio.Future[str]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[Answers]] = set()

    async def add(self, arguments: Arguments) -> str:
        """Return the answer to one call from a shared run, or raise what the run raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._open.append((arguments, answer))
        if len(self._open) >= MAX_BATCH:
            self._close()
        elif self._timer is None:
            self._timer = loop.call_later(BATCH_SECONDS, self._close)
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
        for index, answer in enumerate(waiting):
            if answer.done():
                continue
            if task.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            elif isinstance(result := answers[index], ToolFault):
                answer.set_exception(result)
            else:
                answer.set_result(result)


class ToolRateLimiter:
    """A token bucket of one token: runs start at least ``1 / rate`` seconds apart.

    With more tokens a burst after a quiet time would exceed the job's rate.
    """

    def __init__(self, rate: float | None) -> None:
        self._gap = 1 / rate if rate else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until a run may start; waiters go in order, and a cancelled one takes no turn."""
        if not self._gap:
            return
        clock = asyncio.get_running_loop().time
        async with self._turn:
            wait = self._next - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            self._next = max(self._next, clock()) + self._gap


_PACKAGE = Path(__file__).parents[1]
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_TRACE_CHARACTERS = 8_000

T = TypeVar("T")
Answer = str | ToolFault


class InFlightCall:
    """One run and the number of calls that wait for it."""

    __slots__ = ("key", "task", "waiters")

    def __init__(self, key: bytes, task: asyncio.Task[str]) -> None:
        self.key = key
        self.task = task
        self.waiters = 0


class ToolRunner:
    """Runs the calls of one tool."""

    def __init__(self, tool: Tool) -> None:
        policy = tool.policy
        self.tool = tool
        self.cache = TTLCache(policy.cache_seconds) if policy.cache_seconds else None
        self._flights: dict[bytes, InFlightCall] = {}
        self._all: set[asyncio.Task[str]] = set()
        self._pace = ToolRateLimiter(policy.rate_limit)
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._window = MicroBatcher(self._run_many) if tool.run_many is not None else None

    async def answer(
        self, arguments_text: str | dict[str, Json] | None, limit: float | None
    ) -> tuple[Answer, bool, bool]:
        """Return the answer to one call, whether it was shared, and whether it was cached.

        Args:
            arguments_text: the arguments as the model wrote them.
            limit: seconds after which this call gives up; the run continues for others.
        """
        try:
            arguments = read_arguments(arguments_text)
            check_arguments(arguments, self.tool.schema)
        except ToolFault as fault:
            return fault, False, False
        key = canonical(arguments)
        if self.cache is not None:
            text = self.cache.get(key, asyncio.get_running_loop().time())
            if text is not None:
                return text, False, True
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            flight = self._start(key, arguments)
        return await self._wait(flight, limit), shared, False

    def cancel(self) -> set[asyncio.Task[str]]:
        """Cancel all runs and return them; calls that wait for them get an error."""
        for task in self._all:
            task.cancel()
        return set(self._all)

    # --- runs ---------------------------------------------------------------------------------

    def _start(self, key: bytes, arguments: Arguments) -> InFlightCall:
        run = self._window.add(arguments) if self._window else self._run_one(arguments)
        flight = InFlightCall(key, asyncio.ensure_future(self._text_for_model(run)))
        self._all.add(flight.task)
        if self.tool.policy.coalesce:
            self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._ended(flight, task))
        return flight

    def _ended(self, flight: InFlightCall, task: asyncio.Task[str]) -> None:
        self._all.discard(task)
        self._forget(flight)
        # Reading the exception marks it as retrieved, where nothing waits for it any more.
        if not task.cancelled() and task.exception() is None and self.cache is not None:
            self.cache.put(flight.key, task.result(), asyncio.get_running_loop().time())

    def _forget(self, flight: InFlightCall) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _wait(self, flight: InFlightCall, limit: float | None) -> Answer:
        flight.waiters += 1
        try:
            # Unlike await, this does not cancel the run when the waiting call is cancelled.
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
            describe_exception(error), location=failing_line(error), trace=traceback_text(error)
        )

    async def _text_for_model(self, run: Awaitable[str]) -> str:
        """Return the result of a run as it is shared, cached, sent to the model and written."""
        return truncate(await run, self.tool.policy.max_tokens)

    async def _run_one(self, arguments: Arguments) -> str:
        return await self._limited(lambda: self.tool.run(arguments))

    async def _run_many(self, calls: Sequence[Arguments]) -> Sequence[Answer]:
        run_many = self.tool.run_many
        assert run_many is not None
        return await self._limited(lambda: run_many(calls))

    async def _limited(self, run: Callable[[], Awaitable[T]]) -> T:
        seconds = self.tool.policy.timeout
        async with self._slots:
            await self._pace.wait()
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await run()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ToolFault(
                    f"it took longer than {seconds:g} s and was stopped", "timeout"
                ) from None


def failing_line(error: BaseException) -> str:
    """Return the first line of a traceback that is the tool's own, empty if there is none."""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(_PACKAGE) and not path.is_relative_to(_LIBRARY):
            return f'File "{path.name}", line {frame.lineno}, in {frame.name}'
    return ""


def traceback_text(error: BaseException) -> str:
    """Return a traceback, with its middle left out where it is long."""
    text = ""
    with contextlib.suppress(Exception):  # an exception's own message may fail
        text = "".join(traceback.format_exception(error))
    return shorten(text, _TRACE_CHARACTERS)


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, bounded."""
    message = shorten(error_text(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class CallContext(msgspec.Struct, frozen=True):
    """The context of a call."""

    deadline: float | None = None
    """The event loop's time after which the row gives up; None: no limit."""


NO_CONTEXT = CallContext()


class ToolExecutor:
    """Runs the tool calls of models, in one event loop.

    Faults are results: :meth:`call` raises only ``CancelledError``, when its task is cancelled.

    Args:
        tools: the tools, in the order of ``definitions``.
        redact: masks secrets in the errors of tools, which go to the model and the journal.
        wall: returns Unix seconds, for ``ToolResult.started``.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        redact: Redactor = NO_SECRETS,
        wall: Callable[[], float] = unix,
    ) -> None:
        self._redact = redact
        self._wall = wall
        self._runners = {tool.name: ToolRunner(tool) for tool in tools}
        self.definitions: list[Json] = [tool.definition for tool in tools]
        """The tools in the form of a chat request, always in the same order."""

    @property
    def names(self) -> list[str]:
        """The names of the tools, in the order of ``definitions``."""
        return list(self._runners)

    def tool(self, name: str) -> Tool | None:
        """Return one tool; None if there is none of that name."""
        runner = self._runners.get(name)
        return None if runner is None else runner.tool

    def has_side_effects(self, name: str) -> bool:
        """Return whether an interrupted call may have had an effect; False for unknown tools."""
        runner = self._runners.get(name)
        return runner is not None and runner.tool.side_effects

    async def call(self, call: ToolCall, context: CallContext = NO_CONTEXT) -> ToolResult:
        """Answer one call.

        Cancelling one of several calls that share a run leaves the run to the others; a run that no
        call waits for is stopped.
        """
        clock = asyncio.get_running_loop().time
        began, started = clock(), self._wall()
        runner = self._runners.get(call.name)
        if runner is None:
            return _result(self._no_such_tool(call.name), started)
        limit = None if context.deadline is None else max(0.0, context.deadline - began)
        answer, shared, cached = await runner.answer(call.arguments, limit)
        if isinstance(answer, ToolFault):
            answer = ToolFault(
                self._redact(answer.message),
                answer.kind,
                location=self._redact(answer.location),
                trace=self._redact(answer.trace),
            )
        took = round((clock() - began) * 1000, 3)
        return _result(answer, started, shared=shared, cached=cached, latency_ms=took)

    def _no_such_tool(self, name: str) -> ToolFault:
        there = ", ".join(self._runners) or "none"
        problem = f"there is no tool {shorten(name, 80)!r}" if name else "the call names no tool"
        return ToolFault(f"{problem}; the tools are: {there}", "unknown_tool")

    async def close(self) -> None:
        """Stop all runs."""
        cancelled = set().union(*(runner.cancel() for runner in self._runners.values()))
        if cancelled:
            await asyncio.wait(cancelled)


def _result(
    answer: str | ToolFault,
    started: float,
    *,
    shared: bool = False,
    cached: bool = False,
    latency_ms: float = 0.0,
) -> ToolResult:
    if isinstance(answer, ToolFault):
        text, kind = f"error: {shorten(answer.message)}", answer.kind
        message = shorten(answer.message)
        detail = message if kind == "failed" else f"{kind}: {message}"
        detail = f"{detail} ({answer.location})" if answer.location else detail
        trace = "" if shared else answer.trace
        return ToolResult(text, kind, shared, cached, latency_ms, started, detail, trace)
    return ToolResult(answer, None, shared, cached, latency_ms, started)
