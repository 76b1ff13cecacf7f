"""What all agents of one stage share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from bagent.agents.streaming import StreamChoice
from bagent.backends.request import CallSettings
from bagent.types import Json, ToolCall, ToolRecord, Turn

if TYPE_CHECKING:
    from bagent.tools import CallContext, ToolResult


class Tools(Protocol):
    """Runs tool calls: :class:`bagent.tools.ToolPool` does."""

    definitions: list[Json]

    def has_side_effects(self, name: str) -> bool:
        """Whether a call that was cut off may have done something."""
        ...

    async def call(self, call: ToolCall, context: CallContext = ...) -> ToolResult:
        """Answer one call; raises nothing but CancelledError."""
        ...


class AgentLog(Protocol):
    """Where turns and tool calls are noted: :class:`bagent.store.journal.Journal`."""

    def write_turn(self, turn: Turn) -> None:
        """Write one turn; raises WriteError."""
        ...

    def write_tool(self, record: ToolRecord) -> None:
        """Note one tool call; raises WriteError."""
        ...


def _nothing(unit: int) -> list[Turn]:
    return []


def _ignore(_: str) -> None:
    return


class AgentPlan(msgspec.Struct, eq=False):
    """The tools of one stage's agents and the rules for their turns.

    ``earlier`` gives the turns that an earlier start of the run left of a conversation (by
    :func:`bagent.store.codec.unit_of`). ``max_turns`` bounds the model's turns of a row.
    ``first_choice`` is the ``tool_choice`` of the first turn. ``compact_at`` is the share of the
    context at which a conversation is made shorter, ``summary_settings`` are those of the model
    that sums up (None: old answers of tools are cut). ``shares``: equal rows may share an answer,
    since no tool has side effects. ``log_text`` takes text for the run's log, ``fail_on_tool``: a
    failed tool ends its row. ``streaming`` says which turns are streamed; None: all or none,
    as the stage's plan says.
    """

    tools: Tools
    log: AgentLog
    earlier: Callable[[int], list[Turn]] = _nothing
    max_turns: int = 6
    first_choice: Json = None
    compact_at: float = 0.85
    summary_settings: CallSettings | None = None
    shares: bool = False
    log_text: Callable[[str], None] = _ignore
    fail_on_tool: bool = False
    streaming: StreamChoice | None = None
