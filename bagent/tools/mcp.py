"""Tools of servers of the Model Context Protocol (https://modelcontextprotocol.io).

The official ``mcp`` package connects to them: over stdin and stdout of a program, or over HTTP (the
streamable transport).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from bagent.errors import MissingPackage, UsageError
from bagent.tools.truncate import shorten
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

if TYPE_CHECKING:
    from mcp import Client

START_SECONDS = 60.0
"""Seconds in which a server must start and list its tools; npx may have to download it."""

STOP_SECONDS = 10.0
MOST_TOOLS = 1_000
RESTARTS = 1
STDERR_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class McpConfig:
    """A server: its URL and headers, or a program with its working directory and environment."""

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: Path = Path()
    start_seconds: float = START_SECONDS

    @property
    def label(self) -> str:
        """The server's name in messages, without secrets."""
        return (self.url or "").partition("?")[0] or " ".join(self.command)


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool as its server lists it; ``reads_only`` if it reports to change nothing."""

    name: str
    description: str
    parameters: Json
    reads_only: bool


class McpServer:
    """One server, started when it is opened and once more if it dies.

    A task of its own holds the connection: the package's contexts must be left in the task that
    entered them.
    """

    def __init__(self, config: McpConfig) -> None:
        self.config = config
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._restarting: asyncio.Task[str] | None = None
        self._restarts = 0
        self._stderr: IO[str] | None = None

    async def open(self) -> list[McpTool]:
        """Start the server and list its tools.

        Raises:
            MissingPackage: the ``mcp`` package is not installed.
            UsageError: the server cannot be started or reached, or does not answer in time.
        """
        try:
            import mcp  # noqa: F401 (it is installed)
        except ImportError:
            raise MissingPackage(
                "mcp tools need the package mcp", hint="pip install 'mcp>=2.3,<3'"
            ) from None
        _keep_quiet()
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        fault = await self._start()
        if fault:
            await self.close()
            raise UsageError(f"mcp: {self.config.label}: {fault}")
        listing = asyncio.ensure_future(self._list())
        await asyncio.wait((listing,), timeout=self.config.start_seconds)
        error = listing.exception() if listing.done() else None
        if listing.done() and error is None:
            return listing.result()
        listing.cancel()
        why = (
            _innermost_message(error)
            if error
            else f"no list of tools in {self.config.start_seconds:g} s"
        )
        why += self._last_words()
        await self.close()
        raise UsageError(f"mcp: {self.config.label}: {why}")

    async def call(self, name: str, arguments: Arguments, *, again: bool) -> str:
        """Call a tool and return the text of its result.

        Args:
            name: the tool.
            arguments: its arguments.
            again: whether to call once more where the server died in the call.

        Raises:
            ToolFault: the tool failed, or the server died.
        """
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._alive()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolFault(shorten(error.message)) from None
            if self._client is client:
                self._client = None
            if not again:
                raise ToolFault("its server ended in the call, which may have run") from None
            return await self.call(name, arguments, again=False)
        text = _text(result)
        if result.is_error:
            raise ToolFault(shorten(text or "it failed"))
        return text

    async def close(self) -> None:
        """End the server."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait((self._restarting,))
        await self._end()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    # --- the connection -----------------------------------------------------------------------

    async def _alive(self) -> Client:
        if self._owner is not None and self._owner.done():
            self._client = None
        if self._client is None:
            if self._restarting is None:
                if self._restarts >= RESTARTS:
                    raise ToolFault(f"its server ended; it was restarted {self._restarts} time")
                self._restarts += 1
                self._restarting = asyncio.ensure_future(self._restart())
            # All calls wait for one restart, which continues when one of them is cancelled.
            fault = await asyncio.shield(self._restarting)
            if fault or self._client is None:
                raise ToolFault(f"its server ended and cannot be started again: {fault}")
        return self._client

    async def _restart(self) -> str:
        try:
            await self._end()
            return await self._start()
        finally:
            self._restarting = None

    async def _start(self) -> str:
        """Connect; return why it failed, empty if it did not."""
        self._stop = asyncio.Event()
        ready = asyncio.Event()
        owner = asyncio.ensure_future(self._own(ready, self._stop))
        self._owner = owner
        waiting = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait(
                (owner, waiting),
                timeout=self.config.start_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiting.cancel()
        if ready.is_set():
            return ""
        if not owner.done():
            await self._end()
            return f"no answer in {self.config.start_seconds:g} s{self._last_words()}"
        error = None if owner.cancelled() else owner.exception()
        return (_innermost_message(error) if error else "it ended") + self._last_words()

    async def _own(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        async with self._transport() as transport, _client(transport) as client:
            self._client = client
            ready.set()
            await stop.wait()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self.config
        if config.url is None:
            program, *arguments = config.command
            parameters = StdioServerParameters(
                command=program,
                args=arguments,
                env=dict(config.env),
                cwd=config.cwd,
                # An invalid byte would end the reader, and with it every later call.
                encoding_error_handler="replace",
            )
            assert self._stderr is not None
            yield stdio_client(parameters, errlog=self._stderr)  # type: ignore[arg-type]
        else:
            from mcp.shared._httpx_utils import create_mcp_http_client

            async with create_mcp_http_client(headers=dict(config.headers)) as http:
                yield streamable_http_client(config.url, http_client=http)

    async def _end(self) -> None:
        owner, self._owner, self._client = self._owner, None, None
        if owner is None:
            return
        self._stop.set()
        await asyncio.wait((owner,), timeout=STOP_SECONDS)
        if not owner.done():
            owner.cancel()
            await asyncio.wait((owner,), timeout=STOP_SECONDS)
        if owner.done() and not owner.cancelled():
            owner.exception()  # mark its exception as retrieved

    async def _list(self) -> list[McpTool]:
        client = self._client
        assert client is not None
        tools: list[McpTool] = []
        cursor: str | None = None
        checks = False
        while len(tools) < MOST_TOOLS:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                hints = tool.annotations
                tools.append(
                    McpTool(
                        tool.name,
                        tool.description or "",
                        tool.input_schema,
                        bool(hints is not None and hints.read_only_hint),
                    )
                )
                checks = checks or tool.output_schema is not None
            cursor = page.next_cursor
            if not cursor:
                break
        if checks:
            # The package imports it at the first result; with its format checkers that takes
            # seconds, and would stall every request of the run.
            await asyncio.to_thread(import_module, "jsonschema")
        return tools

    def _last_words(self) -> str:
        """Return the end of the server's error output."""
        if self._stderr is None:
            return ""
        size = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, size - STDERR_BYTES))
        text = " ".join(self._stderr.read().split())
        return f": {text[-500:]}" if text else ""


def _client(transport: Any) -> Client:
    from mcp import Client

    make: Callable[..., Client] = Client
    return make(transport)


def _keep_quiet() -> None:
    """Keep the package from logging a traceback for every odd line that a server writes."""
    log = logging.getLogger("mcp")
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def _innermost_message(error: BaseException) -> str:
    """Return the innermost error in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = " ".join(str(error).split())[:500]
    return message or type(error).__name__


def _text(result: Any) -> str:
    """Return the texts of a result; other content is named, a bare structure is JSON."""
    parts: list[str] = []
    for block in result.content or []:
        resource = getattr(block, "resource", None)
        if block.type == "text":
            parts.append(block.text)
        elif isinstance(text := getattr(resource, "text", None), str):
            parts.append(text)
        else:
            uri = getattr(block, "uri", None) or getattr(resource, "uri", None)
            parts.append(f"[{block.type}{f' {uri}' if uri else ''}]")
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)
