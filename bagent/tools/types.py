"""Tools, what they are opened with, their policies, and the results and errors of calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from bagent.answers.schema.dialects import with_types
from bagent.answers.schema.schema import OutputSchema
from bagent.errors import SchemaError, UsageError
from bagent.job.spec.agent import ToolSpec
from bagent.process_privacy import is_ordinary
from bagent.types import Json

FaultKind = Literal["unknown_tool", "bad_arguments", "failed", "timeout", "overloaded"]
"""Why a call has no good answer; the first two never ran."""

Arguments = dict[str, Any]
"""The arguments of one call, decoded and valid by the tool's schema."""

DEFAULT_MAX_TOKENS = 8_000
DEFAULT_CONCURRENCY = 16
DEFAULT_CACHE_SECONDS = 60.0


class ToolFault(Exception):
    """A failed call, with a message for the model; the executor makes its result of it.

    Args:
        message: the message.
        kind: the kind of failure.
        location: the line of the tool's own Python code that failed, if there is one.
        trace: its traceback.
    """

    def __init__(
        self, message: str, kind: FaultKind = "failed", *, location: str = "", trace: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.location = location
        self.trace = trace


class ToolResult(msgspec.Struct, frozen=True):
    """The result of one call."""

    text: str
    """The content of the tool message for the model, also after an error."""
    error: FaultKind | None = None
    shared: bool = False
    """The run of another call answered."""
    cached: bool = False
    """An earlier run answered."""
    latency_ms: float = 0.0
    """From the call to its answer, with the time that it waited."""
    started: float = 0.0
    """When the call came, in Unix seconds."""
    detail: str | None = None
    """The error for the user, with the line of code that failed."""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """How calls of one tool are run."""

    timeout: float | None = 60.0
    """Seconds that a run may take, without the time before it; None: no limit."""
    rate_limit: float | None = None
    """Runs a second."""
    cache_seconds: float | None = None
    """How long a good answer is cached; None: not at all."""
    coalesce: bool = False
    """Equal calls in flight share one run."""
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
        run: answers one call, or raises.
        side_effects: False only if running it twice has the effect of running it once.
        run_many: answers several calls at once, in their order; None: not possible.
        abandoned: returns how many runs continue after their time limit: threads cannot be stopped.
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
        """The tool in the form of a chat request (OpenAI)."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": with_types(self.schema.document),
            },
        }


def error_text(error: BaseException) -> str:
    """Return the message of an exception, empty where its ``__str__`` fails."""
    text = ""
    with suppress(Exception):
        text = str(error)
    return text


@dataclass(frozen=True)
class ToolContext:
    """What tools are opened with.

    Attributes:
        base: the job's folder.
        env: the environment of the run.
        scratch: an empty folder that is removed with the tools.
        stack: closes what they opened.
        allow_code: whether tools that run a model's code are allowed.
    """

    base: Path
    env: Mapping[str, str]
    scratch: Path
    stack: AsyncExitStack
    allow_code: bool


def load_schema(schema: Mapping[str, Any], base: Path, name: str) -> OutputSchema:
    """Load the schema of a tool's arguments.

    Raises:
        UsageError: it is no usable JSON Schema, or one for something else than objects.
    """
    document = {"type": "object", **schema}
    try:
        if document["type"] != "object":
            raise SchemaError("the arguments of a tool are an object", hint="type: object")
        return OutputSchema.load(document, base=base, allow_misspelled=True)
    except SchemaError as error:
        raise UsageError(
            f"tool {name}: parameters: {error.message}", hint=error.hint, at=error.at
        ) from None


def make_policy(spec: ToolSpec, *, side_effects: bool, keeps: bool = False) -> ToolPolicy:
    """Make the policy of a tool: what the job says, else by its side effects.

    Args:
        spec: the tool in the job.
        side_effects: whether its calls may have side effects.
        keeps: whether answers are cached where the job does not say. A tool without side effects
            may still give another answer a moment later, as of a file that the agent changes.
    """
    cache = keeps if spec.cache is None else spec.cache
    if isinstance(cache, bool):
        cache = DEFAULT_CACHE_SECONDS if cache else 0.0
    return ToolPolicy(
        timeout=spec.timeout,
        rate_limit=spec.rate_limit,
        cache_seconds=cache or None,
        coalesce=not side_effects if spec.coalesce is None else spec.coalesce,
        max_tokens=spec.max_tokens or DEFAULT_MAX_TOKENS,
        concurrency=spec.concurrency,
    )


def make_tool(
    spec: ToolSpec,
    name: str,
    description: str,
    schema: OutputSchema,
    run: Run,
    *,
    side_effects: bool = True,
    keeps: bool = False,
) -> Tool:
    """Make a tool; ``description`` is used where the job has none."""
    return Tool(
        name=name,
        description=description if spec.description is None else spec.description,
        schema=schema,
        run=run,
        side_effects=side_effects,
        policy=make_policy(spec, side_effects=side_effects, keeps=keeps),
    )


def tool_environment(env: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """Return the ordinary variables of ``env``, and those that the job sets for the tool.

    Other variables may hold keys under any name.
    """
    return {**{name: env[name] for name in env if is_ordinary(name)}, **named}
