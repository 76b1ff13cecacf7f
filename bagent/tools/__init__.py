"""What an agent may call: the tools of a job, and the pool that runs their calls.

The interface for who writes a turn loop::

    async with open_tools(agent.tools, base=folder, env=env, allow_code=...) as pool:
        request["tools"] = pool.definitions           # OpenAI form, always in the same order
        result = await pool.call(call, CallContext(deadline=loop.time() + 60))

``open_tools`` checks everything that can be checked before the first row (missing functions,
programs, files, keys, packages; names that clash) and raises a ``UsageError`` that says where.

``pool.call(ToolCall, CallContext) -> ToolResult`` never raises but for ``CancelledError`` in the
task that awaits it. It may be called as soon as the arguments of a call are complete, before the
rest of the turn has come; calls of one turn may run side by side. ``result.text`` is the content
of the tool message in every case; ``result.error`` says why there is no good answer:

    unknown_tool    no such tool in the job; nothing ran
    bad_arguments   half JSON, no object, or not what the schema asks for; nothing ran
    failed          the tool ran, or began to, and failed
    timeout         the tool's time limit, or the caller's deadline
    overloaded      too many earlier runs of it cannot be stopped; nothing ran

``shared``, ``cached``, ``started`` and ``latency_ms`` are for the ``tool_calls`` table.

What a call goes through: its arguments are read (text, an object, text within text; nothing and
null are no arguments) and checked against the tool's JSON Schema; a kept answer is given (LRU of
1,024, for ``cache`` seconds); an equal call in flight is joined (``coalesce``); else, for tools
with ``batch``, calls are gathered for 5 ms; then a slot (``concurrency``), then the pace
(``rate_limit``), then the run within its ``timeout``; its answer is cut at ``max_tokens``.

A shared run outlives its first caller: it is stopped only when all its callers are gone. Stopping
kills a program's process group, interrupts a query, cancels a coroutine; a Python function in a
thread cannot be stopped, goes on, and is counted (``ToolStats.abandoned``).

Calls of tools with side effects are neither shared nor kept unless the job says so
(``coalesce: true``, ``cache: true``). Kept unless the job says otherwise, for 60 s, are answers of
``http_get``, ``web_search`` and ``sql``. Free of side effects are ``http_get``, ``read_file``,
``web_search``, ``sql``, and tools of MCP servers with ``readOnlyHint``; functions, commands,
``python_eval``, ``shell`` and other MCP tools count as having them.
``pool.has_side_effects(name)`` tells whether a call that was cut off may have done something.

``pool.latency(name)`` gives percentiles of run times, ``pool.stats()`` counts.
"""

from __future__ import annotations

from bagent.tools.executor import CallContext, Latency, ToolExecutor, ToolStats
from bagent.tools.loader import open_tools
from bagent.tools.types import FaultKind, Tool, ToolFault, ToolPolicy, ToolResult

__all__ = [
    "CallContext",
    "FaultKind",
    "Latency",
    "Tool",
    "ToolExecutor",
    "ToolFault",
    "ToolPolicy",
    "ToolResult",
    "ToolStats",
    "open_tools",
]
