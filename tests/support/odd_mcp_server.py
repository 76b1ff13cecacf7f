"""An MCP server with bad habits, over pipes: ``python odd_mcp_server.py FOLDER``.

It writes words, half messages and bytes that are no UTF-8 among its messages, tells that its tools
have changed with every call, and has one tool fewer by then than it listed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def say(text: str | dict[str, Any]) -> None:
    """Write one line."""
    print(text if isinstance(text, str) else json.dumps({"jsonrpc": "2.0", **text}), flush=True)


def answer(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, or its error."""
    if method == "initialize":
        told = {"tools": {"listChanged": True}}
        info = {"name": "odd", "version": "1"}
        version = given["protocolVersion"]
        return {"result": {"protocolVersion": version, "capabilities": told, "serverInfo": info}}
    if method == "tools/list":
        schema = {"type": "object"}
        return {
            "result": {"tools": [{"name": n, "inputSchema": schema} for n in ("stays", "goes")]}
        }
    if method == "tools/call" and given["name"] == "stays":
        return {"result": {"content": [{"type": "text", "text": "still here"}]}}
    return {"error": {"code": -32602, "message": "Unknown tool"}}


def main() -> None:
    """Serve until the end of the input."""
    (Path(sys.argv[1]) / "started").write_text(str(os.getpid()))
    say("Starting the odd server \u2026")
    for line in sys.stdin:
        message = json.loads(line)
        say(f"debug: {message['method']}")
        if "id" not in message:
            continue
        say('{"jsonrpc": "2.0", "id": ')
        sys.stdout.buffer.write(b"\xff\xfe\n")
        sys.stdout.flush()
        if message["method"] == "tools/call":
            say({"method": "notifications/tools/list_changed"})
            say({"id": 999_999, "result": {}})
        say({"id": message["id"], **answer(message["method"], message.get("params") or {})})


if __name__ == "__main__":
    main()
