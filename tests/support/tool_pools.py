"""Pools of small tools, and jobs' tool entries opened as a run opens them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bagent.answers.schema.schema import OutputSchema
from bagent.job.spec.agent import ToolSpec
from bagent.job.validation import LoadContext
from bagent.tools import CallContext, Tool, ToolExecutor, ToolPolicy, ToolResult, open_tools
from bagent.types import ToolCall

ANY = {"type": "object"}
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "SECRET": "s3cret"}


def schema(document: Mapping[str, Any]) -> OutputSchema:
    """A tool's schema, as a pool wants it."""
    return OutputSchema.load(document, base=Path("/nonexistent"))


def tool(
    run: Callable[[dict[str, Any]], Awaitable[str]],
    document: Mapping[str, Any] = ANY,
    *,
    policy: ToolPolicy | None = None,
    **more: Any,
) -> Tool:
    """A tool named ``t``."""
    return Tool("t", "words", schema(document), run, policy=policy or ToolPolicy(), **more)


def asked(name: str, arguments: Any = None, **named: Any) -> ToolCall:
    """A call: arguments as they are, or the named ones as JSON."""
    text = json.dumps(named) if arguments is None else arguments
    return ToolCall("call-1", name, text)


async def answers(pool: ToolExecutor, name: str, many: list[dict[str, Any]]) -> list[ToolResult]:
    """The results of calls that all come at once."""
    return await asyncio.gather(*(pool.call(asked(name, **one)) for one in many))


def spec(base: Path, env: Mapping[str, str] = ENV, /, **keys: Any) -> ToolSpec:
    """One entry of ``agent.tools`` of a job in ``base``."""
    context = LoadContext(folder=base, cwd=base, env=env)
    made = ToolSpec.model_validate(keys, context=context)
    context.problems.raise_first()
    return made


@asynccontextmanager
async def opened(
    base: Path, *entries: Mapping[str, Any], env: Mapping[str, str] = ENV, allow_code: bool = False
) -> AsyncIterator[ToolExecutor]:
    """The pool of entries of ``agent.tools``."""
    specs = [spec(base, env, **entry) for entry in entries]
    async with open_tools(specs, base, env, allow_code=allow_code) as pool:
        yield pool


def once(
    base: Path,
    entry: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    env: Mapping[str, str] = ENV,
    deadline: float | None = None,
) -> ToolResult:
    """The result of one call of a pool of one tool."""

    async def main() -> ToolResult:
        async with opened(base, entry, env=env, allow_code=True) as pool:
            context = CallContext()
            if deadline is not None:
                context = CallContext(asyncio.get_running_loop().time() + deadline)
            (name,) = pool.names
            return await pool.call(asked(name, json.dumps(dict(arguments))), context)

    return asyncio.run(main())


def abandoned_runs(pool: ToolExecutor, name: str) -> int:
    """How many runs of a tool continue after their time limit."""
    tool = pool.tool(name)
    assert tool is not None
    return tool.abandoned()
