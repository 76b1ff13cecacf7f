"""Tools: what agents may call, and the executor that runs their calls.

A turn loop uses it like this::

    async with open_tools(agent.tools, base=folder, env=env, allow_code=...) as executor:
        request["tools"] = executor.definitions
        result = await executor.call(call, CallContext(deadline=loop.time() + 60))

types         tools, policies, results
loader        the tools of a job, opened
truncate      results and messages cut to a length
executor      checks, shares, caches, limits and runs calls
python_tool, python_schema, threads    Python functions
command_tool  programs
mcp           tools of MCP servers
builtin       ``http_get``, ``read_file``, ``web_search``, ``sql`` and code

To add a built-in tool: a module in ``builtin``, its opener in ``loader``, and its name in
``Builtin`` of :mod:`bagent.job.spec.agent`.
"""

from __future__ import annotations

from bagent.tools.executor import CallContext, ToolExecutor
from bagent.tools.loader import open_tools
from bagent.tools.types import FaultKind, Tool, ToolFault, ToolPolicy, ToolResult

__all__ = [
    "CallContext",
    "FaultKind",
    "Tool",
    "ToolExecutor",
    "ToolFault",
    "ToolPolicy",
    "ToolResult",
    "open_tools",
]
