"""A small MCP server for tests: ``python mcp_server.py stdio FOLDER`` or ``http FOLDER``.

It writes its process id to ``FOLDER/starts``, one line a start, and with ``http`` its port to
``FOLDER/port``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

FOLDER = Path(sys.argv[2])
server = MCPServer("small")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(words: str) -> str:
    """Fail with words."""
    raise ToolError(words)


@server.tool(name="dotted.name")
def dotted() -> str:
    """A name that a function may not have."""
    return "dotted"


@server.tool()
def environment() -> str:
    """The names of the environment."""
    return " ".join(sorted(os.environ))


@server.tool()
def die() -> str:
    """End the server in the call."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def die_once() -> str:
    """End the server in its first life only."""
    if len((FOLDER / "starts").read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@server.tool()
async def hang() -> str:
    """Never answer."""
    import anyio

    await anyio.sleep_forever()
    return "not reached"


@server.tool()
def header(context: Context) -> str:
    """The header X-Key of the request."""
    headers = context.headers or {}
    return str(headers.get("x-key"))


def main() -> None:
    """Serve until the end."""
    with (FOLDER / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if sys.argv[1] == "stdio":
        server.run("stdio")
        return
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    (FOLDER / "port.part").write_text(str(listening.getsockname()[1]))
    (FOLDER / "port.part").rename(FOLDER / "port")
    config = uvicorn.Config(server.streamable_http_app(), log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
