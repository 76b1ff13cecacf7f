"""The tools of a job, and the one way to call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from bagent.clocks import unix
from bagent.redaction import Redactor
from bagent.tools.cutting import BYTES_PER_TOKEN
from bagent.tools.lane import Lane, ToolStats
from bagent.tools.pace import Latency
from bagent.tools.tool import Tool, ToolFault, ToolResult, bounded
from bagent.types import Json, ToolCall


class CallContext(msgspec.Struct, frozen=True):
    """What a call knows about the row that makes it.

    ``deadline``: the event loop's time after which nobody waits for the answer; None: no limit.
    """

    deadline: float | None = None


NO_CONTEXT = CallContext()


class ToolPool:
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
        self._lanes = {tool.name: Lane(tool, bytes_per_token) for tool in tools}
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
            f"there is no tool {bounded(name, 80)!r}; the tools are: {there}", "unknown_tool"
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
        text, kind = f"error: {bounded(answer.message)}", answer.kind
        message = bounded(answer.message)
        detail = message if kind == "failed" else f"{kind}: {message}"
        detail = f"{detail} ({answer.place})" if answer.place else detail
        trace = "" if shared else answer.trace
        return ToolResult(text, kind, shared, cached, latency_ms, started, detail, trace)
    return ToolResult(answer, None, shared, cached, latency_ms, started)
