"""What a tool is to the pool, and what a call of it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from bagent.answers.schema.openai_strict import with_types
from bagent.answers.schema.schema import OutputSchema
from bagent.types import Json

FaultKind = Literal["unknown_tool", "bad_arguments", "failed", "timeout", "overloaded"]
"""Why a call has no good answer; the first two never ran."""

Arguments = dict[str, Any]
"""The arguments of one call, decoded and valid by the tool's schema."""

DEFAULT_MAX_TOKENS = 8_000
DEFAULT_CONCURRENCY = 16
DEFAULT_CACHE_SECONDS = 60.0

FAULT_CHARACTERS = 2_000
"""Longest fault that goes back to the model."""


class ToolFault(Exception):
    """A call that failed, in words for the model; the pool makes its result of it.

    ``place`` is the line of the tool's own code that failed, ``trace`` the whole traceback; both
    are empty where the tool is no Python code, or said itself that it failed.
    """

    def __init__(
        self, message: str, kind: FaultKind = "failed", *, place: str = "", trace: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.place = place
        self.trace = trace


class ToolResult(msgspec.Struct, frozen=True):
    """What one call gave back.

    ``text`` goes to the model, also where ``error`` says why there is no good answer. ``shared``:
    another call's run answered; ``cached``: an earlier run did. ``latency_ms`` is from the call to
    its answer, waiting included; ``started`` is when the call came, in Unix seconds. ``detail`` is
    the error for people, with the line of code that failed, ``trace`` the whole traceback.
    """

    text: str
    error: FaultKind | None = None
    shared: bool = False
    cached: bool = False
    latency_ms: float = 0.0
    started: float = 0.0
    detail: str | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """How calls of one tool are run.

    ``timeout`` is in seconds and bounds a run, not the waiting before it; None: no limit.
    ``rate_limit`` is in runs a second. ``cache_seconds`` is how long a good answer is kept; None:
    not at all. ``coalesce``: equal calls in flight share one run. ``batch``: different calls that
    come within a few milliseconds share one run.
    """

    timeout: float | None = 60.0
    rate_limit: float | None = None
    cache_seconds: float | None = None
    coalesce: bool = False
    max_tokens: int = DEFAULT_MAX_TOKENS
    concurrency: int = DEFAULT_CONCURRENCY


Run = Callable[[Arguments], Awaitable[str]]
RunMany = Callable[[Sequence[Arguments]], Awaitable[Sequence["str | ToolFault"]]]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool that a model may call.

    Attributes:
        name: what the model calls it.
        description: what the model reads about it.
        schema: JSON Schema of its arguments.
        run: answers one call; raises ToolFault, or anything else, where it fails.
        side_effects: False only if running it twice does no more than running it once.
        run_many: answers several calls at once, in their order; None: it cannot.
        abandoned: how many runs go on after their time limit because nothing can stop them.
    """

    name: str
    description: str
    schema: OutputSchema
    run: Run
    side_effects: bool = True
    policy: ToolPolicy = field(default_factory=ToolPolicy)
    run_many: RunMany | None = None
    abandoned: Callable[[], int] = lambda: 0

    @property
    def definition(self) -> Json:
        """The tool as ``tools`` of a chat request has it (OpenAI form)."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": with_types(self.schema.document),
            },
        }


def error_text(error: BaseException) -> str:
    """The words of an exception; none where it fails to say them, which is no reason to end."""
    words = ""
    with suppress(Exception):
        words = str(error)
    return words


def truncate_middle(text: str, limit: int = FAULT_CHARACTERS) -> str:
    """``text``, its middle left out where it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


BYTES_PER_TOKEN = 3.0
"""UTF-8 bytes that a token has at least, on average: four in English prose, three in code, JSON
and Chinese. A cut by it errs towards too short."""


def truncate(text: str, max_tokens: int, bytes_per_token: float = BYTES_PER_TOKEN) -> str:
    """``text``, or its start and a note where it has more than about ``max_tokens`` tokens."""
    most = int(max_tokens * bytes_per_token)
    if len(text) * 4 <= most:
        return text
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return text
    start = raw[:most].decode("utf-8", "ignore")
    return f"{start}\n[cut: the first {len(start):,} of {len(text):,} characters]"
