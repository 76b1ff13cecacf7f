"""What all ways to open a tool share: its schema, its policy, where it may put things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagent.answers.schema.schema import OutputSchema
from bagent.errors import SchemaError, UsageError
from bagent.job.spec.agent import ToolSpec
from bagent.process_privacy import is_ordinary
from bagent.tools.types import (
    DEFAULT_CACHE_SECONDS,
    DEFAULT_MAX_TOKENS,
    Run,
    RunMany,
    Tool,
    ToolPolicy,
)


@dataclass(frozen=True)
class ToolContext:
    """Where tools are opened.

    Attributes:
        base: the job's folder.
        env: the environment of the run.
        scratch: an empty folder that lives as long as the tools.
        stack: what is to be closed with them.
        allow_code: whether tools that run a model's code may be opened.
    """

    base: Path
    env: Mapping[str, str]
    scratch: Path
    stack: AsyncExitStack
    allow_code: bool


def load_schema(schema: Mapping[str, Any], base: Path, name: str) -> OutputSchema:
    """The schema of a tool's arguments, which are an object whatever it says.

    Raises:
        UsageError: it is no usable JSON Schema, or one for something else than objects.
    """
    whole = {"type": "object", **schema}
    try:
        if whole["type"] != "object":
            raise SchemaError("the arguments of a tool are an object", hint="type: object")
        return OutputSchema.load(whole, base=base)
    except SchemaError as error:
        raise UsageError(
            f"tool {name}: parameters: {error.message}", hint=error.hint, at=error.at
        ) from None


def make_policy(spec: ToolSpec, *, side_effects: bool, keeps: bool = False) -> ToolPolicy:
    """How calls are run: what the job says, else by whether running twice may do harm.

    Args:
        keeps: whether answers are kept where the job does not say. An answer without side effects
            may still be another one a moment later: the time, or a file that the agent changes.
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
    **more: Any,
) -> Tool:
    """A tool as the job has it.

    Args:
        description: what the model reads where the job has no words.
        more: ``side_effects`` (default: True), ``keeps`` (default: False), ``run_many``,
            ``abandoned``.
    """
    side_effects: bool = more.get("side_effects", True)
    run_many: RunMany | None = more.get("run_many")
    abandoned: Callable[[], int] = more.get("abandoned", lambda: 0)
    return Tool(
        name=name,
        description=description if spec.description is None else spec.description,
        schema=schema,
        run=run,
        side_effects=side_effects,
        policy=make_policy(spec, side_effects=side_effects, keeps=more.get("keeps", False)),
        run_many=run_many,
        abandoned=abandoned,
    )


def tool_environment(env: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """The ordinary variables of ``env``, and what the job names for the tool.

    A list of what may pass, since no list of what may not would be whole: keys are kept under any
    name.
    """
    return {**{name: env[name] for name in env if is_ordinary(name)}, **named}
