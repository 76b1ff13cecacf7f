"""What all conversations of one stage share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bagent.agents.streaming import StreamPolicy
from bagent.agents.token_budget import TokenBudget
from bagent.answers.schema.schema import OutputSchema
from bagent.backends.request import CallSettings
from bagent.fleet.call import Call
from bagent.types import Json, Message, Outcome, ToolCall, ToolRecord, Turn

if TYPE_CHECKING:
    from bagent.agents.conversation import Conversation
    from bagent.agents.external_agent import ProgramPlan
    from bagent.tools import CallContext, ToolResult


class Tools(Protocol):
    """Runs tool calls: :class:`bagent.tools.ToolExecutor` does."""

    definitions: list[Json]

    def has_side_effects(self, name: str) -> bool:
        """Whether a call that was cut off may have done something."""
        ...

    async def call(self, call: ToolCall, context: CallContext = ...) -> ToolResult:
        """Answer one call; raises nothing but CancelledError."""
        ...


class AgentLog(Protocol):
    """Where turns and tool calls are noted: :class:`bagent.store.journal.journal.Journal`."""

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
    :func:`bagent.store.journal.codec.unit_of`). ``max_turns`` bounds the model's turns of a row.
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
    streaming: StreamPolicy | None = None


STREAM_EVERY = 50
"""One call in so many is streamed by ``stream: auto``, for its first-token time."""

MOST_HASHES = 256
"""Beginnings of hashes that are kept: one for each limit and seed, of which there may be many."""


class Renderer(Protocol):
    """Makes a row's prompt: :class:`bagent.job.templates.prompt.Prompt` does."""

    raw: bool

    def render(
        self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None
    ) -> list[Message]:
        """Messages of one row; raises :class:`bagent.job.templates.template.TemplateFailure`."""
        ...

    def render_raw(self, data: Mapping[str, Json], extra: Mapping[str, Json] | None = None) -> str:
        """Raw text of one row; raises like :meth:`render`."""
        ...


class StagePlan(msgspec.Struct, eq=False):
    """One stage's prompt, settings and rules for answers; the same for all its rows.

    ``reasks`` is how often an invalid answer is asked again; ``grow`` multiplies ``max_tokens``
    once for a truncated one, ``truncated`` is the job's ``output.truncated``. ``row_seconds``
    bounds a row, from its first call being ready.
    ``own_bodies`` says that rows are request bodies themselves (an OpenAI batch file). ``agent``
    has the tools that rows may call, ``program`` the program that answers them; None where there is
    none.
    """

    name: str
    prompt: Renderer
    settings: CallSettings
    schema: OutputSchema | None
    budget: TokenBudget
    describe: bool = False
    reasks: int = 2
    grow: float = 1.0
    truncated: str | None = None
    stream: bool | None = None
    answers: int = 1
    row_seconds: float | None = None
    own_bodies: bool = False
    own_bodies_keep_model: bool = True
    agent: AgentPlan | None = None
    program: ProgramPlan | None = None
    price: Callable[[str | None, Json], float | None] | None = None
    _count: int = 0
    _begun_hashes: dict[tuple[int, int], Any] = {}

    def streamed(self) -> bool:
        """Whether the next call is streamed."""
        if self.stream is not None:
            return self.stream
        self._count += 1
        return self._count % STREAM_EVERY == 1

    @property
    def offers_tools(self) -> bool:
        """Whether requests name tools that nobody here runs, so that calls of them are answers."""
        return self.own_bodies or "tools" in self.settings.extra

    def request_hash(self, payload: bytes, max_tokens: int | None, seed: int | None) -> int:
        """64 bits that name the exact request: settings, prompt, limit and seed."""
        besides = max_tokens or 0, -1 if seed is None else seed
        begun = self._begun_hashes.get(besides)
        if begun is None:
            words = self.settings.fingerprint() + b"%d/%d/" % besides
            if len(self._begun_hashes) >= MOST_HASHES:
                self._begun_hashes.clear()
            begun = self._begun_hashes[besides] = hashlib.blake2b(words, digest_size=8)
        digest = begun.copy()
        digest.update(payload)
        return int.from_bytes(digest.digest(), "big")


class ConversationHost(Protocol):
    """Sends the calls of conversations and takes their end; the stage engine is one."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def ask(self, conversation: Conversation, call: Call) -> None:
        """Send a further call of a running conversation."""
        ...

    def finish(self, conversation: Conversation, outcome: Outcome) -> None:
        """Take the end of the conversation."""
        ...


class AgentHost(ConversationHost, Protocol):
    """What a conversation with tools needs besides."""

    @property
    def closing(self) -> bool:
        """Whether the run is ending early: nothing new is begun."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that is waited for, or cancelled, at the run's end; its fault ends the run."""
        ...
