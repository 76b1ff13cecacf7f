"""The schema, policy and environment of a tool that is opened."""

from __future__ import annotations

from collections.abc import Mapping
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
    Tool,
    ToolPolicy,
)


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
        return OutputSchema.load(document, base=base)
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
